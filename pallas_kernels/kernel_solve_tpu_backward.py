"""Backward pass of the triangular system on a TPU: one kernel, five products a tile.

Tiles are transposed (columns of the system on sublanes, its rows on lanes), so the row normaliser and delta are lane
rows, which broadcast for nothing.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks_tpu import (
    FLOOR,
    LANES,
    MIB,
    block,
    causal,
    dot,
    dot_float32,
    fold_sublanes,
    head,
    hide,
    in_hbm,
    output_type,
    row_to_column,
    visible,
    widen,
)


def backward(settings, cotangent, query, key, rhs, ridge, beta, segments, u, lse, inverse, row_sum, *, interpret):
    """Gradients, shaped and typed as the inputs: (query, key, rhs, ridge or beta).

    Arrays as for forward; segments: a pair (rows [B, 1, L], columns [B, L, 128]) or None. The gradient of ridge comes
    as partial sums [B * H / heads, 1, heads * K], that of beta as [B * H / heads, heads, L].
    """
    s = settings
    batch, length, width = query.shape
    tile_lanes = s.heads * s.head_dim
    groups = width // tile_lanes
    last_row_block = s.num_row_blocks - 1

    def g_batch(g):
        return jax.lax.div(g, groups)

    def g_lane(g):
        return jax.lax.rem(g, groups)

    def row_block(step):
        return last_row_block - step

    def column_block(i, j):
        row = row_block(i)
        return jnp.maximum(s.diagonal_tile(row) - j, s.first_tile(row))

    def row_spec(lanes):
        return pl.BlockSpec((1, s.rows, lanes), lambda g, i, j: (g_batch(g), row_block(i), g_lane(g)))

    row_of_lanes = pl.BlockSpec((1, s.heads, s.rows), lambda g, i, j: (g, 0, row_block(i)))
    column_spec = pl.BlockSpec((1, s.columns, tile_lanes), lambda g, i, j: (g_batch(g), column_block(i, j), g_lane(g)))
    inputs = [cotangent, query, key, rhs, u, key, u, lse, inverse]
    in_specs = [row_spec(tile_lanes)] * 5 + [column_spec] * 2 + [row_of_lanes, row_spec(s.heads * LANES)]
    if s.strict:
        inputs += [beta, row_sum]
        in_specs += [row_of_lanes, row_spec(tile_lanes)]
    else:
        inputs.append(ridge)
        in_specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
    if s.segments:
        row_segments, column_segments = segments
        inputs += [row_segments, column_segments, column_segments]
        in_specs += [
            pl.BlockSpec((1, 1, s.rows), lambda g, i, j: (g_batch(g), 0, row_block(i))),
            pl.BlockSpec((1, s.rows, LANES), lambda g, i, j: (g_batch(g), row_block(i), 0)),
            pl.BlockSpec((1, s.columns, LANES), lambda g, i, j: (g_batch(g), column_block(i, j), 0)),
        ]
    shape = output_type(inputs, interpret)
    out_shape = [shape(x.shape, x.dtype) for x in (query, key, rhs)]
    out_specs = [row_spec(tile_lanes)] * 3
    if s.strict:
        out_shape.append(shape((batch * groups, s.heads, length), jnp.float32))
        out_specs.append(row_of_lanes)
    else:
        out_shape.append(shape((batch * groups, 1, tile_lanes), jnp.float32))
        out_specs.append(pl.BlockSpec((1, 1, tile_lanes), lambda g, i, j: (g, 0, 0)))
    return pl.pallas_call(
        functools.partial(_kernel, settings=s),
        out_shape=out_shape,
        grid=(batch * groups, s.num_row_blocks, s.num_steps),
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=[
            pltpu.VMEM((s.heads, length, s.head_dim), jnp.float32),  # what later rows subtract from the cotangent
            pltpu.VMEM((s.heads, length, s.head_dim), jnp.float32),  # gradient of key
            pltpu.VMEM((s.heads, s.head_dim, s.rows), jnp.float32),  # gradient of query, transposed
            pltpu.VMEM((s.heads, s.rows, s.head_dim), s.dtype),  # solution of the transposed system, times beta
            pltpu.VMEM((s.heads, 8, s.rows), jnp.float32),  # sums of the rows of dS, a part in each sublane
            pltpu.VMEM((s.heads, 1, s.rows), jnp.float32),  # minus delta
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=backward_bytes(length, s.rows, s.columns, s.heads, s.head_dim, s.precise),
        ),
        interpret=interpret,
        name="kernel_solve_tpu_backward",
    )(*in_hbm(inputs, interpret))


def backward_bytes(length, rows, columns, heads, head_dim, precise):
    """Limit of vector memory for the compiler, as forward_bytes."""
    width, lanes = 4 if precise else 2, max(head_dim, LANES)
    scratch = 2 * (length + rows) * lanes * 4
    blocks = 2 * rows * (lanes * (8 + 7 * width) + LANES * 4) + 2 * columns * lanes * (4 + width)
    return heads * (scratch + blocks + rows * columns * (16 if precise else 8)) + 4 * MIB


def _kernel(*refs, settings):
    s = settings
    refs = list(refs)
    cotangent, query, key_own, rhs, u_own, key, u, lse, inverse, diagonal = (refs.pop(0) for _ in range(10))
    row_sum = refs.pop(0) if s.strict else None
    row_segments, segments_own, column_segments = (refs.pop(0) for _ in range(3)) if s.segments else (None,) * 3
    d_query, d_key, d_rhs, d_diagonal, carried, d_key_sum, d_query_sum, z, d_scores_sum, minus_delta = refs
    group, i, step = pl.program_id(0), s.num_row_blocks - 1 - pl.program_id(1), pl.program_id(2)
    last = s.diagonal_tile(i)
    j = last - step
    remainder = i - last * (s.columns // s.rows)
    first_row = pl.multiple_of(i * s.rows, s.rows)

    @pl.when((step == 0) & (i == s.num_row_blocks - 1))
    def _():
        zeros = jnp.zeros((s.heads, s.rows, s.head_dim), jnp.float32)

        def clear(n, _):
            rows = pl.ds(pl.multiple_of(n * s.rows, s.rows), s.rows)
            carried[:, rows] = zeros
            d_key_sum[:, rows] = zeros

        jax.lax.fori_loop(0, s.num_row_blocks, clear, None)
        d_diagonal[...] = jnp.zeros_like(d_diagonal)

    def products(h, columns, rows, weights, keep, key_tile, u_tile):
        """dS of a tile from its weights, and what it adds to the gradients; rows are lanes of the row block."""
        z_rows, query_rows = z[h, rows], query[0, rows, head(s, h)]
        d_weights = dot(u_tile.astype(s.dtype), z_rows, (1, 1), s.precise)
        d_scores = weights * (minus_delta[h, :, rows] - d_weights)
        if keep is not None:
            d_scores = d_scores * keep
        if not s.strict:
            d_scores_sum[h, :, rows] += fold_sublanes(d_scores)
        d_scores = d_scores.astype(s.dtype)
        d_key_sum[h, columns] += dot(d_scores, query_rows, precise=s.precise)
        d_query_sum[h, :, rows] += dot(key_tile.T, d_scores, precise=s.precise)

    def tile(width):
        """The first `width` columns of tile j, all of them before the diagonal block."""
        mask = visible(
            s,
            (width, s.rows),
            1,
            i * s.rows - j * s.columns,
            row_segments[0] if s.segments else None,
            column_segments[0, :width] if s.segments else None,
        )
        columns = pl.ds(pl.multiple_of(j * s.columns, s.columns), width)
        for h in range(s.heads):
            key_tile = key[0, :width, head(s, h)]
            scores = dot(key_tile, query[0, :, head(s, h)], (1, 1), s.precise) * s.log2_scale
            weights = jnp.exp2(hide(scores - lse[0, h : h + 1], mask, FLOOR))
            carried[h, columns] += dot(weights.astype(s.dtype), z[h], precise=s.precise)
            products(h, columns, slice(None), weights, None, key_tile, u[0, :width, head(s, h)])

    @pl.when(step == 0)
    def _():
        d_query_sum[...] = jnp.zeros_like(d_query_sum)
        d_scores_sum[...] = jnp.zeros_like(d_scores_sum)
        weights = {}
        blocks = range(s.rows // LANES)
        for h in range(s.heads):
            for b in blocks:
                rows = slice(b * LANES, None)
                shape = (LANES, s.rows - b * LANES)
                scores = dot(key_own[0, block(b), head(s, h)], query[0, rows, head(s, h)], (1, 1), s.precise)
                mask = visible(
                    s,
                    shape,
                    1,
                    0,
                    row_segments[0, :, rows] if s.segments else None,
                    segments_own[0, block(b)] if s.segments else None,
                )
                scores = hide(scores * s.log2_scale - lse[0, h : h + 1, rows], mask, FLOOR)
                edge = jnp.where(causal(s, 1, s.strict), scores[:, :LANES], FLOOR)
                scores = jnp.concatenate([edge, scores[:, LANES:]], axis=1) if shape[1] > LANES else edge
                weights[h, b] = jnp.exp2(scores)
        for b in reversed(blocks):
            for h in range(s.heads):
                target = cotangent[0, block(b), head(s, h)] - carried[h, pl.ds(first_row + b * LANES, LANES)]
                if b < blocks[-1]:
                    later = weights[h, b][:, LANES:].astype(s.dtype)
                    target = target - dot(later, z[h, (b + 1) * LANES :], precise=s.precise)
                transposed = inverse[0, block(b), h * LANES : (h + 1) * LANES].T
                y = dot_float32(transposed, target, s.precise)
                d_rhs[0, block(b), head(s, h)] = y.astype(d_rhs.dtype)
                u_rows = u_own[0, block(b), head(s, h)]
                rhs_rows = rhs[0, block(b), head(s, h)].astype(jnp.float32)
                if s.strict:
                    beta = widen(row_to_column(diagonal[0, h : h + 1, block(b)]), s.head_dim)
                    z[h, block(b)] = (beta * y).astype(s.dtype)
                    minus_delta[h, :, block(b)] = _row_sums(y * (rhs_rows - u_rows))
                    known = row_sum[0, block(b), head(s, h)].astype(jnp.float32)
                    d_diagonal[0, h : h + 1, block(b)] = -_row_sums(y * known)
                else:
                    z[h, block(b)] = y.astype(s.dtype)
                    ridge = diagonal[group * s.heads + h]
                    minus_delta[h, :, block(b)] = _row_sums(y * (rhs_rows - ridge * u_rows))
                    d_diagonal[0, :, head(s, h)] -= jnp.sum(y * u_rows, axis=0, keepdims=True)
        for h in range(s.heads):
            for b in blocks:
                # The diagonal of dS follows from the rest of its row (see below); for DeltaFormer there is none.
                edge = None
                if not s.strict:
                    edge = causal(s, 1, True).astype(jnp.float32)
                    if b < blocks[-1]:
                        rest = jnp.ones((LANES, s.rows - (b + 1) * LANES), jnp.float32)
                        edge = jnp.concatenate([edge, rest], axis=1)
                products(
                    h,
                    pl.ds(first_row + b * LANES, LANES),
                    slice(b * LANES, s.rows),
                    weights[h, b],
                    edge,
                    key_own[0, block(b), head(s, h)],
                    u_own[0, block(b), head(s, h)],
                )

    for n in range(1, s.columns // s.rows):

        @pl.when((step == 0) & (remainder == n))
        def _(n=n):
            tile(n * s.rows)

    @pl.when((step > 0) & (j >= s.first_tile(i)))
    def _():
        tile(s.columns)

    @pl.when(step == s.num_steps - 1)
    def _():
        for h in range(s.heads):
            d_query_rows = d_query_sum[h].T
            d_key_rows = d_key_sum[h, pl.ds(first_row, s.rows)]
            if not s.strict:
                # The rows of dS sum to zero. With peaked weights dP - delta cancels on the diagonal, so it is taken as
                # minus the sum of the others: 3e-4 relative error in d query for bfloat16, where it was 0.29.
                total = jnp.sum(d_scores_sum[h], axis=0, keepdims=True)
                total = widen(row_to_column(total), s.head_dim)
                d_query_rows -= total * key_own[0, :, head(s, h)].astype(jnp.float32)
                d_key_rows -= total * query[0, :, head(s, h)].astype(jnp.float32)
            d_query[0, :, head(s, h)] = (d_query_rows * s.scale).astype(d_query.dtype)
            d_key[0, :, head(s, h)] = (d_key_rows * s.scale).astype(d_key.dtype)


def _row_sums(x):
    """[128, K] -> [1, 128]: the sums over K, as a lane row."""
    return jnp.sum(x.T, axis=0, keepdims=True)
