"""Whole models see neither the future, nor other documents, nor padding: by changing them and by gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cubit_jax.layers import MIXERS
from cubit_jax.model import LanguageModel, ModelConfig

LENGTH, FIRST = 44, 17
# The solve of DeltaFormer is Cubit's; its rows here are left to the full tier.
CAUSAL = [pytest.param(mixer, marks=[pytest.mark.full] if mixer == "deltaformer" else []) for mixer in MIXERS]
BACKENDS = [
    pytest.param(
        mixer,
        implementation,
        marks=[pytest.mark.full] if implementation == "reference" or mixer == "deltaformer" else [],
    )
    for mixer in MIXERS
    for implementation in ("reference", "xla")
]


def make_config(mixer, implementation, vocab_size=31):
    return ModelConfig(
        vocab_size=vocab_size,
        num_layers=2,
        model_dim=16,
        num_heads=2,
        head_dim=8,
        mlp_dim=16,
        seq_len=LENGTH,
        mixers=(mixer,),
        implementation=implementation,
    )


@functools.cache
def parameters(mixer, vocab_size=31):
    """The same for every implementation; the reference initialises fastest."""
    model = LanguageModel(make_config(mixer, "reference", vocab_size))
    return jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]


@functools.cache
def forward_and_gradient(mixer, implementation):
    """(tokens, segment_ids, positions, weights) -> logits and the gradient of the weighted sum of log-likelihoods."""
    model = LanguageModel(make_config(mixer, implementation))

    def loss(params, tokens, segment_ids, positions, weights):
        logits = model.apply({"params": params}, tokens, segment_ids=segment_ids, positions=positions)
        likelihood = jax.nn.log_softmax(logits)[..., :7].sum(-1)
        return jnp.sum(likelihood * weights), logits

    function = jax.jit(jax.grad(loss, has_aux=True))

    def run(tokens, segment_ids, positions, weights):
        gradient, logits = function(parameters(mixer), *map(jnp.asarray, (tokens, segment_ids, positions, weights)))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((gradient, logits)))
        return np.asarray(logits), gradient

    return run


def assert_close(actual, expected, limit, error):
    jax.tree.map(lambda a, b: np.testing.assert_array_less(error(a, b), limit), actual, expected)


def random_tokens(rows, seed=0):
    return np.random.default_rng(seed).integers(0, 31, (rows, LENGTH)).astype(np.int32)


@pytest.mark.parametrize("mixer, implementation", BACKENDS)
def test_packed_documents_do_not_leak(mixer, implementation, error):
    run = forward_and_gradient(mixer, implementation)
    column = np.arange(LENGTH)
    second = column >= FIRST
    segment_ids = np.broadcast_to(1 + second, (2, LENGTH)).astype(np.int32)
    positions = np.broadcast_to(np.where(second, column - FIRST, column), (2, LENGTH)).astype(np.int32)
    tokens = random_tokens(2)
    logits, gradient = run(tokens, segment_ids, positions, second * np.ones((2, 1), np.float32))

    changed = np.where(second, tokens, (tokens + 5) % 31)
    other, other_gradient = run(changed, segment_ids, positions, second * np.ones((2, 1), np.float32))
    assert error(other[:, FIRST:], logits[:, FIRST:]) <= 1e-6
    assert np.abs(other[:, :FIRST] - logits[:, :FIRST]).max() > 1e-3
    assert_close(other_gradient, gradient, 1e-6, error)

    # The second document alone, at the beginning of a row.
    rest = LENGTH - FIRST
    alone = np.pad(tokens[:, FIRST:], [(0, 0), (0, FIRST)])
    real = np.broadcast_to(column < rest, (2, LENGTH))
    alone_logits, alone_gradient = run(
        alone, real.astype(np.int32), column * np.ones((2, 1), np.int32), real.astype(np.float32)
    )
    assert error(logits[:, FIRST:], alone_logits[:, :rest]) <= 1e-5
    assert_close(gradient, alone_gradient, 1e-4, error)
    # Without the ids the second document does read the first: the comparison above is not void.
    joined, _ = run(tokens, np.ones_like(segment_ids), positions, real.astype(np.float32))
    assert np.abs(joined[:, FIRST:] - logits[:, FIRST:]).max() > 1e-3


@pytest.mark.parametrize("mixer, implementation", BACKENDS)
def test_padding_on_either_side_and_rows_of_padding(mixer, implementation, error):
    run = forward_and_gradient(mixer, implementation)
    column = np.arange(LENGTH, dtype=np.int32)
    # Segments of lengths 1, 9, 1 and 6, and what surrounds them is padding or nothing.
    pattern = np.repeat([1, 2, 3, 4], [1, 9, 1, 6])
    positions = np.concatenate([np.arange(n) for n in (1, 9, 1, 6)])
    content = np.random.default_rng(1).integers(0, 31, len(pattern))
    gap = LENGTH - len(pattern)
    layouts = {"right": (0, gap), "left": (gap, 0), "middle": (5, gap - 5)}

    def row(name):
        pads = layouts[name]
        return (
            np.pad(content, pads, constant_values=3),
            np.pad(pattern, pads),
            np.pad(positions, pads),
            np.pad(np.ones(len(pattern)), pads),
        )

    dead = (column * 0 + 7, column * 0, column, column * 0.0)

    def batch(*rows):
        tokens, segment_ids, positions, weights = map(np.stack, zip(*rows))
        return run(
            tokens.astype(np.int32),
            segment_ids.astype(np.int32),
            positions.astype(np.int32),
            weights.astype(np.float32),
        )

    logits, gradient = batch(row("right"), dead)
    real = logits[0, : len(pattern)]
    for name in ("left", "middle"):
        moved, moved_gradient = batch(row(name), dead)
        start = layouts[name][0]
        assert error(moved[0, start : start + len(pattern)], real) <= 1e-5
        assert_close(moved_gradient, gradient, 1e-4, error)
    # Each segment alone, first in a row without anything else.
    starts = np.cumsum([0, 1, 9, 1])
    for start, size in zip(starts[1::2], (9, 6)):
        tokens = np.pad(content[start : start + size], (0, LENGTH - size), constant_values=11)
        alone, _ = batch((tokens, (column < size) * 1, column, column * 0.0), dead)
        assert error(alone[0, :size], real[start : start + size]) <= 1e-5
    # A row of nothing but padding adds nothing.
    _, twice = batch(row("right"), row("right"))
    assert_close(jax.tree.map(lambda leaf: 2 * leaf, gradient), twice, 1e-5, error)


LONG, PREFIXES = 200, (1, 3, 7, 15, 31, 32, 33, 63, 64, 65, 127, 128)


@functools.cache
def suffixes(mixer):
    """Tokens [1 + prefixes, L], rows that begin as the first one does, each token of which occurs once; their logits.

    And position -> bool [V]: the tokens that the first row's logits there depend on, by gradient.
    """
    model, params = LanguageModel(make_config(mixer, "xla", vocab_size=256)), parameters(mixer, 256)
    rng = np.random.default_rng(0)
    tokens = np.tile(rng.permutation(256)[:LONG], (1 + len(PREFIXES), 1))
    for row, prefix in enumerate(PREFIXES, 1):
        tokens[row, prefix:] = rng.permutation(256)[: LONG - prefix]

    @jax.jit
    def run(position):
        def output(table):
            logits = model.apply({"params": {**params, "embed": {"embedding": table}}}, jnp.asarray(tokens))
            return jnp.sum(jnp.sin(logits[0, position])), logits

        gradient, logits = jax.grad(output, has_aux=True)(params["embed"]["embedding"])
        return jnp.any(gradient != 0, axis=1), logits

    return tokens, np.asarray(run(0)[1]), lambda position: np.asarray(run(position)[0])


@pytest.mark.parametrize("mixer", CAUSAL)
def test_prefixes_do_not_depend_on_suffixes(mixer, error):
    _, logits, _ = suffixes(mixer)
    for row, prefix in enumerate(PREFIXES, 1):
        assert error(logits[row, :prefix], logits[0, :prefix]) <= 1e-5
        assert np.abs(logits[row, prefix:] - logits[0, prefix:]).max() > 1e-2


@pytest.mark.parametrize("mixer", CAUSAL)
def test_gradient_of_an_output_stops_at_its_position(mixer):
    tokens, _, reached = suffixes(mixer)
    for position in (0, 31, 64, 99, LONG - 1):
        np.testing.assert_array_equal(np.flatnonzero(reached(position)), np.sort(tokens[0, : position + 1]))
