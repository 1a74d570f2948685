"""Blockwise softmax attention for any device, in memory linear in the length."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from cubit_jax.ops.blockwise import tiles
from cubit_jax.ops.blockwise.tiles import dot


def attention_xla(
    q: jax.Array, k: jax.Array, v: jax.Array, *, segment_ids: jax.Array | None, window: int | None, scale: float
) -> jax.Array:
    """attention by row blocks; see there for the arguments."""
    tiling = tiles.Tiling(q.shape[1], tiles.choose_block(q.shape[1]), window)
    return _attend(tiling, scale, q, k, v, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(tiling, scale, q, k, v, segment_ids):
    return _forward(tiling, scale, q, k, v, segment_ids)[0]


def _forward(tiling, scale, query, key, value, segment_ids):
    q, k, v, segments = jax.tree.map(tiling.split, (query, key, value, segment_ids))
    dtype = tiles.compute_dtype(q, k, v)

    def row_block(_, x):
        i, q_i, v_i = x
        state = tiles.start(q_i, v.shape[-1], dtype)
        weights, summed, lse = tiles.forward_row(tiling, scale, i, q_i, k, v, segments, state)
        summed += dot("bhij,bhjk->bhik", weights, v_i.astype(dtype), tiles.precision(v))
        return None, (summed.astype(query.dtype), lse)

    _, (o, lse) = lax.scan(row_block, None, (jnp.arange(tiling.num_blocks), q, v))
    o, lse = tiling.merge(o), tiling.merge(lse)
    return o, (query, key, value, segment_ids, o, lse)


def _backward(tiling, scale, residuals, g):
    query, key, value, _, o, lse = residuals
    delta = jnp.sum(g.astype(lse.dtype) * o.astype(lse.dtype), axis=-1)
    q, k, v, segments, lse, g, delta = jax.tree.map(tiling.split, (*residuals[:4], lse, g, delta))

    def row_block(carry, x):
        i, q_i, lse_i, g_i, delta_i = x
        g_i = g_i.astype(lse.dtype)

        def cotangent(weights, dv_i):
            return g_i, delta_i[..., None], dv_i + dot("bhij,bhik->bhjk", weights, g_i, tiles.precision(v))

        dq, *carry = tiles.backward_row(tiling, scale, i, q_i, k, v, lse_i, segments, *carry, cotangent)
        return carry, dq.astype(query.dtype)

    carry = [jnp.zeros_like(k, lse.dtype), jnp.zeros_like(v, lse.dtype)]
    (dk, dv), dq = lax.scan(row_block, carry, (jnp.arange(tiling.num_blocks), q, lse, g, delta))
    dq, dk, dv = tiling.merge(dq), tiling.merge(scale * dk), tiling.merge(dv)
    return dq, dk.astype(key.dtype), dv.astype(value.dtype), None


_attend.defvjp(_forward, _backward)
