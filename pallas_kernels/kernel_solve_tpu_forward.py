"""Forward pass of the triangular system on a TPU: one kernel, two products a tile."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks_tpu import (
    FLOOR,
    LANES,
    LOG2_E,
    MASKED,
    MIB,
    UNSEEN,
    block,
    causal,
    column_to_row,
    dot,
    dot_float32,
    fold_lanes,
    head,
    hide,
    in_hbm,
    invert,
    iota,
    output_type,
    row_to_column,
    visible,
    widen,
)


def forward(settings, query, key, rhs, ridge, beta, segments, *, residuals, interpret):
    """u and, with residuals, what the backward pass needs.

    query, key, rhs: [B, L, H * K]; ridge: [B * H] or None; beta: [B * H / heads, heads, L] or None; segments: a pair
    (of rows, of columns), each [B, 1, L], or None. Returns (u [B, L, H / heads, heads, K],) or, with residuals,
    (u [B, L, H * K], lse, inverse) and for DeltaFormer row_sum [B, L, H * K] = P u; lse [B * H / heads, heads, L] is in
    base 2, inverse [B, L, H * 128] holds those of the diagonal blocks.
    """
    s = settings
    batch, length, width = query.shape
    groups = width // (s.heads * s.head_dim)  # groups of heads

    def row_spec(lanes):
        return pl.BlockSpec((1, s.rows, lanes), lambda g, i, j: (g_batch(g), i, g_lane(g)))

    def g_batch(g):
        return jax.lax.div(g, groups)

    def g_lane(g):
        return jax.lax.rem(g, groups)

    def column_block(i, j):
        return jnp.minimum(s.first_tile(i) + j, s.diagonal_tile(i))

    tile_lanes = s.heads * s.head_dim
    row_of_lanes = pl.BlockSpec((1, s.heads, s.rows), lambda g, i, j: (g, 0, i))
    key_spec = pl.BlockSpec((1, s.columns, tile_lanes), lambda g, i, j: (g_batch(g), column_block(i, j), g_lane(g)))
    inputs = [query, key, rhs]
    in_specs = [row_spec(tile_lanes), key_spec, row_spec(tile_lanes)]
    if s.strict:
        inputs.append(beta)
        in_specs.append(row_of_lanes)
    else:
        inputs.append(ridge)
        in_specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
    if s.segments:
        inputs += segments
        in_specs += [
            pl.BlockSpec((1, 1, s.rows), lambda g, i, j: (g_batch(g), 0, i)),
            pl.BlockSpec((1, 1, s.columns), lambda g, i, j: (g_batch(g), 0, column_block(i, j))),
        ]
    shape = output_type(inputs, interpret)
    if residuals:
        out_shape = [
            shape((batch, length, width), jnp.float32),
            shape((batch * groups, s.heads, length), jnp.float32),
            shape((batch, length, groups * s.heads * LANES), jnp.float32),
        ]
        out_specs = [row_spec(tile_lanes), row_of_lanes, row_spec(s.heads * LANES)]
        if s.strict:
            out_shape.append(shape((batch, length, width), s.dtype))
            out_specs.append(row_spec(tile_lanes))
    else:
        # As it lies in memory this is [B, L, H, K], so no copy follows. The backward pass wants the heads side by side.
        out_shape = [shape((batch, length, groups, s.heads, s.head_dim), jnp.float32)]
        out_specs = [
            pl.BlockSpec((1, s.rows, 1, s.heads, s.head_dim), lambda g, i, j: (g_batch(g), i, g_lane(g), 0, 0))
        ]
    return pl.pallas_call(
        functools.partial(_kernel, settings=s, residuals=residuals),
        out_shape=out_shape,
        grid=(batch * groups, s.num_row_blocks, s.num_steps),
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=[
            pltpu.VMEM((s.heads, s.rows, LANES), jnp.float32),  # running maximum, all lanes equal
            pltpu.VMEM((s.heads, s.rows, LANES), jnp.float32),  # running sum of the weights, a part in each lane
            pltpu.VMEM((s.heads, s.rows, s.head_dim), jnp.float32),  # weights times u
            pltpu.VMEM((s.heads, length, s.head_dim), s.dtype),  # u, for the products of later rows
            *([pltpu.VMEM((s.rows, LANES), jnp.int32)] if s.segments else []),  # segments of the rows, all lanes equal
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=forward_bytes(length, s.rows, s.columns, s.heads, s.head_dim, s.precise, residuals),
        ),
        interpret=interpret,
        name="kernel_solve_tpu_forward",
    )(*in_hbm(inputs, interpret))


def forward_bytes(length, rows, columns, heads, head_dim, precise, residuals=True):
    """Limit of vector memory for the compiler: scratch, two of every block, and what was seen to be spilled.

    It is tight on purpose: XLA puts arrays of its own beyond the limit, whatever the kernel uses of it.
    """
    width, lanes = 4 if precise else 2, max(head_dim, LANES)
    scratch = rows * (2 * LANES + lanes) * 4 + length * lanes * width
    blocks = 2 * lanes * (rows * (2 * width + 4) + columns * width)
    if residuals:
        blocks += 2 * rows * (LANES * 4 + lanes * width)
    return heads * (scratch + blocks + rows * columns * (12 if precise else 4)) + 3 * MIB


def _kernel(*refs, settings, residuals):
    s = settings
    refs = list(refs)
    query, key, rhs, diagonal = (refs.pop(0) for _ in range(4))
    row_ids, column_segments, row_segments = (refs.pop(0), refs.pop(0), refs.pop()) if s.segments else (None,) * 3
    maximum, total, weighted, u_low = refs[-4:]
    outputs = refs[:-4]
    group, i, step = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    j = s.first_tile(i) + step
    last = s.diagonal_tile(i)
    remainder = i - last * (s.columns // s.rows)  # row blocks between the start of the last tile and the diagonal

    @pl.when(step == 0)
    def _():
        maximum[...] = jnp.full_like(maximum, FLOOR)
        total[...] = jnp.zeros_like(total)
        weighted[...] = jnp.zeros_like(weighted)
        if s.segments:
            row_segments[...] = row_to_column(row_ids[0])

    def tile(width):
        """The first `width` columns of tile j, all of them before the diagonal block."""
        mask = visible(
            s,
            (s.rows, width),
            0,
            i * s.rows - j * s.columns,
            row_segments[...] if s.segments else None,
            column_segments[0, :, :width] if s.segments else None,
        )
        for h in range(s.heads):
            scores = dot(query[0, :, head(s, h)], key[0, :width, head(s, h)], (1, 1), s.precise) * s.log2_scale
            weights, rescale = _accumulate(maximum, total, h, slice(None), hide(scores, mask, MASKED))
            start = pl.multiple_of(j * s.columns, s.columns)
            weighted[h] = weighted[h] * widen(rescale, s.head_dim) + dot(
                weights.astype(s.dtype), u_low[h, pl.ds(start, width)], precise=s.precise
            )

    @pl.when(j < last)
    def _():
        tile(s.columns)

    for n in range(1, s.columns // s.rows):

        @pl.when((j == last) & (remainder == n))
        def _(n=n):
            tile(n * s.rows)

    @pl.when(j == last)
    def _():
        offset = pl.multiple_of(remainder * s.rows, s.rows)
        first_row = pl.multiple_of(i * s.rows, s.rows)
        _diagonal_block(
            s,
            outputs,
            query,
            key.at[0, pl.ds(offset, s.rows)],
            rhs,
            (lambda h: diagonal[0, h : h + 1]) if s.strict else (lambda h: diagonal[group * s.heads + h]),
            row_segments,
            column_segments.at[0, :, pl.ds(offset, s.rows)] if s.segments else None,
            (maximum, total, weighted, u_low.at[:, pl.ds(first_row, s.rows)]),
            residuals,
        )


def _accumulate(maximum, total, h, rows, scores):
    """One step of the running softmax: the unnormalised weights and the factor of what was summed before."""
    before = maximum[h, rows]
    after = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp2(scores - widen(after, scores.shape[1]))
    rescale = jnp.exp2(before - after)
    maximum[h, rows] = after
    total[h, rows] = total[h, rows] * rescale + fold_lanes(weights)
    return weights, rescale


def _diagonal_block(s, outputs, query, key, rhs, diagonal, row_segments, column_segments, scratch, residuals):
    """Finishes the softmax of a row block and solves for its u."""
    maximum, total, weighted, u_low = scratch
    blocks = range(s.rows // LANES)
    identity = (iota((LANES, LANES), 0) == iota((LANES, LANES), 1)).astype(jnp.float32)
    pairs = [(h, b) for h in range(s.heads) for b in blocks]
    # By blocks of columns, here and in the solution below, so that the matrix unit loads each of them once.
    scores_below = {
        (h, c): dot(query[0, c * LANES :, head(s, h)], key[block(c), head(s, h)], (1, 1), s.precise) * s.log2_scale
        for h, c in pairs
    }
    before, own, known, system, scale = {}, {}, {}, {}, {}
    row_sums = residuals and s.strict
    for h, b in pairs:
        width = (b + 1) * LANES
        scores = jnp.concatenate([scores_below[h, c][block(b - c)] for c in range(b + 1)], axis=1)
        mask = visible(
            s,
            (LANES, width),
            0,
            b * LANES,
            row_segments[block(b)] if s.segments else None,
            column_segments[:, :width] if s.segments else None,
        )
        scores = hide(scores, mask, MASKED)
        edge = jnp.where(causal(s, 0, s.strict), scores[:, block(b)], MASKED)
        scores = jnp.concatenate([scores[:, : b * LANES], edge], axis=1) if b else edge
        weights, rescale = _accumulate(maximum, total, h, block(b), scores)
        known[h, b] = weighted[h, block(b)] * widen(rescale, s.head_dim)
        before[h, b] = weights if row_sums else weights[:, : b * LANES]
        own[h, b] = weights[:, block(b)]
        norm = jnp.broadcast_to(jnp.sum(total[h, block(b)], axis=1, keepdims=True), (LANES, LANES))
        log_norm = maximum[h, block(b)] + jnp.log(norm) * LOG2_E
        if s.strict or s.segments:  # some rows see nothing
            seen = norm > 0
            norm = jnp.where(seen, 1.0 / jnp.where(seen, norm, 1.0), 0.0)
            log_norm = jnp.where(seen, log_norm, UNSEEN)
        else:
            norm = 1.0 / norm
        if residuals:
            outputs[1][0, h : h + 1, block(b)] = column_to_row(log_norm)
        if s.strict:
            scale[h, b] = norm * row_to_column(diagonal(h)[:, block(b)])
            system[h, b] = own[h, b] * scale[h, b] + identity
            if row_sums:
                total[h, block(b)] = norm  # the sum is not needed any more
        else:
            scale[h, b] = norm
            system[h, b] = own[h, b] * norm + diagonal(h) * identity
    # Neighbours share products, so they are heads of the same rows: what is not finite there spoils no row before them.
    pairs = [(h, b) for b in blocks for h in range(s.heads)]
    inverses = dict(zip(pairs, invert([system[pair] for pair in pairs], s.precise)))
    for b in blocks:
        for h in range(s.heads):
            target = rhs[0, block(b), head(s, h)].astype(jnp.float32) - widen(scale[h, b], s.head_dim) * known[h, b]
            u = dot_float32(inverses[h, b], target, s.precise)
            u_low[h, block(b)] = u.astype(s.dtype)  # read again below: the estimator does not take a cast and its use
            if later := blocks[b + (not row_sums) :]:
                below = jnp.concatenate([before[h, c][:, block(b)] for c in later], axis=0)
                below = dot(below.astype(s.dtype), u_low[h, block(b)], precise=s.precise)
                for c in later:
                    known[h, c] = known[h, c] + below[block(c - later[0])]
            if not residuals:
                outputs[0][0, block(b), 0, h] = u
            else:
                outputs[0][0, block(b), head(s, h)] = u
                outputs[2][0, block(b), h * LANES : (h + 1) * LANES] = inverses[h, b]
                if row_sums:
                    row_sum = widen(total[h, block(b)], s.head_dim) * known[h, b]
                    outputs[3][0, block(b), head(s, h)] = row_sum.astype(s.dtype)
