"""The learning rate in closed form, and weight decay that touches matrices and nothing else."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cubit_jax.model import LanguageModel, ModelConfig, unstack_layers
from cubit_jax.training import optimizer


def rate(config, update):
    """Learning rate of an update counted from 1."""
    return float(optimizer.learning_rate(config, update - 1))


def test_cosine_at_start_warmup_end_middle_and_last(micro_config):
    config = micro_config(
        **{
            "num_steps": 110,
            "optimizer.warmup_steps": 10,
            "optimizer.learning_rate": 2e-3,
            "optimizer.end_fraction": 0.1,
        }
    )
    expected = {
        1: 2e-4,
        5: 1e-3,
        10: 2e-3,
        60: (2e-3 + 2e-4) / 2,
        110: 2e-4,
        500: 2e-4,
        35: 2e-4 + 1.8e-3 * (1 + math.cos(math.pi / 4)) / 2,
    }
    for update, value in expected.items():
        assert rate(config, update) == pytest.approx(value, rel=1e-5), update


def test_wsd_is_flat_then_linear(micro_config):
    config = micro_config(
        **{
            "num_steps": 100,
            "optimizer.warmup_steps": 10,
            "optimizer.learning_rate": 1e-3,
            "optimizer.schedule": "wsd",
            "optimizer.decay_fraction": 0.2,
            "optimizer.end_fraction": 0.0,
        }
    )
    expected = {1: 1e-4, 10: 1e-3, 50: 1e-3, 80: 1e-3, 90: 5e-4, 99: 5e-5, 100: 0.0}
    for update, value in expected.items():
        assert rate(config, update) == pytest.approx(value, rel=1e-5, abs=1e-12), update


def test_rate_without_warmup_and_with_one_that_the_run_does_not_finish(micro_config):
    config = micro_config(**{"num_steps": 10, "optimizer.warmup_steps": 0})
    assert rate(config, 10) == pytest.approx(config.optimizer.learning_rate * config.optimizer.end_fraction)
    config = micro_config(**{"num_steps": 10, "optimizer.warmup_steps": 20})
    assert rate(config, 10) == pytest.approx(config.optimizer.learning_rate / 2)


@pytest.mark.parametrize(
    "field, value",
    [
        ("schedule", "linear"),
        ("learning_rate", 0.0),
        ("weight_decay", -0.1),
        ("b2", 1.5),
        ("b2", 0.99999999),
        ("eps", 1e-50),
        ("b1", 1.0),
        ("b2", 1.0),
        ("clip_norm", 0.0),
    ],
)
def test_bad_fields_are_named(micro_config, field, value):
    config = micro_config()
    optimizer.check(config)
    config.optimizer[field] = value
    with pytest.raises(ValueError, match=rf"optimizer\.{field}="):
        optimizer.check(config)


def changed_by_decay(config, params):
    """Paths of the leaves that an update with zero gradients changes, each checked to shrink by the right factor."""
    transformation = optimizer.make_optimizer(config)

    @jax.jit
    def update(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.apply_updates(params, transformation.update(zeros, transformation.init(params), params)[0])

    new = update(params)
    factor = 1 - rate(config, 1) * config.optimizer.weight_decay
    changed = set()
    for (path, old), updated in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(new)):
        if not np.array_equal(old, updated):
            np.testing.assert_allclose(updated, factor * old, rtol=1e-6)
            changed.add(jax.tree_util.keystr(path, simple=True, separator="/"))
    return changed


@pytest.mark.parametrize("tied", [False, True])
def test_decay_touches_the_matrices_only_with_scan_on_and_off(micro_config, tied):
    config = micro_config(
        "cubit",
        **{
            "model.mixers": ("cubit", "deltaformer"),
            "model.tie_embeddings": tied,
            "optimizer.learning_rate": 0.1,
            "optimizer.warmup_steps": 0,
        },
    )
    model_config = ModelConfig.from_config(config)
    tokens = jnp.zeros((1, 8), jnp.int32)
    shapes = jax.eval_shape(LanguageModel(model_config).init, jax.random.key(0), tokens)["params"]
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.5, np.float32), shapes)  # a leaf of zeros would hide decay
    per_layer = {
        0: {f"mixer/{name}_proj/kernel" for name in ("q", "k", "v", "r", "o", "lrr")},
        1: {f"mixer/{name}_proj/kernel" for name in ("q", "k", "v", "w", "o", "beta")},
    }
    mlp = {f"mlp/{name}_proj/kernel" for name in ("gate", "up", "down")}
    expected = {"embed/embedding"} | (set() if tied else {"lm_head/kernel"})
    scanned = {f"layers/block_{i}/{name}" for i in (0, 1) for name in per_layer[i] | mlp}
    unrolled = {f"layer_{i}/{name}" for i in (0, 1) for name in per_layer[i] | mlp}
    assert changed_by_decay(config, params) == expected | scanned
    assert changed_by_decay(config, unstack_layers(params, model_config)) == expected | unrolled
