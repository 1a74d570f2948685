"""DeltaFormerMixer against the dense formula in float64, and the limit in which it is attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cubit_jax import ops
from cubit_jax.layers import Attention, DeltaFormerMixer

HEADS, HEAD_DIM, WIDTH, LENGTH = 2, 8, 16, 33


def init(module):
    x = jax.random.normal(jax.random.key(0), (2, LENGTH, WIDTH))
    return jax.jit(module.init)(jax.random.key(1), x)["params"], x


def dense(params, x, segment_ids, window):
    """The DeltaFormer mixer with its matrices whole: (I + diag(beta) P) u = v."""
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])

    def project(name):
        return jnp.einsum("bld,dhk->blhk", x, params[name]["kernel"])

    q, k = (ops.rotary(project(name), positions) for name in ("q_proj", "k_proj"))
    w = ops.rotary(project("w_proj"), positions) if "w_proj" in params else k
    v, beta = project("v_proj"), x @ params["beta_proj"]["kernel"] + params["beta_proj"]["bias"]
    index = np.arange(x.shape[1])
    visible = (index <= index[:, None]) & (index[:, None] - index < window)
    visible = (visible & (segment_ids[:, :, None] == segment_ids[:, None]) & (segment_ids != 0)[:, None])[:, None]

    def softmax(scores, visible):
        weights = jnp.where(visible, jnp.exp(scores), 0)
        total = weights.sum(-1, keepdims=True)
        return weights / jnp.where(total == 0, 1, total)

    def scores(q, k):
        return jnp.einsum("bihk,bjhk->bhij", q, k) / np.sqrt(HEAD_DIM)

    strict = visible & ~np.eye(x.shape[1], dtype=bool)
    system = np.eye(x.shape[1]) + jnp.moveaxis(beta, 1, 2)[..., None] * softmax(scores(w, k), strict)
    u = jnp.linalg.solve(system, jnp.moveaxis(v, 1, 2))
    return jnp.einsum("bhij,bhjk,hkd->bid", softmax(scores(q, k), visible), u, params["o_proj"]["kernel"])


@pytest.mark.parametrize("projection", ["own", "shared"])
def test_equals_the_dense_formula(projection, error):
    segment_ids, window = np.ones((2, LENGTH), np.int32), 9
    segment_ids[0, 13:], segment_ids[1, 28:] = 2, 0
    options = {"window": window, "projection": projection}
    params, x = init(DeltaFormerMixer(HEADS, HEAD_DIM, **options))
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    params["beta_proj"]["bias"] += 0.7
    x = np.asarray(x, np.float64)
    cotangent = np.random.default_rng(0).normal(size=x.shape) * (segment_ids != 0)[..., None]

    def outputs(function, dtype):
        cast = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), (params, x))
        gradient, y = jax.jit(
            jax.grad(
                lambda params, x: (jnp.sum(jnp.asarray(cotangent, dtype) * function(params, x)), function(params, x)),
                (0, 1),
                True,
            )
        )(*cast)
        return jax.tree.map(np.asarray, (y, gradient))

    with jax.enable_x64(True):
        expected, expected_gradient = outputs(lambda params, x: dense(params, x, segment_ids, window), jnp.float64)
    settings = [(jnp.float32, "xla", 1e-5), (jnp.float64, "xla", 1e-10), (jnp.float32, "reference", 1e-5)]
    for dtype, implementation, limit in settings[: 3 if projection == "own" else 1]:
        module = DeltaFormerMixer(
            HEADS, HEAD_DIM, dtype=dtype, param_dtype=dtype, implementation=implementation, **options
        )
        with jax.enable_x64(dtype == jnp.float64):
            y, gradient = outputs(
                lambda params, x, module=module: module.apply({"params": params}, x, segment_ids=segment_ids), dtype
            )
        assert error(y, expected) <= limit
        for (path, actual), (_, leaf) in zip(
            jax.tree.leaves_with_path(gradient), jax.tree.leaves_with_path(expected_gradient)
        ):
            name = jax.tree_util.keystr(path)
            assert np.any(leaf), f"the gradient of {name} is zero"
            assert error(actual, leaf) <= (1e-4 if dtype == jnp.float32 else 1e-10), name


def test_beta_zero_is_attention(error):
    module = DeltaFormerMixer(HEADS, HEAD_DIM, implementation="reference")
    params, x = init(module)
    y = jax.jit(module.apply)({"params": params}, x)
    params["beta_proj"] = jax.tree.map(jnp.zeros_like, params["beta_proj"])
    zero = jax.jit(module.apply)({"params": params}, x)
    attention = {name: params[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    expected = jax.jit(Attention(HEADS, HEAD_DIM, implementation="reference").apply)({"params": attention}, x)
    assert error(zero, expected) <= 1e-5
    assert error(y, expected) > 1e-2


def test_bad_option():
    with pytest.raises(ValueError, match="projection='none' must be own or shared"):
        DeltaFormerMixer(HEADS, HEAD_DIM, projection="none")
