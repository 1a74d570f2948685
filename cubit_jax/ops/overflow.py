"""Rows that are not finite, and the rows beside them.

Blockwise code and kernels multiply a tile of weights, zero where a row does not see a column, by the values of those
columns. Zero times infinity is NaN, so that one value that is not finite would spoil the rows before it in its tile,
and other documents. Here the result is checked, and where it is not finite throughout it is made again row by row, by
sums over visible columns alone. That path is slow and meets nobody whose numbers are finite.
"""

import functools

import jax
import jax.numpy as jnp

from cubit_jax.ops import masks
from cubit_jax.ops.blockwise import tiles


@functools.partial(jax.jit, static_argnames=("window", "scale"))
def spare_other_rows(
    out: jax.Array,
    query: jax.Array,
    key: jax.Array,
    values: jax.Array,
    start: jax.Array,
    segment_ids: jax.Array | None = None,
    rhs: jax.Array | None = None,
    ridge: jax.Array | None = None,
    beta: jax.Array | None = None,
    *,
    window: int | None,
    scale: float,
) -> jax.Array:
    """`out` with its non-finite rows computed one by one: those stay non-finite that see a value that is.

    Differentiable in `out` alone, as the identity: a row that is replaced has no gradient.

    Args:
      out: [B, n, H, V], attention, or the solution of the system where rhs is given.
      query: [B, n, H, K]; key: [B, M, H, K]; values: [B, M, H, V], of the system the solution of the rows before.
      start: int [B], the sequence index of the first of the n rows.
      segment_ids: int [B, M] or None; the rows are then columns start .. start + n - 1.
      rhs: [B, n, H, V]; ridge: [H] or beta: [B, n, H], as for kernel_solve.
      window, scale: as for attention.
    """
    query, *others = jax.lax.stop_gradient((query, key, values, start, segment_ids, rhs, ridge, beta))
    finite = jnp.isfinite(out)

    def one_by_one(carry):
        missing, _ = carry
        # What does not depend on the carry would be computed before the loop, whether it runs or not.
        rows = _row_by_row(jnp.where(missing, query, 0), *others, window=window, scale=scale)
        return ~missing, rows.astype(out.dtype)

    # A loop of one pass or none, and not lax.cond, which under jax.vmap would always take both of its branches.
    missing = ~jnp.all(finite)
    _, rows = jax.lax.while_loop(lambda carry: carry[0], one_by_one, (missing, jax.lax.stop_gradient(out)))
    return jnp.where(finite, out, rows)


def _row_by_row(query, key, values, start, segment_ids, rhs, ridge, beta, *, window, scale):
    dtype = tiles.compute_dtype(query, key, values)
    query, key, values, rhs, ridge, beta = (
        None if x is None else x.astype(dtype) for x in (query, key, values, rhs, ridge, beta)
    )
    columns = jnp.arange(key.shape[1])

    def row(values, t):
        index = start + t
        # By masks and not by indices of the batch, which would be exchanged between devices that divide it.
        own = columns == index[:, None]
        own_segment = None if segment_ids is None else jnp.sum(jnp.where(own, segment_ids, 0), axis=1, keepdims=True)
        mask = masks.visible(
            index[:, None], columns, own_segment, segment_ids, window=window, strict=beta is not None
        ).swapaxes(1, 2)[..., None]  # [B, M, 1, 1]
        scores = scale * jnp.einsum("bhk,bjhk->bhj", query[:, t], key, precision="highest")
        weights = masks.masked_softmax(scores, mask[..., 0].swapaxes(1, 2)).swapaxes(1, 2)[..., None]
        if rhs is None:
            return values, jnp.sum(weights * values, axis=1, where=weights > 0)
        own = own[..., None, None]
        summed = jnp.sum(weights * values, axis=1, where=(weights > 0) & ~own)
        if beta is None:
            pivot = jnp.sum(weights, axis=1, where=own) + ridge[:, None]
            out = jnp.where(pivot == 0, 0, (rhs[:, t] - summed) / jnp.where(pivot == 0, 1, pivot))
        else:
            out = rhs[:, t] - beta[:, t, :, None] * summed
        return jnp.where(own, out[:, None], values), out

    return jnp.moveaxis(jax.lax.scan(row, values, jnp.arange(query.shape[1]))[1], 0, 1)
