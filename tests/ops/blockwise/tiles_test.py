import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cubit_jax.ops import dispatch
from cubit_jax.ops.blockwise import tiles

solve = jax.jit(tiles.solve_triangular, static_argnums=2)


def _system(size, seed=0):
    """Rows of weights plus a small ridge; condition as in training."""
    rng = np.random.default_rng(seed)
    weights = np.tril(np.exp(rng.normal(size=(2, 3, size, size))))
    return weights / weights.sum(-1, keepdims=True) + 0.1 * np.eye(size)


@pytest.mark.parametrize("size", [1, 2, 7, 16, 17, 48, 80, 128, 256])
@pytest.mark.parametrize("transpose", [False, True])
def test_solves_the_system_and_its_transpose(size, transpose):
    system, rhs = _system(size), np.random.default_rng(1).normal(size=(2, 3, size, 5))
    x = solve(*map(jnp.float32, (system, rhs)), transpose)
    matrix = np.swapaxes(system, -1, -2) if transpose else system
    residual = np.abs(matrix @ x - rhs).max() / (np.abs(matrix) @ np.abs(x) + np.abs(rhs)).max()
    assert residual < 1e-6


@pytest.mark.parametrize("size", [64, 128, 256])
def test_uniform_weights_do_not_overflow(size, error):
    system = np.tril(np.ones((size, size))) / np.arange(1, size + 1)[:, None] + 1e-10 * np.eye(size)
    rhs = np.random.default_rng(0).normal(size=(size, 4))
    assert error(solve(jnp.float32(system), jnp.float32(rhs)), np.linalg.solve(system, rhs)) < 3e-6


def test_a_row_that_sees_nothing_without_a_ridge_is_zero(error):
    system = _system(32)[0, 0]
    system[5] = system[:, 5] = 0
    rhs = np.ones((32, 2))
    x = solve(jnp.float32(system), jnp.float32(rhs))
    keep = np.arange(32) != 5
    assert np.all(x[5] == 0)
    assert error(x[keep], np.linalg.solve(system[keep][:, keep], rhs[keep])) < 1e-5


def test_blocks_are_even_and_known_for_any_backend():
    assert [tiles.choose_block(n) for n in (1, 16, 17, 128, 129, 4096)] == [16, 16, 32, 128, 80, 128]
    assert tiles.choose_block(100, 32) == 32
    with dispatch.backend("a new device"):
        assert tiles.choose_block(4096) == 256


@pytest.mark.parametrize("window", [1, 4, 5, 9, 100])
@pytest.mark.parametrize("strict", [False, True])
def test_tiles_that_are_skipped_hold_nothing_visible(window, strict):
    tiling = tiles.Tiling(30, 4, window, strict)
    for i in range(tiling.num_blocks):
        seen = [bool(jnp.any(tiling.mask(i, j, None, diagonal=i == j))) for j in range(i)]
        assert not any(seen[: int(tiling.first(jnp.int32(i)))])
        assert all(seen[int(tiling.first(jnp.int32(i))) :])


def test_split_and_merge():
    x = jnp.arange(2 * 7 * 3 * 5).reshape(2, 7, 3, 5)
    tiling = tiles.Tiling(7, 4)
    blocks = tiling.split(x)
    assert blocks.shape == (2, 2, 3, 4, 5)
    assert np.array_equal(blocks[1, :, :, 2], x[:, 6])
    assert np.array_equal(tiling.merge(blocks), x)
