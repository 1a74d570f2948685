"""Which setting of a run would fit, when one does not: by an estimate that starts from what the compiler said."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

_ROOM = 0.92  # share of a device's memory that an estimate may fill
_FIELDS = ("seq_len", "batch_size", "accumulation_steps", "model.remat")


def settings(config: ConfigDict) -> dict[str, Any]:
    """The fields of a config that memory depends on, beside the model and the mesh."""
    flat = {
        "seq_len": config.seq_len,
        "batch_size": config.batch_size,
        "accumulation_steps": config.accumulation_steps,
        "model.remat": config.model.remat,
    }
    return {name: flat[name] for name in _FIELDS}


def changed(config: ConfigDict, values: Mapping[str, Any]) -> ConfigDict:
    """A copy of the config with some fields, by their full names, changed."""
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(values)
    return config


def as_flags(values: Mapping[str, Any]) -> str:
    """{"mesh.fsdp": 4} -> "--config.mesh.fsdp=4"."""
    return " ".join(f"--config.{name}={value}" for name, value in values.items())


def suggest(
    config: ConfigDict, plans: Sequence[Any], state_bytes: Callable[[ConfigDict], tuple[int, int]]
) -> tuple[dict[str, Any], int] | None:
    """({field: value}, estimated bytes) of the least change with which a run should fit, or None.

    Nearest first: recomputation, then more micro-batches, then parameters split further, then the sequence split.

    Args:
      plans: those that did not fit; the first is of `config`.
      state_bytes: config -> bytes of (parameters, optimizer state) a device; ValueError where it is not allowed.
    """
    first = plans[0]
    mesh, available = first.mesh, first.available
    per_token = max(_bytes_per_token(config, plan) for plan in plans)
    powers = [2**i for i in range(13)]
    known = {}
    for context, fsdp, steps in itertools.product(powers, powers, powers):
        moved = context * fsdp
        if mesh["data"] % moved and (mesh["data"] * mesh["fsdp"]) % moved:
            continue
        sizes = dict(mesh)
        sizes["context"] *= context
        # Split further: devices move from data to fsdp; where data has none left, the sequence takes them from fsdp.
        if mesh["data"] % moved == 0:
            sizes["data"] //= moved
            sizes["fsdp"] *= fsdp
        elif fsdp == 1 and mesh["data"] == 1:
            sizes["fsdp"] //= context
        else:
            continue
        accumulation = config.accumulation_steps * steps
        ways = sizes["replica"] * sizes["data"] * sizes["fsdp"]
        if config.batch_size % (accumulation * ways):
            continue
        values = {f"mesh.{name}": size for name, size in sizes.items() if size != mesh[name]}
        if steps > 1:
            values["accumulation_steps"] = accumulation
        if config.model.remat != "full":
            values["model.remat"] = "full"
        if not values:
            continue
        key = tuple(sizes.values())
        if key not in known:
            try:
                known[key] = state_bytes(changed(config, values))
            except ValueError:
                known[key] = None
        if known[key] is None:
            continue
        parameters, moments = known[key]
        gradients = parameters * (2 if accumulation > 1 else 1)
        tokens = config.batch_size * config.seq_len / (accumulation * ways * sizes["context"])
        estimate = int(parameters + moments + gradients + per_token * tokens)
        if estimate <= _ROOM * available:
            return values, estimate
    return None


def _bytes_per_token(config, plan):
    """Bytes beside state and gradients for each token that a device has at a time, by what a plan needed."""
    state = plan.parameters + plan.optimizer
    if plan.peak > state:
        rows = plan.settings["batch_size"] / plan.settings["accumulation_steps"] / _ways(plan.mesh)
        return max(plan.peak - state - plan.parameters, 0) / (rows * plan.settings["seq_len"] / plan.mesh["context"])
    # Not compiled: what each block saves, one block at work forward and backward, one chunk of the loss.
    model = config.model
    block = 14 * model.model_dim + 6 * model.mlp_dim + 16 * model.num_heads * model.head_dim
    loss = 3 * 4 * model.vocab_size * min(128, config.seq_len) / config.seq_len
    return 2 * model.num_layers * model.model_dim + 4 * block + loss


def _ways(mesh):
    return mesh["replica"] * mesh["data"] * mesh["fsdp"]
