"""The check of a whole run's config: every field by itself, then against the devices."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from cubit_jax import partitioning
from cubit_jax.model import ModelConfig
from cubit_jax.training import optimizer

_AT_LEAST_1 = (
    "num_steps",
    "batch_size",
    "accumulation_steps",
    "seq_len",
    "log_every",
    "checkpoint_every",
    "keep_checkpoints",
    "max_skipped_updates",
)


def check(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> tuple[ModelConfig, jax.sharding.Mesh]:
    """The model and the mesh of a run's config.

    Args:
      devices: to train on; None is all that JAX has.

    Raises:
      ValueError: in one line, unless the config is right in itself and fits the devices.
    """
    model_config = check_values(config)
    return model_config, make_mesh(config, model_config, devices)


def check_values(config: ConfigDict) -> ModelConfig:
    """The model of a run's config; ValueError in one line that names the field if a value is wrong by itself."""
    for name, value in _numbers(config.to_dict()):
        if not math.isfinite(value):
            raise ValueError(f"{name}={value} must be a finite number")
    for name in _AT_LEAST_1:
        if config[name] < 1:
            raise ValueError(f"{name}={config[name]} must be at least 1")
    if not 0 <= config.seed < 2**32:
        raise ValueError(f"seed={config.seed} must be at least 0 and below 2**32")
    if config.data.num_workers < 0:
        raise ValueError(f"data.num_workers={config.data.num_workers} must be at least 0")
    if config.keep_best < 0:
        raise ValueError(f"keep_best={config.keep_best} must be at least 0")
    for name in ("eval_every", "diagnostics_every"):
        if config[name] < 0:
            raise ValueError(f"{name}={config[name]} must be at least 1, or 0 for never")
    if config.profile.first_step < 0 or config.profile.num_steps < 1:
        raise ValueError(
            f"profile.first_step={config.profile.first_step} must be at least 1, or 0 for never, and "
            f"profile.num_steps={config.profile.num_steps} at least 1"
        )
    model_config = ModelConfig.from_config(config)
    optimizer.check(config)
    return model_config


def make_mesh(
    config: ConfigDict, model_config: ModelConfig, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """The device mesh of a run; ValueError in one line if the config does not fit the devices."""
    mesh = partitioning.make_mesh(config.mesh, devices)
    partitioning.check(
        mesh, batch_size=config.batch_size, accumulation_steps=config.accumulation_steps, model=model_config
    )
    return mesh


def _numbers(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(name, value) of every floating-point field, as optimizer.learning_rate."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, float):
                yield prefix + name, number
