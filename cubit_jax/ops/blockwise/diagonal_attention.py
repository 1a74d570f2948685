"""Attention whose scores have a diagonal bilinear term, for the CEM step: dense, and blockwise in memory linear in L.

    p_ij = softmax over visible j of scale * (q_i . k_j + x_i^T diag(d) h_j)        per head
    o_i  = sum_j p_ij k_j  [H, K]        y_i = sum_heads d * sum_j p_ij h_j  [D]

A diagonal that the heads share costs its scores, and the product of the summed weights with h, once for all heads.
Summing over heads needs normalised weights, so that the running softmax of flash attention does not apply; instead a
block of rows sees its whole (causal) width at a time, C x L scores per head.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp

from cubit_jax.ops import dispatch, masks
from cubit_jax.ops.blockwise import tiles
from cubit_jax.ops.context_parallel import energy as context_energy
from cubit_jax.ops.context_parallel import solve as context_parallel
from cubit_jax.ops.context_parallel.layout import Layout
from cubit_jax.ops.interaction import interaction_scores, read_columns

_BLOCK = 128
# Row blocks in a group share a static width. More groups waste less on invisible columns (1/8 of the square here) and
# take longer to compile.
_GROUPS = 4


def diagonal_attention(
    queries: jax.Array,
    state: jax.Array,
    keys: jax.Array,
    context: jax.Array,
    diag: jax.Array,
    *,
    segment_ids: jax.Array | None,
    window: int | None,
    scale: float,
    implementation: str | None,
    layout: Layout | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The pair o [B, L, H, K], y [B, L, D], at least float32.

    Args:
      queries, keys: [B, L, H, K].
      state, context: [B, L, D].
      diag: [D] or [H, D].
      segment_ids, window, implementation, layout: as for `attention`; scale: float.
    """
    queries, state, keys, context = masks.zero_padding(segment_ids, queries, state, keys, context)
    implementations = IMPLEMENTATIONS
    if layout is not None:
        implementations = context_parallel.implementations(context_energy.diagonal_attention, layout)
    return dispatch.run(
        "diagonal_attention",
        implementations,
        implementation,
        queries,
        state,
        keys,
        context,
        diag,
        segment_ids=segment_ids,
        window=window,
        scale=scale,
    )


def aggregate_rows(
    queries: jax.Array,
    state: jax.Array,
    keys: jax.Array,
    context: jax.Array,
    diag: jax.Array,
    mask: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """o [B, I, H, K], y [B, I, D] of I rows against J columns; a row that sees nothing gives 0.

    mask: [I, J] or [B, I, J], True where visible. The others as for `diagonal_attention`.
    """
    scores = scale * interaction_scores(queries, state, keys, context, diag)
    weights = masks.masked_softmax(scores, jnp.expand_dims(mask, -3))
    return read_columns(weights, keys, context, diag)


def _reference(queries, state, keys, context, diag, *, segment_ids, window, scale):
    index = jnp.arange(queries.shape[1])
    mask = masks.visible(index, index, segment_ids, segment_ids, window=window)
    return aggregate_rows(queries, state, keys, context, diag, mask, scale)


def _xla(queries, state, keys, context, diag, *, segment_ids, window, scale):
    length = queries.shape[1]
    count = -(-length // _BLOCK)
    rows = [
        None if a is None else tiles.split_rows(a, count) for a in (queries, state, segment_ids, jnp.arange(length))
    ]
    o, y = _blockwise(_plan(count, rows[0].shape[2], length, window, scale), *rows, keys, context, segment_ids, diag)
    return tiles.join_rows(o, length), tiles.join_rows(y, length)


def _pallas(*args, **kwargs):
    raise NotImplementedError("no device kernel has the diagonal term")


IMPLEMENTATIONS = {"reference": _reference, "xla": _xla, "pallas": _pallas}


@dataclasses.dataclass(frozen=True)
class _Group:
    """Row blocks begin .. end - 1; block begin + b reads `width` columns from firsts[b] on."""

    begin: int
    end: int
    width: int
    firsts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Plan:
    groups: tuple[_Group, ...]
    window: int | None
    scale: float


def _plan(count, block, total, window, scale):
    """Which of `total` columns each of `count` blocks of `block` rows reads: static, as slices need static widths."""
    ends = [min((b + 1) * block, total) for b in range(count)]
    if window is not None:
        lows = [max(b * block - (window - 1), 0) for b in range(count)]
        width = max(end - low for low, end in zip(lows, ends))
        groups = (_Group(0, count, width, tuple(min(low, total - width) for low in lows)),)
    else:
        bounds = sorted({-(-count * g // _GROUPS) for g in range(_GROUPS + 1)})
        groups = tuple(_Group(a, b, ends[b - 1], (0,) * (b - a)) for a, b in itertools.pairwise(bounds))
    return _Plan(groups, window, scale)


def _block_function(plan, group, row_segments, index, first, keys, context, segments):
    """The columns that one block of rows reads, and its function from (queries, state, *columns, diag) to o, y."""
    columns = [jax.lax.dynamic_slice_in_dim(a, first, group.width, 1) for a in (keys, context)]
    if segments is not None:
        segments = jax.lax.dynamic_slice_in_dim(segments, first, group.width, 1)
    mask = masks.visible(index, first + jnp.arange(group.width), row_segments, segments, window=plan.window)
    return columns, lambda queries, state, keys, context, diag: aggregate_rows(
        queries, state, keys, context, diag, mask, plan.scale
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(plan, queries, state, row_segments, index, keys, context, segments, diag):
    """o [N, B, C, H, K], y [N, B, C, D]; queries, state, row_segments, index are N blocks of C rows, the rest whole."""
    outputs = []
    for group in plan.groups:

        def step(_, rows, group=group):
            queries, state, row_segments, index, first = rows
            columns, compute = _block_function(plan, group, row_segments, index, first, keys, context, segments)
            return None, compute(queries, state, *columns, diag)

        outputs.append(jax.lax.scan(step, None, _rows_of(group, queries, state, row_segments, index))[1])
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


def _rows_of(group, *arrays):
    return (*jax.tree.map(lambda a: a[group.begin : group.end], arrays), jnp.asarray(group.firsts, jnp.int32))


def _forward(plan, *args):
    return _blockwise(plan, *args), args


def _backward(plan, saved, cotangents):
    """A block at a time: its scores again, the cotangents of its rows, and its share of the columns' added to a sum."""
    queries, state, row_segments, index, keys, context, segments, diag = saved
    sums = [jnp.zeros(a.shape, tiles.compute_dtype(a)) for a in (keys, context, diag)]
    parts = []
    for group in plan.groups:

        def step(sums, rows, group=group):
            queries, state, row_segments, index, cotangents, first = rows
            columns, compute = _block_function(plan, group, row_segments, index, first, keys, context, segments)
            _, pull = jax.vjp(compute, queries, state, *columns, diag)
            d_queries, d_state, *shares, d_diag = pull(cotangents)
            added = []
            for total, share in zip(sums, shares):
                share = jax.lax.dynamic_slice_in_dim(total, first, group.width, 1) + share.astype(total.dtype)
                added.append(jax.lax.dynamic_update_slice_in_dim(total, share, first, 1))
            return [*added, sums[2] + d_diag.astype(sums[2].dtype)], (d_queries, d_state)

        sums, part = jax.lax.scan(step, sums, _rows_of(group, queries, state, row_segments, index, cotangents))
        parts.append(part)
    d_queries, d_state = jax.tree.map(lambda *blocks: jnp.concatenate(blocks), *parts)
    d_keys, d_context, d_diag = (total.astype(a.dtype) for total, a in zip(sums, (keys, context, diag)))
    return d_queries, d_state, None, None, d_keys, d_context, None, d_diag


_blockwise.defvjp(_forward, _backward)
