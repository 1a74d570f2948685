"""Settings that every test needs before jax is imported, and the helpers that compare arrays."""

import importlib
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Sharding tests need eight devices; everything else runs on the first of them. A test compiles far longer than it
# runs, so code is not optimised; tests of speed are given their own XLA_FLAGS (experiments/README.md).
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true",
)

import numpy as np
import pytest

GOLDEN = pathlib.Path(__file__).parent / "golden"


def _error(actual, expected):
    """max|a - b| / max|b|, the measure of every accuracy limit here (absolute where the expected array is zero)."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    if actual.size == 0:
        return 0.0
    assert np.isfinite(actual).all(), "not finite"
    return float(np.max(np.abs(actual - expected)) / (np.max(np.abs(expected)) or 1.0))


@pytest.fixture(scope="session")
def error():
    return _error


@pytest.fixture(scope="session")
def golden():
    """golden(name) -> dict of float64 arrays from tests/golden/NAME.npz."""
    return lambda name: dict(np.load(GOLDEN / f"{name}.npz"))


def _micro_config(family="cubit", **fields):
    config = importlib.import_module(f"configs.{family}").get_config("tiny")
    config.model.update(vocab_size=300, num_layers=2, model_dim=16, num_heads=2, head_dim=8, mlp_dim=32)
    config.update(seq_len=32, batch_size=8, num_steps=20)
    config.optimizer.warmup_steps = 4
    config.update_from_flattened_dict(fields)
    return config


@pytest.fixture(scope="session")
def micro_config():
    """micro_config(family, **{"model.dropout": 0.1}) -> a run that compiles and trains in seconds."""
    return _micro_config
