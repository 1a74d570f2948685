"""The folder of a run: its config and what it learns from, and the refusal to mix two runs in one folder."""

import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import socket
import time

from absl import logging
from ml_collections import config_dict

from cubit_jax.runtime import distributed
from cubit_jax.runtime.errors import UserError
from cubit_jax.runtime.files import write_atomically

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
_SEEN_WITHIN = 60  # seconds until a file that process 0 has written must be seen by all; network file systems cache


def with_absolute_paths(config):
    """A copy of `config` whose paths do not depend on the current folder: the run may go on from another one."""
    config = config.copy_and_resolve_references()
    for part, names in ((config.data, ("path", "heldout_path", "tokenizer")), (config, ("init_from",))):
        for name in names:
            if part[name]:
                part[name] = os.path.abspath(os.path.expanduser(part[name]))
    return config


def read_config(workdir):
    """The config of the run in `workdir`; UserError where there is none."""
    config = _read(_path(workdir))
    if config is None and has_begun(workdir):
        raise UserError(f"{workdir} has checkpoints but no config.json: put it back, or use another workdir")
    if config is None:
        raise UserError(f"no run in {workdir}: config.json is missing; python -m cubit_jax.train makes one")
    if not all(isinstance(config.get(name), dict) for name in ("model", "data", "mesh")):
        raise UserError(f"{_path(workdir)} is not the config of a run: it has no model, data or mesh")
    return config_dict.ConfigDict(config)


def has_begun(workdir):
    """Whether the run in `workdir` has a checkpoint; what was left by a start that had none yet is not kept."""
    return any(path.name.isdecimal() for path in pathlib.Path(workdir, "checkpoints").glob("*"))


def check_config(workdir, config):
    """Raises UserError, listing the fields that differ, if `workdir` holds a run of another config, or a broken one.

    Fields in MAY_CHANGE may differ. Writes nothing.
    """
    if not has_begun(workdir):
        return
    if read_corpus(workdir) is None:
        raise UserError(
            f"{workdir} has checkpoints but no corpus.json, which says what they learned from: put it "
            "back, or use a new workdir"
        )
    if fields := _differences(_flatten(read_config(workdir)), _flatten(config), _may_change):
        raise UserError(
            f"{workdir} holds a run of another config; these fields differ: {fields}; "
            "use another --workdir, or the values it was started with"
        )


def check_processes(config):
    """Raises UserError, listing the fields that differ, if this process was given another config than process 0."""
    first = json.loads(distributed.from_first(config.to_json(), "config"))
    if fields := _differences(_flatten(first), _flatten(config)):
        raise UserError(f"the processes were given different configs; process 0 there: {fields}")


@contextlib.contextmanager
def lock(workdir):
    """Keeps other trainers out of the folder, which is made, for as long as this one lives, however it ends.

    Process 0 of a run holds the lock, the others look whether they see it.

    Raises:
      UserError: another trainer is at work there; the processes of this run do not share the folder; it cannot be made.
    """
    path, note = pathlib.Path(workdir, "lock"), f"process {os.getpid()} on {socket.gethostname()}, {_now()}"
    if distributed.process_index():
        _await(path, distributed.from_first(note, "lock"))
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+")  # noqa: SIM115 (open for as long as the lock is held)
    except OSError as error:
        raise UserError(
            f"cannot use --workdir={workdir}: {error.strerror}; give a folder that can be written"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"another trainer is at work in {workdir} ({file.read().strip() or 'it has just begun'}); "
                "stop it or use another --workdir"
            ) from None
        except OSError as error:
            logging.warning("two trainers at once would go unnoticed: %s cannot be locked (%s)", path, error.strerror)
        try:
            file.truncate(0)
            file.write(note)
            file.flush()
        except OSError as error:
            file.truncate(0)  # what could not be written is not tried again when the file is closed
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        distributed.from_first(note, "lock")
        try:
            yield
        finally:
            file.truncate(0)


def _await(path, content):
    deadline = time.monotonic() + _SEEN_WITHIN
    while not path.exists() or path.read_text() != content:
        if time.monotonic() > deadline:
            raise UserError(
                f"process {distributed.process_index()} does not see in {path.parent} what process 0 has "
                "written there: the workdir must be on a file system that all hosts share"
            )
        time.sleep(0.1)


def mark_preempted(workdir, step, signal):
    """Leaves workdir/preempted.json, which says that the run was stopped by a signal and saved at `step`."""
    _write(pathlib.Path(workdir, "preempted.json"), {"step": step, "signal": signal, "time": _now()})


def read_preempted(workdir):
    """{"step", "signal", "time"} of the last stop by a signal; None if there was none since the last start."""
    try:
        return _read(pathlib.Path(workdir, "preempted.json"))
    except UserError as error:  # a note, which the run does not need
        logging.warning("%s", error)
        return None


def clear_preempted(workdir):
    """Removes workdir/preempted.json, if it is there."""
    pathlib.Path(workdir, "preempted.json").unlink(missing_ok=True)


def _now():
    return datetime.datetime.now().astimezone().isoformat(" ", "seconds")


def _differences(there, here, leave_out=lambda name: False):
    return ", ".join(
        f"{name} ({there.get(name)!r} there, {here.get(name)!r} here)"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name) and not leave_out(name)
    )


def write_config(workdir, config):
    """Writes workdir/config.json, whole or not at all; makes the folder."""
    _write(_path(workdir), json.loads(config.to_json()))


def read_corpus(workdir):
    """{"documents", "tokenizer"}: hashes of what the run in `workdir` learns from; None before its first start."""
    return _read(pathlib.Path(workdir, "corpus.json"))


def check_corpus(workdir, corpus):
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


def write_corpus(workdir, corpus):
    """Writes workdir/corpus.json, whole or not at all; makes the folder. Argument as of `check_corpus`."""
    _write(pathlib.Path(workdir, "corpus.json"), corpus)


def _read(path):
    """The object that a JSON file holds; None where there is no file."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"cannot read {path}: expected a JSON object, found {json.dumps(value)[:40]}")
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
