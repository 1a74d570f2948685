"""The folder of a run: its config and what it learns from, and the refusal to mix two runs in one folder."""

import json
import os
import pathlib

from ml_collections import config_dict

from cubit_jax.cli import UserError

# What may differ when a run goes on: how fast it runs, what it costs and how often it reports, not what is learned.
# num_steps may be raised to go on longer; the learning rate then follows the schedule of the new length. Where the data
# lies may change because corpus.json says what is in it.
MAY_CHANGE = ("num_steps", "accumulation_steps", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints",
              "diagnostics_every", "max_skipped_updates", "model.remat", "model.implementation", "data.num_workers",
              "data.path", "data.heldout_path", "data.tokenizer", "mesh")


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
    path = _path(workdir)
    try:
        return config_dict.ConfigDict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise UserError(f"no run in {workdir}: {path.name} is missing; python -m cubit_jax.train makes one") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def check_config(workdir, config):
    """Raises UserError, listing the fields that differ, if `workdir` holds a run of another config.

    Fields in MAY_CHANGE may differ. Writes nothing.
    """
    if not _path(workdir).exists():
        return
    there, here = _flatten(read_config(workdir)), _flatten(config)
    differ = [name for name in sorted(there.keys() | here.keys())
              if there.get(name) != here.get(name) and not _may_change(name)]
    if differ:
        fields = ", ".join(f"{name} ({there.get(name)!r} there, {here.get(name)!r} here)" for name in differ)
        raise UserError(f"{workdir} holds a run of another config; these fields differ: {fields}; "
                        "use another --workdir, or the values it was started with")


def write_config(workdir, config):
    """Writes workdir/config.json, whole or not at all; makes the folder."""
    _write(_path(workdir), json.loads(config.to_json()))


def read_corpus(workdir):
    """{"documents", "tokenizer"}: hashes of what the run in `workdir` learns from; None before its first start."""
    path = pathlib.Path(workdir, "corpus.json")
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def check_corpus(workdir, corpus):
    """Raises UserError if the run in `workdir` began with other documents or another tokenizer. Writes nothing.

    Args:
      corpus: {"documents": hash} or {"tokenizer": hash}, or both.
    """
    there = read_corpus(workdir) or {}
    for name, value in corpus.items():
        if name in there and there[name] != value:
            raise UserError(f"the {name} changed since the run in {workdir} began; go on with the same, or start in "
                            "a new workdir")


def write_corpus(workdir, corpus):
    """Writes workdir/corpus.json, whole or not at all; makes the folder. Argument as of `check_corpus`."""
    _write(pathlib.Path(workdir, "corpus.json"), corpus)


def _write(path, value):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(value, indent=2) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _path(workdir):
    return pathlib.Path(workdir, "config.json")


def _may_change(name):
    return any(name == field or name.startswith(f"{field}.") for field in MAY_CHANGE)


def _flatten(config, prefix=""):
    """{"model.num_layers": 4, ...} with the values as JSON has them (lists for tuples)."""
    result = {}
    for name, value in json.loads(config.to_json()).items() if hasattr(config, "to_json") else config.items():
        if isinstance(value, dict) and value:
            result |= _flatten(value, f"{prefix}{name}.")
        else:
            result[prefix + name] = value
    return result
