"""Blockwise solve for any device, in memory linear in the length, with a hand-derived VJP."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from cubit_jax.ops.blockwise import tiles
from cubit_jax.ops.blockwise.tiles import dot


def kernel_solve_xla(
    query: jax.Array,
    key: jax.Array,
    rhs: jax.Array,
    *,
    ridge: jax.Array | None,
    beta: jax.Array | None,
    segment_ids: jax.Array | None,
    window: int | None,
    scale: float,
    block_size: int | None,
) -> jax.Array:
    """kernel_solve by row blocks; see there for the arguments."""
    dtype = tiles.compute_dtype(query, key, rhs)
    tiling = tiles.Tiling(query.shape[1], tiles.choose_block(query.shape[1], block_size), window, strict=ridge is None)
    ridge, beta = jax.tree.map(lambda x: x.astype(dtype), (ridge, beta))
    return _solve(tiling, scale, query, key, rhs.astype(dtype), ridge, beta, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _solve(tiling, scale, query, key, rhs, ridge, beta, segment_ids):
    return _forward(tiling, scale, query, key, rhs, ridge, beta, segment_ids)[0]


def _forward(tiling, scale, query, key, rhs, ridge, beta, segment_ids):
    q, k, r, c, segments = jax.tree.map(tiling.split, (query, key, rhs, beta, segment_ids))
    u, summed, lse = map(tiling.merge, solve_rows(tiling, scale, q, k, r, ridge, c, segments))
    # The sum of P_ij u_j is kept in place of rhs: it costs the same and is exact for every ridge and beta.
    return u, (query, key, ridge, beta, segment_ids, u, summed, lse)


def solve_rows(
    tiling: tiles.Tiling,
    scale: float,
    q: jax.Array,
    k: jax.Array,
    rhs: jax.Array,
    ridge: jax.Array | None,
    beta: jax.Array | None,
    segments: jax.Array | None,
    state: tuple[jax.Array, jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The forward pass on blocks.

    Args:
      q, k, rhs: [N, B, H, C, ...]; ridge: [H] or None; beta: [N, B, H, C] or None; segments: [N, B, C] or None.
      state: online softmax of each row over columns that are not among these, [N, B, H, C, ...] as in tiles.start; or
        None.

    Returns:
      u, the sum of P_ij u_j, both [N, B, H, C, V], and the row log-sum-exp [N, B, H, C].
    """

    def row_block(u, x):
        i, q_i, rhs_i, beta_i, state_i = x
        if state is None:
            state_i = tiles.start(q_i, rhs.shape[-1], rhs.dtype)
        weights, summed, lse = tiles.forward_row(tiling, scale, i, q_i, k, u, segments, state_i)
        target = rhs_i - (summed if beta is None else beta_i[..., None] * summed)
        u_i = tiles.solve_triangular(system_block(weights, ridge, beta_i), target)
        return tiles.put(u, u_i, i), (summed + dot("bhij,bhjk->bhik", weights, u_i), lse)

    u, (summed, lse) = lax.scan(row_block, jnp.zeros_like(rhs), (jnp.arange(tiling.num_blocks), q, rhs, beta, state))
    return u, summed, lse


def system_block(weights: jax.Array, ridge: jax.Array | None, beta: jax.Array | None) -> jax.Array:
    """The system of a diagonal tile of the weights [B, H, C, C]; ridge [H] or beta [B, H, C]."""
    eye = jnp.eye(weights.shape[-1], dtype=weights.dtype)
    return weights + ridge[:, None, None] * eye if beta is None else eye + beta[..., None] * weights


def _backward(tiling, scale, residuals, g):
    query, key, ridge, beta, segment_ids, u, summed, lse = residuals
    q, k, c, segments, u, summed, lse, g = jax.tree.map(
        tiling.split, (query, key, beta, segment_ids, u, summed, lse, g)
    )

    def row_block(carry, x):
        i, q_i, c_i, summed_i, lse_i = x

        def cotangent(weights, g_i):
            y = tiles.solve_triangular(system_block(weights, ridge, c_i), g_i, transpose=True)
            z = -y if c_i is None else -c_i[..., None] * y
            return z, jnp.sum(z * summed_i, axis=-1, keepdims=True), y

        dq, *carry = tiles.backward_row(tiling, scale, i, q_i, k, u, lse_i, segments, *carry, cotangent)
        return carry, dq

    carry = [jnp.zeros_like(k, u.dtype), g]
    (dk, y), dq = lax.scan(row_block, carry, (jnp.arange(tiling.num_blocks), q, c, summed, lse), reverse=True)
    dridge = None if ridge is None else -jnp.sum(y * u, axis=(0, 1, 3, 4))
    dbeta = None if beta is None else -tiling.merge(jnp.sum(y * summed, axis=-1))
    dq, dk, drhs = tiling.merge(dq), tiling.merge(scale * dk), tiling.merge(y)
    return dq.astype(query.dtype), dk.astype(key.dtype), drhs, dridge, dbeta, None


_solve.defvjp(_forward, _backward)
