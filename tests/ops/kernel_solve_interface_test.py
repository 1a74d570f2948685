"""What kernel_solve accepts and returns, and the diagnostic beside it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cubit_jax import ops


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16", "float32"), ("float16", "float32", "bfloat16")])
def test_cotangents_have_the_dtype_of_their_inputs(dtypes, implementation):
    query, key, rhs = (jnp.ones((1, 5, 2, 8), dtype) for dtype in dtypes)
    for form in ({"ridge": jnp.ones(2, dtypes[0])}, {"beta": jnp.ones((1, 5, 2), dtypes[0])}):
        arrays = {"query": query, "key": key, "rhs": rhs, **form}
        gradients = jax.eval_shape(
            jax.grad(lambda a: jnp.sum(ops.kernel_solve(**a, implementation=implementation))), arrays
        )
        assert {n: x.dtype for n, x in gradients.items()} == {n: x.dtype for n, x in arrays.items()}


def test_diagonal_of_the_system(error):
    rng = np.random.default_rng(0)
    query, key = (rng.normal(size=(2, 50, 2, 8)) for _ in range(2))
    ridge = np.array([0.1, 0.2])
    ids = np.array([[1] * 20 + [2] * 30, [1] * 45 + [0] * 5])
    scores = 0.5 * np.einsum("bihk,bjhk->bhij", query, key)
    i, j = np.indices((50, 50))
    mask = ((j <= i) & (i - j < 25) & (ids[:, :, None] == ids[:, None]) & (ids[:, None] != 0))[:, None]
    weights = np.where(mask, np.exp(scores), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    expected = np.einsum("bhii->bih", weights) + ridge
    query, key, ridge = map(jnp.float32, (query, key, ridge))
    diagonal = jax.jit(functools.partial(ops.system_diagonal, window=25, scale=0.5))
    assert error(diagonal(query, key, ridge, segment_ids=jnp.asarray(ids)), expected) < 1e-5
    gradient = jax.grad(lambda q: jnp.sum(ops.system_diagonal(q, key, ridge)))(query)
    assert not np.any(gradient)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ridge": None}, "exactly one of ridge and beta"),
        ({"beta": jnp.ones((2, 5, 3))}, "exactly one of ridge and beta"),
        ({"ridge": jnp.ones(4)}, r"num_heads=3"),
        ({"ridge": None, "beta": jnp.ones((2, 5, 4))}, r"beta.shape=.* must be"),
        ({"key": jnp.ones((2, 5, 3, 9))}, r"must equal"),
        ({"rhs": jnp.ones((2, 6, 3, 8))}, r"must be \[B, L, H, V\]"),
        ({"rhs": jnp.ones((2, 5, 3, 8), jnp.int32)}, "must be floating"),
        ({"segment_ids": jnp.ones((2, 6), jnp.int32)}, r"segment_ids.shape=.* must be"),
        ({"segment_ids": jnp.ones((2, 5))}, "must be an integer type"),
        ({"query": jnp.ones((2, 0, 3, 8)), "key": jnp.ones((2, 0, 3, 8))}, "must have no dimension of size 0"),
        ({"window": 0}, "window=0 must be"),
        ({"window": 2.5}, "window=2.5 must be"),
        ({"block_size": 0}, "block_size=0 must be"),
        ({"block_size": 2.0}, "block_size=2.0 must be"),
        ({"ridge": 1e-2}, r"ridge.shape=\(\) must be"),
    ],
)
def test_malformed_input_is_an_error(change, message):
    x = jnp.ones((2, 5, 3, 8))
    with pytest.raises(ValueError, match=message):
        ops.kernel_solve(**{"query": x, "key": x, "rhs": x, "ridge": jnp.ones(3), **change})


def test_values_may_be_wider_than_keys(error):
    query, key, rhs = jax.random.normal(jax.random.key(0), (3, 1, 40, 2, 8))
    solve = functools.partial(ops.kernel_solve, query, key, ridge=jnp.array([0.1, 0.2]))
    narrow = solve(rhs, implementation="reference")
    wide = solve(jnp.concatenate([rhs, 2 * rhs], axis=-1))
    assert error(wide, jnp.concatenate([narrow, 2 * narrow], axis=-1)) < 1e-5
