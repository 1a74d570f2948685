"""The JSON files of a run's folder (config, hashes of the data, note of a stop) and the refusal to mix two runs."""

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

from absl import logging
from ml_collections import ConfigDict

from cubit_jax.runtime import distributed
from cubit_jax.runtime.errors import UserError
from cubit_jax.runtime.files import write_atomically
from cubit_jax.runtime.lock import now

# What may differ when a run goes on: how fast it runs, what it costs and how often it reports, not what is learned.
# num_steps may be raised to go on longer; the learning rate then follows the schedule of the new length. Where the data
# lies may change because corpus.json says what is in it.
MAY_CHANGE = (
    "num_steps",
    "accumulation_steps",
    "log_every",
    "eval_every",
    "checkpoint_every",
    "keep_checkpoints",
    "keep_best",
    "diagnostics_every",
    "max_skipped_updates",
    "model.remat",
    "model.implementation",
    "data.num_workers",
    "data.path",
    "data.heldout_path",
    "data.tokenizer",
    "mesh",
    "profile",
)

# config.json and corpus.json are written before the first step, and depend on the command and the data alone.
_ADVICE = (
    "put a copy back, or start the same train command in another --workdir, which writes the same file anew, and copy "
    "it from there"
)


def with_absolute_paths(config: ConfigDict) -> ConfigDict:
    """A copy of `config` whose paths do not depend on the current folder: the run may go on from another one."""
    config = config.copy_and_resolve_references()
    for part, names in ((config.data, ("path", "heldout_path", "tokenizer")), (config, ("init_from",))):
        for name in names:
            if part[name]:
                part[name] = os.path.abspath(os.path.expanduser(part[name]))
    return config


def read_config(workdir: str | pathlib.Path) -> ConfigDict:
    """The config of the run in `workdir`; UserError where there is none, or it cannot be read."""
    config = _read(_path(workdir))
    if config is None and has_begun(workdir):
        raise UserError(f"{workdir} has checkpoints but no config.json: {_ADVICE}")
    if config is None:
        raise UserError(f"no run in {workdir}: config.json is missing; python -m cubit_jax.train makes one")
    if not all(isinstance(config.get(name), dict) for name in ("model", "data", "mesh")):
        raise UserError(f"{_path(workdir)} is not the config of a run: it has no model, data or mesh; {_ADVICE}")
    return ConfigDict(config)


def has_begun(workdir: str | pathlib.Path) -> bool:
    """Whether the run in `workdir` has a checkpoint, complete or not. A start before the first one may be replaced."""
    return any(path.name.isdecimal() for path in pathlib.Path(workdir, "checkpoints").glob("*"))


def check_config(workdir: str | pathlib.Path, config: ConfigDict) -> None:
    """Raises UserError, listing the fields that differ, if `workdir` holds a run of another config, or a broken one.

    Fields in MAY_CHANGE may differ. Writes nothing.
    """
    if not has_begun(workdir):
        return
    if read_corpus(workdir) is None:
        raise UserError(f"{workdir} has checkpoints but no corpus.json, which says what they learned from: {_ADVICE}")
    if fields := _differences(_flatten(read_config(workdir)), _flatten(config), _may_change):
        raise UserError(
            f"{workdir} holds a run of another config; these fields differ: {fields}; "
            "use another --workdir, or the values it was started with"
        )


def check_processes(config: ConfigDict) -> None:
    """Raises UserError, listing the fields that differ, if this process was given another config than process 0."""
    first = json.loads(distributed.from_first(config.to_json(), "config"))
    if fields := _differences(_flatten(first), _flatten(config)):
        raise UserError(f"the processes were given different configs; process 0 there: {fields}")


def mark_preempted(workdir: str | pathlib.Path, step: int, signal: str) -> None:
    """Leaves workdir/preempted.json, which says that the run was stopped by a signal and saved at `step`."""
    _write(pathlib.Path(workdir, "preempted.json"), {"step": step, "signal": signal, "time": now()})


def read_preempted(workdir: str | pathlib.Path) -> dict[str, Any] | None:
    """{"step", "signal", "time"} of the last stop by a signal; None if there was none since the last start."""
    try:
        return _read(pathlib.Path(workdir, "preempted.json"))
    except UserError as error:  # a note, which the run does not need
        logging.warning("%s", error)
        return None


def clear_preempted(workdir: str | pathlib.Path) -> None:
    """Removes workdir/preempted.json, if it is there."""
    pathlib.Path(workdir, "preempted.json").unlink(missing_ok=True)


def _differences(there: dict, here: dict, leave_out: Callable[[str], bool] = lambda name: False) -> str:
    return ", ".join(
        f"{name} ({there.get(name)!r} there, {here.get(name)!r} here)"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name) and not leave_out(name)
    )


def write_config(workdir: str | pathlib.Path, config: ConfigDict) -> None:
    """Writes workdir/config.json, whole or not at all; makes the folder."""
    _write(_path(workdir), json.loads(config.to_json()))


def read_corpus(workdir: str | pathlib.Path) -> dict[str, Any] | None:
    """{"documents", "tokenizer"}: hashes of what the run in `workdir` learns from; None before its first start."""
    return _read(pathlib.Path(workdir, "corpus.json"))


def check_corpus(workdir: str | pathlib.Path, corpus: dict[str, str]) -> None:
    """Raises UserError if the run in `workdir` began with other documents or another tokenizer. Writes nothing.

    Args:
      corpus: {"documents": hash} or {"tokenizer": hash}, or both.
    """
    if not has_begun(workdir):
        return
    there = read_corpus(workdir) or {}
    for name, value in corpus.items():
        if name in there and there[name] != value:
            raise UserError(
                f"the {name} changed since the run in {workdir} began; put the same back, or train in a new workdir"
            )


def write_corpus(workdir: str | pathlib.Path, corpus: dict[str, str]) -> None:
    """Writes workdir/corpus.json, whole or not at all; makes the folder. Argument as of `check_corpus`."""
    _write(pathlib.Path(workdir, "corpus.json"), corpus)


def _read(path):
    """The object that a JSON file holds; None where there is no file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"cannot read {path}: {error}; {_ADVICE}") from error
    if not isinstance(value, dict):
        raise UserError(f"cannot read {path}: expected a JSON object, found {json.dumps(value)[:40]}; {_ADVICE}")
    return value


def _write(path, value):
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def _path(workdir):
    return pathlib.Path(workdir, "config.json")


def _may_change(name):
    return any(name == field or name.startswith(f"{field}.") for field in MAY_CHANGE)


def _flatten(config, prefix=""):
    """{"model.num_layers": 4, ...} with the values as JSON has them (lists for tuples)."""
    result = {}
    for name, value in json.loads(config.to_json()).items() if hasattr(config, "to_json") else config.items():
        if isinstance(value, dict):
            result |= _flatten(value, f"{prefix}{name}.")
        else:
            result[prefix + name] = value
    return result
