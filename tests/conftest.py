"""Settings that every test needs before jax is imported, and the helpers that compare arrays."""

import importlib
import importlib.metadata
import os
import pathlib
import random
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Sharding tests need eight devices; everything else runs on the first of them. A test compiles far longer than it
# runs, so code is not optimised; tests of speed are given their own XLA_FLAGS (experiments/README.md).
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
    # This halves the time to compile. Later versions do not have it, and an unknown flag ends the process.
    + " --xla_cpu_use_fusion_emitters=false"
    * importlib.metadata.version("jaxlib").startswith("0.10."),
)

import numpy as np
import pytest

GOLDEN = pathlib.Path(__file__).parent / "golden"


def pytest_configure(config):
    """What one process of the run has compiled the others load: xdist's workers and the programs that tests start."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="cubit_jax_tests_")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


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


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Folder of eight small documents, about six batches of 8 x 32 tokens an epoch; no multiple of it is held out."""
    folder = tmp_path_factory.mktemp("corpus")
    words = ("the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "over", "hills", "to", "find", "its", "red")
    for number in range(8):
        source = random.Random(number)
        (folder / f"{number}.txt").write_text("\n".join(" ".join(source.choices(words, k=8)) for _ in range(12)))
    return folder


@pytest.fixture(scope="session")
def quick_programs():
    """Environment of programs that compile fast."""
    return {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@pytest.fixture(scope="session")
def last_state():
    """last_state(config, workdir) -> the training state of the last checkpoint of a run."""
    from cubit_jax.model import LanguageModel
    from cubit_jax.training import config_check
    from cubit_jax.training import step as train_step
    from cubit_jax.training.checkpoint import Checkpoints

    def read(config, workdir):
        model_config, mesh = config_check.check(config)
        return Checkpoints(workdir).restore(train_step.state_shapes(LanguageModel(model_config), config, mesh)[0])[0]

    return read
