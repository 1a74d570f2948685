"""Attention whose scores have a diagonal bilinear term, for the CEM step: dense, and blockwise in memory linear in L.

    p_ij = softmax over visible j of scale * (q_i . k_j + x_i^T diag(d) h_j)        a head
    o_i  = sum_j p_ij k_j  [H, K]        y_i = sum_heads d * sum_j p_ij h_j  [D]

A diagonal that the heads share costs its scores, and the product of the summed weights with h, once for all heads.
Summing over heads needs normalised weights, so that the running softmax of flash attention does not apply; instead a
block of rows sees its whole (causal) width at a time, C x L scores a head.
"""

import functools
import itertools

import jax
import jax.numpy as jnp

from cubit_jax.ops import dispatch, masks, tiles
from cubit_jax.ops.energy import interaction_scores, join_rows, split_rows

_BLOCK = 128
# Row blocks in a group share a static width. More groups waste less on invisible columns (1/8 of the square here) and
# take longer to compile.
_GROUPS = 4


def diagonal_attention(queries, state, keys, context, diag, *, segment_ids, window, scale, implementation):
    """The pair o [B, L, H, K], y [B, L, D], at least float32.

    Args:
      queries, keys: [B, L, H, K].
      state, context: [B, L, D].
      diag: [D] or [H, D].
      segment_ids, window, implementation: as for `attention`; scale: float.
    """
    return dispatch.run("diagonal_attention", IMPLEMENTATIONS, implementation, queries, state, keys, context, diag,
                        segment_ids=segment_ids, window=window, scale=scale)


def aggregate_rows(queries, state, keys, context, diag, mask, scale):
    """o, y of rows against columns; mask [I, J] or [B, I, J] is True where visible; a row that sees nothing gives 0."""
    scores = scale * interaction_scores(queries, state, keys, context, diag)
    mask = jnp.expand_dims(mask, -3)
    lowest = jnp.finfo(scores.dtype).min
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, where=mask, initial=lowest))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    product = functools.partial(jnp.einsum, precision=tiles.precision(keys), preferred_element_type=scores.dtype)
    o = product("bhij,bjhk->bihk", weights.astype(keys.dtype), keys)
    if diag.ndim == 1:
        return o, diag * product("bij,bjd->bid", jnp.sum(weights, axis=1).astype(context.dtype), context)
    read = product("bhij,bjd->bihd", weights.astype(context.dtype), context)
    return o, jnp.sum(read * diag, axis=2)


def _reference(queries, state, keys, context, diag, *, segment_ids, window, scale):
    index = jnp.arange(queries.shape[1])
    mask = masks.visible(index, index, segment_ids, segment_ids, window=window)
    return aggregate_rows(queries, state, keys, context, diag, mask, scale)


def _xla(queries, state, keys, context, diag, *, segment_ids, window, scale):
    length = queries.shape[1]
    count = -(-length // min(_BLOCK, length))
    block = -(-length // count)
    columns = [_pad(a, count * block) for a in (keys, context)]
    segments = None if segment_ids is None else _pad(segment_ids, count * block)
    rows = [split_rows(a, count) for a in (queries, state)]
    o, y = _blockwise((window, scale, block), *rows, *columns, diag, segments)
    return join_rows(o, length), join_rows(y, length)


def _pallas(*args, **kwargs):
    raise NotImplementedError("no device kernel has the diagonal term")


IMPLEMENTATIONS = {"reference": _reference, "xla": _xla, "pallas": _pallas}


def _pad(array, length):
    return jnp.pad(array, [(0, 0), (0, length - array.shape[1])] + [(0, 0)] * (array.ndim - 2))


def _groups(count, block, window):
    """(first block, one past the last, width in columns) of runs of row blocks that read the same number of columns."""
    if window is not None:
        return [(0, count, min(count, -(-(window - 1) // block) + 1) * block)]
    bounds = [-(-count * g // _GROUPS) for g in range(_GROUPS + 1)]
    return [(first, last, last * block) for first, last in itertools.pairwise(bounds) if first < last]


def _block_rows(static, start, segments, width):
    """The first column that the block of rows at `start` reads, and its function from rows and columns to (o, y)."""
    window, scale, block = static
    first = jnp.maximum(start + block - width, 0) if window is not None else 0
    row, column = start + jnp.arange(block), first + jnp.arange(width)
    row_segments = column_segments = None
    if segments is not None:
        row_segments = jax.lax.dynamic_slice_in_dim(segments, start, block, 1)
        column_segments = jax.lax.dynamic_slice_in_dim(segments, first, width, 1)
    mask = masks.visible(row, column, row_segments, column_segments, window=window)
    return first, lambda queries, state, keys, context, diag: aggregate_rows(
        queries, state, keys, context, diag, mask, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(static, queries, state, keys, context, diag, segments):
    """o [N, B, C, H, K], y [N, B, C, D]; queries and state come as N blocks of C rows, keys and context whole."""
    window, _, block = static
    outputs = []
    for begin, end, width in _groups(queries.shape[0], block, window):
        def step(_, rows, width=width):
            start, queries, state = rows
            first, compute = _block_rows(static, start, segments, width)
            columns = [jax.lax.dynamic_slice_in_dim(a, first, width, 1) for a in (keys, context)]
            return None, compute(queries, state, *columns, diag)

        starts = block * jnp.arange(begin, end)
        outputs.append(jax.lax.scan(step, None, (starts, queries[begin:end], state[begin:end]))[1])
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


def _forward(static, *args):
    return _blockwise(static, *args), args


def _backward(static, saved, cotangents):
    """A block at a time: its scores again, the cotangents of its rows, and its share of the columns' added to a sum."""
    queries, state, keys, context, diag, segments = saved
    window, _, block = static
    wide = [jnp.zeros(a.shape, tiles.compute_dtype(a)) for a in (keys, context, diag)]
    parts = []
    for begin, end, width in _groups(queries.shape[0], block, window):
        def step(sums, rows, width=width):
            start, queries, state, cotangents = rows
            first, compute = _block_rows(static, start, segments, width)
            columns = [jax.lax.dynamic_slice_in_dim(a, first, width, 1) for a in (keys, context)]
            _, pull = jax.vjp(compute, queries, state, *columns, diag)
            d_queries, d_state, *shares, d_diag = pull(cotangents)
            added = [jax.lax.dynamic_update_slice_in_dim(
                total, jax.lax.dynamic_slice_in_dim(total, first, width, 1) + share.astype(total.dtype), first, 1)
                for total, share in zip(sums, shares)]
            return [*added, sums[2] + d_diag], (d_queries, d_state)

        starts = block * jnp.arange(begin, end)
        rows = (starts, *jax.tree.map(lambda a, b=begin, e=end: a[b:e], (queries, state, cotangents)))
        wide, part = jax.lax.scan(step, wide, rows)
        parts.append(part)
    d_queries, d_state = jax.tree.map(lambda *blocks: jnp.concatenate(blocks), *parts)
    d_keys, d_context, d_diag = (total.astype(a.dtype) for total, a in zip(wide, (keys, context, diag)))
    return d_queries, d_state, d_keys, d_context, d_diag, None


_blockwise.defvjp(_forward, _backward)
