"""Rows that overflow, padding that holds NaN, values out of range: what they must not reach."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cubit_jax import ops
from cubit_jax.ops import dispatch

IMPLEMENTATIONS = [
    "reference",
    "xla",
    pytest.param("tpu", marks=pytest.mark.full),
    pytest.param("gpu", marks=pytest.mark.full),
]


def run(op, implementation, *args, **kwargs):
    if implementation in ("tpu", "gpu"):
        with dispatch.interpret(implementation):
            return op(*args, implementation="pallas", **kwargs)
    return op(*args, implementation=implementation, **kwargs)


@functools.cache
def overflowing(length, peaked):
    """(query, key, rhs): `peaked` rows that each see the row before them almost alone; the later ones see all alike."""
    rows = np.arange(length)
    query, key = np.zeros((2, 1, length, 1, 16), np.float32)
    key[0, rows, 0, rows % 16] = 1
    query[0, rows[:peaked], 0, (rows[:peaked] - 1) % 16] = 20
    rhs = np.random.default_rng(0).standard_normal((1, length, 1, 16)).astype(np.float32)
    return jnp.asarray(query), jnp.asarray(key), jnp.asarray(rhs)


def by_substitution(query, key, rhs, ridge, segments):
    """float64 solution, row by row: a row only reads what it sees."""
    query, key, rhs = (np.asarray(x, np.float64)[0, :, 0] for x in (query, key, rhs))
    u = np.zeros_like(rhs)
    for i in range(len(u)):
        seen = np.flatnonzero(segments[: i + 1] == segments[i])
        weights = np.exp(key[seen] @ query[i])
        weights /= weights.sum()
        u[i] = (rhs[i] - weights[:-1] @ u[seen[:-1]]) / (weights[-1] + ridge)
    return u


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("length", [11, 19])
def test_an_overflowing_row_spoils_no_row_before_it(implementation, length):
    query, key, rhs = overflowing(length, 11)
    u = run(ops.kernel_solve, implementation, query, key, rhs, ridge=jnp.full(1, 1e-10))[0, :, 0]
    expected = by_substitution(query, key, rhs, 1e-10, np.ones(length))
    fits = np.abs(expected).max(axis=1) < np.finfo(np.float32).max
    assert 3 <= fits[:11].sum() < 11 and not np.isfinite(u[fits.argmin()]).all()
    first = fits.argmin()
    np.testing.assert_allclose(u[:first], expected[:first], rtol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_overflowing_row_spoils_no_other_document(implementation):
    query, key, rhs = overflowing(20, 11)
    segments = np.repeat([1, 2], [11, 9])
    call = functools.partial(run, ops.kernel_solve, implementation, query, key, rhs, ridge=jnp.full(1, 1e-10))
    u = call(segment_ids=jnp.asarray(segments)[None])[0, :, 0]
    expected = by_substitution(query, key, rhs, 1e-10, segments)
    assert not np.isfinite(u[10]).all()
    np.testing.assert_allclose(u[11:], expected[11:], rtol=1e-4)
    np.testing.assert_allclose(u[:3], expected[:3], rtol=1e-4)


def test_an_overflowing_row_of_new_tokens_spoils_no_row_before_it():
    query, key, rhs = overflowing(19, 11)
    start, empty = jnp.zeros(1, jnp.int32), jnp.zeros_like(rhs)
    u = ops.kernel_solve_cached(query, key, empty, rhs, start, ridge=jnp.full(1, 1e-10))[0, :, 0]
    expected = by_substitution(query, key, rhs, 1e-10, np.ones(19))
    np.testing.assert_allclose(u[:4], expected[:4], rtol=1e-4)
    values = jnp.where(jnp.arange(19)[:, None, None] == 7, jnp.inf, rhs)
    o = ops.attention_cached(query, key, values, start)
    np.testing.assert_allclose(o[:, :7], ops.attention_cached(query, key, rhs, start)[:, :7], rtol=1e-6)
    assert not np.isfinite(o[:, 7:]).any()


def test_an_overflowing_row_spoils_no_other_batch_under_vmap():
    query, key, rhs = overflowing(19, 11)
    calm = jnp.zeros_like(query)

    def solve(query):
        return ops.kernel_solve(query, key, rhs, ridge=jnp.full(1, 1e-10))[0, :, 0]

    both = jax.vmap(solve)(jnp.stack([query, calm]))
    assert not np.isfinite(both[0]).all()
    for u, q in zip(both, (query, calm)):
        np.testing.assert_allclose(u[:4], by_substitution(q, key, rhs, 1e-10, np.ones(19))[:4], rtol=1e-4)
    np.testing.assert_allclose(both[1], by_substitution(calm, key, rhs, 1e-10, np.ones(19)), rtol=1e-4)
    # The slow path is a loop that runs only when it is needed: a batched `cond` would always run it.
    assert not [e for e in jax.make_jaxpr(jax.vmap(solve))(jnp.stack([query, calm])).eqns if e.primitive.name == "cond"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
def test_a_value_that_is_not_finite_reaches_only_rows_that_see_it(bad):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 40, 1, 8))
    segments = jnp.repeat(jnp.array([[1, 2]]), 20, axis=1)
    o = ops.attention(q, k, v.at[0, 9].set(bad), segment_ids=segments)
    clean = ops.attention(q, k, v, segment_ids=segments)
    others = np.r_[0:9, 20:40]
    np.testing.assert_allclose(o[0, others], clean[0, others], rtol=1e-5, atol=1e-6)
    assert not np.allclose(o[0, 9], clean[0, 9])


SHAPE = (2, 24, 2, 16)
SEGMENTS = np.array([[0] * 3 + [1] * 9 + [2] * 8 + [0] * 4, [1] * 24])


def _solve(form, implementation):
    def op(query, key, rhs, beta):
        options = {"ridge": jnp.full(2, 0.1)} if form == "ridge" else {"beta": beta}
        return run(ops.kernel_solve, implementation, query, key, rhs, segment_ids=SEGMENTS, **options)

    return op, (SHAPE, SHAPE, SHAPE, SHAPE[:3])


def _attention(implementation):
    return lambda q, k, v: run(ops.attention, implementation, q, k, v, segment_ids=SEGMENTS), (SHAPE,) * 3


def _energy(op, diag, implementation=None):
    positions = jnp.arange(SHAPE[1])
    w_q, w_k = 0.3 * jax.random.normal(jax.random.key(1), (2, 12, 2, 16))
    diag = diag and 0.3 * jax.random.normal(jax.random.key(2), (12,))
    options = {} if implementation is None else {"implementation": implementation}

    def fn(state, context):
        return op(state, context, w_q, w_k, diag, positions=positions, segment_ids=SEGMENTS, **options)

    return fn, ((2, 24, 12),) * 2


PADDED = {
    **{f"attention-{i}": (_attention, i) for i in ("reference", "xla", "tpu")},
    **{f"{form}-{i}": (_solve, form, i) for form in ("ridge", "beta") for i in ("reference", "xla", "tpu", "gpu")},
    "interaction_energy": (_energy, ops.interaction_energy, True),
    "interaction_step": (_energy, ops.interaction_step, None, "xla"),
    "interaction_step-diagonal-xla": (_energy, ops.interaction_step, True, "xla"),
    "interaction_step-diagonal-reference": (_energy, ops.interaction_step, True, "reference"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full) if n.endswith(("tpu", "gpu")) else n for n in PADDED]
)
def test_padding_is_inert_whatever_it_holds(name):
    build, *arguments = PADDED[name]
    op, shapes = build(*arguments)
    arrays = [jax.random.normal(key, shape) for key, shape in zip(jax.random.split(jax.random.key(3), 4), shapes)]
    real = SEGMENTS != 0

    def of(x):
        return real.reshape(*real.shape, *[1] * (x.ndim - 2))

    def loss(*arrays):
        out = op(*arrays)
        return jnp.sum(jnp.where(of(out), jnp.sin(out), 0)), jnp.where(of(out), out, 0)

    compiled = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(arrays))), has_aux=True))
    (_, expected), expected_grads = compiled(*arrays)
    for bad in (np.nan, np.inf, 1e38):
        (_, out), grads = compiled(*[jnp.where(of(x), x, bad) for x in arrays])
        np.testing.assert_array_equal(out, expected)
        for grad, expected_grad in zip(grads, expected_grads):
            np.testing.assert_array_equal(jnp.where(of(grad), grad, 0), jnp.where(of(grad), expected_grad, 0))
            assert np.isfinite(grad).all()


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("form", ["ridge", "beta", "attention", "diagonal"])
def test_a_cache_is_inert_beyond_its_tokens_whatever_it_holds(form, new):
    """Forward, and in the gradient of the new tokens."""
    k, v, h, x, r = jax.random.normal(jax.random.key(0), (5, 2, 12, 2, 8))
    start = jnp.array([8, 3])
    index = jnp.arange(12)
    w_q = jax.random.normal(jax.random.key(1), (16, 2, 8))

    def op(x, k, v, h):
        x = x[:, :new]
        if form == "attention":
            return ops.attention_cached(x, k, v, start)
        if form == "diagonal":
            state, context = (a.reshape(2, -1, 16) for a in (x, h))
            return ops.interaction_step_cached(state, context, k, w_q, jnp.ones(16), start)
        options = {"ridge": jnp.full(2, 0.1)} if form == "ridge" else {"beta": x[..., 0]}
        return ops.kernel_solve_cached(x, k, v, r[:, :new], start, **options)

    run = jax.jit(jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(op(*args))), (0, 1, 2, 3)))
    held = (index < start[:, None] + new)[..., None, None]
    known = held if form == "attention" else (index < start[:, None])[..., None, None]

    def with_rest(rest):
        return run(x, *(jnp.where(seen, a, rest) for a, seen in ((k, held), (v, known), (h, held))))

    expected, expected_grads = with_rest(0.0)
    for bad in (np.nan, 1e38):
        value, grads = with_rest(bad)
        np.testing.assert_array_equal(value, expected)
        jax.tree.map(np.testing.assert_array_equal, grads, expected_grads)


@pytest.mark.parametrize("op", [ops.interaction_energy, ops.interaction_step])
@pytest.mark.parametrize("diagonal", [False, True])
def test_padding_reaches_no_gradient_of_the_weights(op, diagonal):
    state, context = jax.random.normal(jax.random.key(0), (2, 2, 24, 12))
    weights = list(0.3 * jax.random.normal(jax.random.key(1), (2, 12, 2, 16)))
    weights += [jnp.full(12, 0.3)] if diagonal else []
    real = (SEGMENTS != 0)[..., None]

    def loss(weights, state, context):
        return jnp.sum(jnp.sin(op(state, context, *weights, positions=jnp.arange(24), segment_ids=SEGMENTS)))

    gradient = jax.jit(jax.grad(loss))
    bad = gradient(weights, *(jnp.where(real, x, jnp.nan) for x in (state, context)))
    jax.tree.map(np.testing.assert_array_equal, bad, gradient(weights, state, context))


@pytest.mark.parametrize("bad", [np.nan, 1e38])
def test_padding_reaches_no_gradient_of_the_ridge(bad):
    arrays = jax.random.normal(jax.random.key(0), (3, *SHAPE))
    real = (SEGMENTS != 0)[..., None, None]

    def loss(ridge, arrays):
        u = ops.kernel_solve(*arrays, ridge=ridge, segment_ids=SEGMENTS)
        return jnp.sum(jnp.where(real, u, 0) ** 2)

    gradient = jax.jit(jax.grad(loss))
    ridge = jnp.full(2, 1e-3)
    np.testing.assert_array_equal(gradient(ridge, jnp.where(real, arrays, bad)), gradient(ridge, arrays))


@pytest.mark.parametrize("value", [-0.1, np.inf, np.nan])
@pytest.mark.parametrize("implementation", ["reference", "xla", None])
def test_a_ridge_out_of_range_is_refused_where_its_value_is_known(value, implementation):
    x = jnp.ones((1, 4, 2, 8))
    ridge = jnp.array([0.1, value])
    with pytest.raises(ValueError, match=rf"ridge={value:g} must be finite and at least 0"):
        ops.kernel_solve(x, x, x, ridge=ridge, implementation=implementation)
    with pytest.raises(ValueError, match=rf"ridge={value:g} must be finite and at least 0"):
        ops.kernel_solve_cached(x, x, x, x, jnp.zeros(1, jnp.int32), ridge=ridge)
    assert jax.eval_shape(lambda ridge: ops.kernel_solve(x, x, x, ridge=ridge), ridge).shape == x.shape


def test_other_numbers_out_of_range_are_refused():
    x, h, w = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 6)), jnp.ones((6, 2, 8))
    with pytest.raises(ValueError, match="scale=nan must be finite"):
        ops.attention(x, x, x, scale=jnp.nan)
    with pytest.raises(ValueError, match="scale=inf must be finite"):
        ops.kernel_solve(x, x, x, ridge=jnp.ones(2), scale=jnp.inf)
    with pytest.raises(ValueError, match="tau=nan must be above 0 and finite"):
        ops.interaction_energy(h, h, w, w, tau=jnp.nan)
    with pytest.raises(ValueError, match="step_size=nan must be finite"):
        ops.minimize(lambda x: x, h, num_steps=1, step_size=jnp.nan)
    with pytest.raises(ValueError, match=r"theta=0\.0 must be above 0 and finite"):
        ops.rotary(x, jnp.arange(4), 0.0)
