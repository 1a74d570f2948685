"""Values and gradients of attention, for every implementation that runs on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cubit_jax import ops
from cubit_jax.ops import dispatch

NAMES = ("q", "k", "v")
IDS = np.array([[1] * 25 + [2] + [4] * 30 + [0] * 4, [0] * 9 + [7] * 51])
OPTIONS = {
    "causal": {},
    "window": {"window": 7},
    "segments": {"segment_ids": IDS},
    "both": {"segment_ids": IDS, "window": 7, "scale": 0.6},
}


def problem(length=60, *, batch=2, heads=3, dim=8, width=8, seed=0):
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(batch, length, heads, dim)) for _ in range(2))
    v, cotangent = (rng.normal(size=(batch, length, heads, width)) for _ in range(2))
    return (q, k, v), cotangent


def exact(arrays, cotangent, *, segment_ids=None, window=None, scale=None):
    """Output and gradients, dense in float64 NumPy."""
    q, k, v = arrays
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    i, j = np.indices((q.shape[1], q.shape[1]))
    mask = np.broadcast_to((j <= i) & (True if window is None else i - j < window), (q.shape[0], 1, *i.shape))
    if segment_ids is not None:
        mask = mask & ((segment_ids[:, :, None] == segment_ids[:, None]) & (segment_ids[:, None] != 0))[:, None]
    weights = np.where(mask, np.exp(scale * np.einsum("bihk,bjhk->bhij", q, k)), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    dp = np.einsum("bihk,bjhk->bhij", cotangent, v)
    ds = scale * weights * (dp - np.sum(weights * dp, axis=-1, keepdims=True))
    return {
        "o": np.einsum("bhij,bjhk->bihk", weights, v),
        "q": np.einsum("bhij,bjhk->bihk", ds, k),
        "k": np.einsum("bhij,bihk->bjhk", ds, q),
        "v": np.einsum("bhij,bihk->bjhk", weights, cotangent),
    }


@functools.partial(jax.jit, static_argnames=("implementation", "window", "scale"))
def _run(arrays, cotangent, segment_ids, implementation, window, scale):
    def loss(q, k, v):
        o = ops.attention(q, k, v, segment_ids=segment_ids, window=window, scale=scale, implementation=implementation)
        return jnp.sum(o.astype(cotangent.dtype) * cotangent), o

    (_, o), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arrays)
    return {"o": o, **dict(zip(NAMES, gradients))}


def run(arrays, cotangent, implementation, *, segment_ids=None, window=None, scale=None, dtype=jnp.float32):
    segment_ids = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
    arrays = tuple(jnp.asarray(x, dtype) for x in arrays)
    cotangent = jnp.asarray(cotangent, jnp.promote_types(dtype, jnp.float32))
    return _run(arrays, cotangent, segment_ids, implementation, window, scale)


def assert_close(actual, expected, error, forward=1e-5, gradient=1e-4):
    for name in expected:
        assert error(actual[name], expected[name]) < (forward if name == "o" else gradient), name


@pytest.mark.parametrize("implementation", ["reference", "xla", "pallas"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options(option, implementation, error):
    arrays, cotangent = problem()
    expected = exact(arrays, cotangent, **OPTIONS[option])
    if option != "causal":
        assert error(exact(arrays, cotangent)["o"], expected["o"]) > 1e-2
    with dispatch.interpret():
        assert_close(run(arrays, cotangent, implementation, **OPTIONS[option]), expected, error)


def test_float64(error):
    arrays, cotangent = problem()
    with jax.enable_x64(True):
        actual = run(arrays, cotangent, "xla", dtype=jnp.float64, **OPTIONS["both"])
    assert_close(actual, exact(arrays, cotangent, **OPTIONS["both"]), error, 1e-12, 1e-12)


@pytest.mark.parametrize("length", [1, 7, 129, 300])
def test_lengths(length, error):
    arrays, cotangent = problem(length, batch=1)
    actual = run(arrays, cotangent, "xla", window=150)
    assert_close(actual, exact(arrays, cotangent, window=150), error)
    if length == 1:
        assert not np.any(actual["q"]) and not np.any(actual["k"])


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_16_bit_inputs(implementation, error):
    arrays, cotangent = problem()
    arrays = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in arrays]
    with dispatch.interpret():
        actual = run(arrays, cotangent, implementation, dtype=jnp.bfloat16, **OPTIONS["both"])
    assert all(x.dtype == jnp.bfloat16 for x in actual.values())
    assert_close(actual, exact(arrays, cotangent, **OPTIONS["both"]), error, 2e-2, 2e-2)


@pytest.mark.parametrize("implementation", ["reference", "xla", "pallas"])
def test_float32_values_beside_16_bit_queries(implementation, error):
    (q, k, v), cotangent = problem(16, batch=1)
    q, k = (jnp.asarray(x, jnp.bfloat16) for x in (q, k))

    def loss(q, k, v):
        o = ops.attention(q, k, v, implementation=implementation)
        assert o.dtype == jnp.bfloat16
        return jnp.sum(o.astype(jnp.float32) * cotangent)

    with dispatch.interpret():
        gradients = jax.grad(loss, (0, 1, 2))(q, k, jnp.float32(v))
    assert [x.dtype for x in gradients] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    expected = exact([np.asarray(x, np.float64) for x in (q, k, v)], cotangent)
    assert_close(dict(zip(NAMES, gradients)), {name: expected[name] for name in NAMES}, error, gradient=2e-2)


def test_values_may_have_another_width(error):
    arrays, cotangent = problem(width=20)
    assert_close(run(arrays, cotangent, "xla"), exact(arrays, cotangent), error)


def test_peaked_weights_keep_their_gradients(error):
    """The diagonal of the scores' gradient cancels there, unless it is taken from the rest of its row."""
    (q, _, v), cotangent = problem(200, batch=1)
    k = 4 * q / np.linalg.norm(q, axis=-1, keepdims=True)
    assert_close(run((q, k, v), cotangent, "xla", scale=2.0), exact((q, k, v), cotangent, scale=2.0), error, 1e-6, 1e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla", "pallas"])
def test_padding_gives_and_gets_nothing(implementation):
    arrays, cotangent = problem()
    ids = np.array(IDS)
    ids[1] = 0
    with dispatch.interpret():
        actual = run(arrays, cotangent, implementation, segment_ids=ids)
    for name, x in actual.items():
        assert np.isfinite(x).all(), name
        assert not np.any(x[ids == 0]), name


def test_memory_is_linear_in_the_length():
    def temporaries(length):
        x = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
        grad = jax.grad(lambda q, k, v: jnp.sum(ops.attention(q, k, v)), (0, 1, 2))
        return jax.jit(grad).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(8192) < 2.2 * temporaries(4096) < 4096**2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"v": jnp.ones((1, 4, 2, 16), jnp.bfloat16)}, "the kernels need v.shape"),
        ({"segment_ids": jnp.ones((1, 4), jnp.int32)}, "cuDNN through JAX takes no segment ids"),
        ({"q": jnp.ones((1, 4, 2, 8)), "k": jnp.ones((1, 4, 2, 8))}, "16-bit inputs"),
    ],
)
def test_what_the_gpu_kernel_cannot_do_has_a_reason(change, reason):
    x = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
    arguments = {"q": x, "k": x, "v": x, **change}
    with dispatch.backend("gpu"):
        with pytest.raises(NotImplementedError, match=reason):
            ops.attention(**arguments, implementation="pallas")
        assert ops.attention(**arguments).shape == arguments["v"].shape


@pytest.mark.parametrize("option", [{}, {"window": 100}])
def test_lowers_for_a_tpu(option):
    x = jax.ShapeDtypeStruct((2, 700, 4, 64), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2, 700), jnp.int32)

    def gradients(q, k, v, ids):
        def loss(q, k, v):
            return jnp.sum(ops.attention(q, k, v, segment_ids=ids, implementation="pallas", **option))

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    with dispatch.backend("tpu"):
        exported = jax.export.export(jax.jit(gradients), platforms=["tpu"])(x, x, x, ids)
    assert exported.mlir_module().count("tpu_custom_call") == 3  # forward, dq, dk and dv


def test_malformed_input_is_an_error():
    x = jnp.ones((2, 5, 3, 8))
    for arguments, message in (((x, x[:, :4], x), "must equal"), ((x, x, x[0]), "must be"), ((x[0],) * 3, "must")):
        with pytest.raises(ValueError, match=message):
            ops.attention(*arguments)
