"""Decoding with a cache gives the logits of the full forward pass, wherever a row is cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cubit_jax.layers import MIXERS
from cubit_jax.model import LanguageModel, ModelConfig, can_decode, init_cache

LENGTH, BLOCK = 260, 256  # the blockwise ops cut a sequence of this length at 256
SPLITS = (1, BLOCK - 1, BLOCK, BLOCK + 1, LENGTH - 1)


def make_config(mixers, **overrides):
    fields = {
        "vocab_size": 61,
        "num_layers": 3,
        "model_dim": 16,
        "num_heads": 2,
        "head_dim": 8,
        "mlp_dim": 16,
        "seq_len": LENGTH,
        "mixers": mixers,
    } | overrides
    return ModelConfig(**fields)


def make(mixers, **overrides):
    config = make_config(mixers, **overrides)
    model = LanguageModel(config)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    return config, model, params


def tokens_of(rows, length=LENGTH):
    return jax.random.randint(jax.random.key(1), (rows, length), 0, 61)


def prefix(counts, width):
    """Segment ids of rows with these numbers of real tokens, the rest of `width` padding."""
    return (jnp.arange(width) < jnp.asarray(counts)[:, None]).astype(jnp.int32)


DECODING = [name for name in MIXERS if can_decode(make_config((name,)))]


# The other mixers decode below, in pieces, in a model of them all.
@pytest.mark.parametrize(
    "mixer", [pytest.param(name, marks=[] if name in ("cubit", "cem") else pytest.mark.full) for name in DECODING]
)
def test_prefill_then_token_by_token(mixer, error):
    config, model, params = make((mixer,))
    tokens = tokens_of(len(SPLITS))
    full = np.asarray(jax.jit(model.apply)(params, tokens))
    cache = init_cache(config, len(SPLITS), LENGTH)
    prompt = prefix(SPLITS, LENGTH)
    logits, cache = jax.jit(lambda cache: model.apply(params, tokens, segment_ids=prompt, cache=cache, prefill=True))(
        cache
    )
    real = np.asarray(prompt)[..., None]
    assert error(np.asarray(logits) * real, full * real) <= 1e-4
    np.testing.assert_array_equal(cache["length"], SPLITS)

    def step(cache, _):
        # Rows that have reached the end go on with a last token: what they give then is not looked at.
        place = cache["length"][:, None]
        token = jnp.take_along_axis(tokens, jnp.minimum(place, LENGTH - 1), 1)
        logits, cache = model.apply(params, token, cache=cache)
        return cache, (place, logits)

    _, steps = jax.jit(lambda cache: jax.lax.scan(step, cache, length=LENGTH - 1))(cache)
    places, logits = jax.device_get(steps)
    for row, split in enumerate(SPLITS):
        np.testing.assert_array_equal(places[: LENGTH - split, row, 0], np.arange(split, LENGTH))
        assert error(logits[: LENGTH - split, row, 0], full[row, split:]) <= 1e-4


@pytest.mark.full
def test_three_uneven_pieces_of_unequal_rows(error):
    config, model, params = make(tuple(DECODING), num_layers=len(DECODING))
    length = 60
    tokens = tokens_of(3, length)
    full = np.asarray(jax.jit(model.apply)(params, tokens))
    pieces = np.array([[7, 40, 13], [1, 2, 57], [40, 1, 19]])
    cache, starts, parts = init_cache(config, 3, length), np.zeros(3, int), []
    append = jax.jit(model.apply)
    for counts in pieces.T:  # the first one is appended to an empty cache: as good as no cache
        place = np.minimum(starts[:, None] + np.arange(57), length - 1)
        piece = jnp.take_along_axis(tokens, jnp.asarray(place), 1)
        logits, cache = append(params, piece, segment_ids=prefix(counts, 57), cache=cache)
        parts.append([np.asarray(logits)[row, :count] for row, count in enumerate(counts)])
        starts = starts + counts
        np.testing.assert_array_equal(cache["length"], starts)
    for row in range(3):
        assert error(np.concatenate([part[row] for part in parts]), full[row]) <= 1e-4


@pytest.mark.parametrize(
    "mixer, options",
    [
        ("cubit", {"reference": "shared"}),
        pytest.param("cubit", {"lrr": False}, marks=pytest.mark.full),
        ("deltaformer", {"projection": "shared"}),
        pytest.param("attention", {}, marks=pytest.mark.full),
        pytest.param("cem", {"interaction": "lowrank", "num_recursions": 2}, marks=pytest.mark.full),
        ("cem", {"interaction": "diagonal", "num_recursions": 2, "preconditioner": "diagonal_lowrank"}),
    ],
)
def test_options_and_window(mixer, options, error):
    config, model, params = make((mixer,), options=options, window=4, scan_layers=False, num_layers=1)
    tokens = tokens_of(2, 12)

    @jax.jit
    def run(params, cache):
        first, cache = model.apply(params, tokens[:, :5], cache=cache, prefill=True)
        rest, cache = model.apply(params, tokens[:, 5:], cache=cache)
        return model.apply(params, tokens), jnp.concatenate([first, rest], 1), cache

    full, pieces, cache = run(params, init_cache(config, 2, 12))
    assert error(pieces, full) <= 1e-4
    if options.get("reference") == "shared":
        assert set(cache["layers"]["layer_0"]) == {"k", "u"}
    if mixer == "cem":  # keys, and the input where a diagonal reads it
        assert set(cache["layers"]["layer_0"]) == ({"k"} if options["interaction"] == "lowrank" else {"k", "h"})


def test_next_logits_are_those_of_the_last_real_token(error):
    config, model, params = make(("attention",))
    tokens, counts = tokens_of(3, 20), [1, 20, 7]
    full = np.asarray(jax.jit(model.apply)(params, tokens))
    logits, cache = jax.jit(functools.partial(model.apply, method="next_logits", prefill=True))(
        params, tokens, segment_ids=prefix(counts, 20), cache=init_cache(config, 3, 20)
    )
    assert error(logits, full[np.arange(3), np.array(counts) - 1]) <= 1e-4
    np.testing.assert_array_equal(cache["length"], counts)


def test_cache_arrays():
    config = make_config(("cubit",), dtype="bfloat16")
    cache = init_cache(config, 2, 5)
    shapes = {name: (array.shape, array.dtype.name) for name, array in cache["layers"]["block_0"].items()}
    assert shapes == {
        "k": ((3, 2, 5, 2, 8), "bfloat16"),
        "rn": ((3, 2, 5, 2, 8), "bfloat16"),
        "u": ((3, 2, 5, 2, 8), "float32"),
    }
    np.testing.assert_array_equal(cache["length"], [0, 0])
