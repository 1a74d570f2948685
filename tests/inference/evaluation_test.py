"""The held-out loss counts every target once, whatever the batches."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cubit_jax.inference.evaluation import heldout_loss
from cubit_jax.model import LanguageModel, ModelConfig

ROWS, LENGTH, VOCAB = 7, 24, 31


@pytest.fixture(scope="module")
def model():
    return LanguageModel(
        ModelConfig(
            vocab_size=VOCAB,
            num_layers=1,
            model_dim=16,
            num_heads=2,
            head_dim=8,
            mlp_dim=16,
            seq_len=LENGTH,
            mixers=("cubit",),
            dropout=0.5,
            implementation="reference",
        )
    )


@pytest.fixture(scope="module")
def params(model):
    return jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]


@pytest.fixture(scope="module")
def rows():
    """Rows of very different numbers of real targets."""
    rng = np.random.default_rng(0)
    real = np.arange(LENGTH) < np.array([24, 3, 1, 17, 24, 9, 2])[:, None]
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    return {
        "tokens": tokens[:, :-1] * real,
        "targets": tokens[:, 1:] * real,
        "weights": real.astype(np.float32),
        "segment_ids": real.astype(np.int32),
        "positions": np.arange(LENGTH, dtype=np.int32) * real,
    }


def batches(rows, size):
    for start in range(0, ROWS, size):
        part = {name: array[start : start + size] for name, array in rows.items()}
        yield {name: np.pad(array, [(0, size - len(array)), (0, 0)]) for name, array in part.items()}


@pytest.mark.parametrize("size", [1, 3, 8])
def test_loss_is_weighted_by_tokens(model, params, rows, size):
    logits = jax.jit(model.apply)({"params": params}, rows["tokens"], segment_ids=rows["segment_ids"])
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), rows["targets"][..., None], -1)[..., 0]
    expected = float(jnp.sum(nll * rows["weights"]) / rows["weights"].sum())
    mean_of_means = float(jnp.mean(jnp.sum(nll * rows["weights"], 1) / rows["weights"].sum(1)))
    assert abs(mean_of_means - expected) > 1e-3
    result = heldout_loss(model, params, batches(rows, size), num_bytes=200)
    assert result.tokens == 80
    assert result.loss == pytest.approx(expected, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
    assert result.bits_per_byte == pytest.approx(expected * 80 / math.log(2) / 200, rel=1e-6)


def test_uniform_model_scores_log_vocabulary(model, params, rows):
    flat = {**params, "lm_head": {"kernel": jnp.zeros_like(params["lm_head"]["kernel"])}}
    result = heldout_loss(model, flat, batches(rows, 8), num_bytes=10)
    assert result.loss == pytest.approx(math.log(VOCAB), rel=1e-6)
    assert result.perplexity == pytest.approx(VOCAB, rel=1e-6)
    assert result.bits_per_byte == pytest.approx(80 * math.log2(VOCAB) / 10, rel=1e-6)
