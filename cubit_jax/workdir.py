"""The folder of a run: its config, and the refusal to mix two runs in one folder."""

import json
import os
import pathlib

from ml_collections import config_dict

from cubit_jax.cli import UserError

# What may differ when a run goes on: how fast it runs, what it costs and how often it reports, not what is learned.
# num_steps may be raised to go on longer; the learning rate then follows the schedule of the new length.
MAY_CHANGE = ("num_steps", "accumulation_steps", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints",
              "diagnostics_every", "max_skipped_updates", "model.remat", "model.implementation", "data.num_workers",
              "mesh")


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
    path = _path(workdir)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(json.loads(config.to_json()), indent=2) + "\n")
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
