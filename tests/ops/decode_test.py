"""Decoding with a cache gives what the full forward gives, wherever and however a row is cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cubit_jax import ops

LENGTH, CAPACITY = 40, 48


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    query, rhs, value = (rng.normal(size=(2, LENGTH, 2, 8)).astype(np.float32) for _ in range(3))
    key = 2 * query / np.linalg.norm(query, axis=-1, keepdims=True)
    return {
        "query": query,
        "key": key,
        "rhs": rhs,
        "value": value,
        "beta": rng.normal(size=(2, LENGTH, 2)).astype(np.float32),
        "ridge": np.float32([0.1, 0.2]),
    }


def pieces(x, start, n):
    return jnp.stack([x[b, s : s + n] for b, s in enumerate(start)])


# Starts differ by row, n is the number of tokens a call; the last entries reach the end of the rows.
SPLITS = {"tokens": (1, [0, 12]), "chunks": (5, [10, 0]), "block": (16, [16, 8])}


@pytest.fixture(scope="module")
def full(arrays):
    """u and o of the whole rows."""

    @functools.cache
    def run(form, window):
        options = {"window": window, "scale": 0.7}
        query, key, rhs = (jnp.asarray(arrays[name]) for name in ("query", "key", "rhs"))

        @jax.jit
        def mixer(query, key, rhs):
            u = ops.kernel_solve(query, key, rhs, **{form: jnp.asarray(arrays[form])}, **options)
            return u, ops.attention(query, key, u, **options)

        return mixer(query, key, rhs)

    return run


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("form", ["ridge", "beta"])
def test_cached_equals_full(form, split, window, arrays, full, error):
    n, first = SPLITS[split]
    coefficient = {form: jnp.asarray(arrays[form])}
    options = {"window": window, "scale": 0.7}
    u, o = full(form, window)
    # What lies beyond the tokens so far is left over from another sequence.
    before = jnp.arange(CAPACITY) < jnp.array(first)[:, None]
    pad = [(0, 0), (0, CAPACITY - LENGTH), (0, 0), (0, 0)]
    key_cache, u_cache = (jnp.where(before[..., None, None], jnp.pad(x, pad), 1e3) for x in (arrays["key"], u))
    start = jnp.array(first, jnp.int32)

    @jax.jit
    def step(key_cache, u_cache, query, key, rhs, coefficient, start):
        key_cache = ops.write_cache(key_cache, key, start)
        new = ops.kernel_solve_cached(query, key_cache, u_cache, rhs, start, **coefficient, **options)
        u_cache = ops.write_cache(u_cache, new, start)
        return key_cache, u_cache, new, ops.attention_cached(query, key_cache, u_cache, start, **options)

    for _ in range((LENGTH - max(first)) // n):
        part = {name: pieces(x, start, n) for name, x in arrays.items() if name != "ridge"}
        now = {"beta": part["beta"]} if form == "beta" else coefficient
        key_cache, u_cache, new, out = step(key_cache, u_cache, part["query"], part["key"], part["rhs"], now, start)
        assert error(new, pieces(u, start, n)) < 1e-5
        assert error(out, pieces(o, start, n)) < 1e-5
        start += n
    assert max(start) > LENGTH - n


def test_dtypes(arrays):
    query, key, value = (jnp.asarray(arrays[n], jnp.bfloat16) for n in ("query", "key", "value"))
    start = jnp.array([39, 20])
    new = ops.kernel_solve_cached(
        query[:, :1], key, jnp.float32(arrays["rhs"]), value[:, :1], start, ridge=jnp.float32([0.1, 0.2])
    )
    assert new.dtype == jnp.float32
    assert ops.attention_cached(query[:, :1], key, value, start).dtype == jnp.bfloat16
    assert ops.attention_cached(query[:, :1], key, jnp.float32(value), start).dtype == jnp.bfloat16


def test_write_cache_drops_what_exceeds_the_capacity():
    cache = ops.write_cache(jnp.zeros((2, 5, 1)), jnp.arange(1, 7.0).reshape(2, 3, 1), jnp.array([1, 3]))
    assert cache[..., 0].tolist() == [[0, 1, 2, 3, 0], [0, 0, 0, 4, 5]]


def test_a_row_that_sees_nothing(arrays):
    """The first token of the beta form, and of a window that has passed everything."""
    query, key, rhs = (jnp.asarray(arrays[n]) for n in ("query", "key", "rhs"))
    new = ops.kernel_solve_cached(
        query[:, :1], key, rhs, rhs[:, :1], jnp.zeros(2, jnp.int32), beta=jnp.asarray(arrays["beta"][:, :1])
    )
    assert np.array_equal(new, rhs[:, :1])
    last = ops.kernel_solve_cached(
        query[:, -1:],
        key,
        rhs,
        rhs[:, -1:],
        jnp.full(2, LENGTH - 1),
        beta=jnp.asarray(arrays["beta"][:, -1:]),
        window=1,
    )
    assert np.array_equal(last, rhs[:, -1:])


def test_exactly_one_of_ridge_and_beta(arrays):
    x = jnp.asarray(arrays["query"])
    with pytest.raises(ValueError, match="exactly one"):
        ops.kernel_solve_cached(x[:, :1], x, x, x[:, :1], jnp.zeros(2, jnp.int32))
