import jax.numpy as jnp
import numpy as np
import pytest

from cubit_jax import ops


def _inputs(length=11, dim=8, seed=0):
    return np.random.default_rng(seed).normal(size=(2, length, 3, dim)).astype(np.float32)


def test_is_a_rotation_of_each_half_split_pair(error):
    x, positions = _inputs(), np.array([np.arange(11), np.arange(11) * 7 + 3])
    angle = positions[..., None, None] * 500.0 ** (-np.arange(4) / 4)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    assert error(ops.rotary(jnp.asarray(x), jnp.asarray(positions), 500.0), expected) < 1e-5


def test_products_depend_on_the_distance_only(error):
    q, k = _inputs(seed=1), _inputs(seed=2)
    scores = []
    for shift in (0, 90):
        positions = jnp.arange(11) + shift
        scores.append(jnp.einsum("bihk,bjhk->bhij", ops.rotary(q, positions), ops.rotary(k, positions)))
    assert error(scores[0], np.einsum("bihk,bjhk->bhij", q, k)) > 0.1
    assert error(scores[1], scores[0]) < 1e-5


def test_dtype_is_kept_and_angles_are_float32(error):
    x = jnp.asarray(_inputs(), jnp.bfloat16)
    positions = jnp.arange(11) + 1000
    out = ops.rotary(x, positions)
    assert out.dtype == jnp.bfloat16
    assert error(out, ops.rotary(x.astype(jnp.float32), positions)) < 5e-3


@pytest.mark.parametrize(("shape", "positions"), [((2, 4, 3, 7), (4,)), ((2, 4, 3, 8), (5,)), ((2, 4, 8), (4,))])
def test_malformed_shapes_are_errors(shape, positions):
    with pytest.raises(ValueError, match="must be"):
        ops.rotary(jnp.zeros(shape), jnp.zeros(positions, jnp.int32))
