"""Backward kernel of the causal solve on a TPU.

For the cotangent g of u it solves (D + c P)^T y = g, and with z = c y computes

    d rhs = y,   dP = -z u^T,   delta_i = sum_j P_ij dP_ij = -y_i . (rhs_i - D_i u_i),   dS = P (dP - delta)

and from dS, the gradient of the scores, those of query and key: five products per tile. The grid is (groups of heads of
a sequence, row blocks, tiles); the last two run in order, from the last row block and from its diagonal block
backwards, because y of a block needs the y of all blocks after it. For one row block

1. its diagonal block is solved for y (`_solve_blocks`) and gives its part of the gradients;
2. each tile before it adds P^T z to what the rows of that tile subtract from g, and gives its part of the gradients
   (`_tile`).

Tiles are transposed: columns of the system lie on sublanes, its rows on lanes. So lse and delta are lane rows, whose
broadcast over a tile is free.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kernel_call import Operand, Ref, call
from pallas_kernels.kernel_solve_tpu_tiles import (
    FLOOR,
    LANES,
    MIB,
    Settings,
    block,
    causal,
    dot,
    dot_float32,
    fold_sublanes,
    head,
    in_hbm,
    masked,
    output_type,
    row_to_column,
    visible,
    widen,
)


class Refs(NamedTuple):
    """What one program sees. Arrays that end in heads * K hold the heads side by side."""

    cotangent: Ref  # [1, rows, heads * K]
    query: Ref  # [1, rows, heads * K]
    key_own: Ref  # [1, rows, heads * K], key of the row block
    rhs: Ref  # [1, rows, heads * K]
    u_own: Ref  # [1, rows, heads * K], u of the row block
    key: Ref  # [1, columns, heads * K], key of the tile
    u: Ref  # [1, columns, heads * K], u of the tile
    lse: Ref  # [1, heads, rows], log-sum-exp in base 2
    inverse: Ref  # [1, rows, heads * 128], of the diagonal blocks
    d_query: Ref  # out: [1, rows, heads * K]
    d_key: Ref  # out: [1, rows, heads * K]
    d_rhs: Ref  # out: [1, rows, heads * K], y
    carried: Ref  # scratch: [heads, L, K], what later rows subtract from the cotangent
    d_key_sum: Ref  # scratch: [heads, L, K]
    d_query_sum: Ref  # scratch: [heads, K, rows], transposed
    z: Ref  # scratch: [heads, rows, K], solution of the transposed system, times beta
    d_scores_sum: Ref  # scratch: [heads, 8, rows], sums of the rows of dS, a part in each sublane
    minus_delta: Ref  # scratch: [heads, 1, rows]
    ridge: Ref = None  # Cubit: [B * H], scalars
    beta: Ref = None  # DeltaFormer: [1, heads, rows]
    row_sum: Ref = None  # DeltaFormer: [1, rows, heads * K], P u
    row_segments: Ref = None  # with segments: [1, 1, rows]
    segments_own: Ref = None  # with segments: [1, rows, 128], of the row block as columns, all lanes equal
    column_segments: Ref = None  # with segments: [1, columns, 128], of the tile, all lanes equal
    d_ridge: Ref = None  # out, Cubit: [1, 1, heads * K], partial sums
    d_beta: Ref = None  # out, DeltaFormer: [1, heads, rows]


def backward(
    settings: Settings,
    cotangent: jax.Array,
    query: jax.Array,
    key: jax.Array,
    rhs: jax.Array,
    ridge: jax.Array | None,
    beta: jax.Array | None,
    segments: tuple[jax.Array, jax.Array] | None,
    u: jax.Array,
    lse: jax.Array,
    inverse: jax.Array,
    row_sum: jax.Array | None,
    *,
    interpret: Any,
) -> dict[str, jax.Array]:
    """Gradients of the inputs of `forward`, from its outputs and the cotangent of u.

    Args:
      cotangent, query, key, rhs, u: [B, L, H * K].
      ridge, beta, lse, inverse, row_sum: as `forward` takes and returns them, with this kernel's heads.
      segments: ids of rows [B, 1, L] and of columns [B, L, 128] with equal lanes, or None.

    Returns:
      d_query, d_key, d_rhs as the inputs; d_ridge [B * H / heads, 1, heads * K], partial sums, or d_beta
      [B * H / heads, heads, L].
    """
    s = settings
    batch, length, width = query.shape
    tile_lanes = s.heads * s.head_dim
    groups = width // tile_lanes  # groups of heads
    row_ids, column_ids = segments if s.segmented else (None, None)
    arrays = {"cotangent": cotangent, "query": query, "key_own": key, "rhs": rhs, "u_own": u, "key": key, "u": u}
    arrays |= {"lse": lse, "inverse": inverse, "ridge": ridge, "beta": beta, "row_sum": row_sum}
    arrays |= {"row_segments": row_ids, "segments_own": column_ids, "column_segments": column_ids}
    arrays = {name: x for name, x in arrays.items() if x is not None}
    shape = output_type(arrays.values(), interpret)
    types = {f"d_{name}": shape(x.shape, x.dtype) for name, x in (("query", query), ("key", key), ("rhs", rhs))}
    if s.strict:
        types["d_beta"] = shape((batch * groups, s.heads, length), jnp.float32)
    else:
        types["d_ridge"] = shape((batch * groups, 1, tile_lanes), jnp.float32)
    specs = _specs(s, groups)
    return call(
        functools.partial(_kernel, settings=s),
        Refs,
        inputs=in_hbm([Operand(name, x, specs[name]) for name, x in arrays.items()], interpret),
        outputs=[Operand(name, kind, specs[name]) for name, kind in types.items()],
        scratch={
            "carried": pltpu.VMEM((s.heads, length, s.head_dim), jnp.float32),
            "d_key_sum": pltpu.VMEM((s.heads, length, s.head_dim), jnp.float32),
            "d_query_sum": pltpu.VMEM((s.heads, s.head_dim, s.rows), jnp.float32),
            "z": pltpu.VMEM((s.heads, s.rows, s.head_dim), s.dtype),
            "d_scores_sum": pltpu.VMEM((s.heads, 8, s.rows), jnp.float32),
            "minus_delta": pltpu.VMEM((s.heads, 1, s.rows), jnp.float32),
        },
        grid=(batch * groups, s.num_row_blocks, s.num_steps),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=backward_bytes(length, s.rows, s.columns, s.heads, s.head_dim, s.precise),
        ),
        interpret=interpret,
        name="kernel_solve_tpu_backward",
    )


def _specs(s, groups):
    """{name: the block that program (g, i, j) sees}, for every input and output; i counts from the last row block."""

    def g_batch(g):
        return jax.lax.div(g, groups)

    def g_lane(g):
        return jax.lax.rem(g, groups)

    def row_block(i):
        return s.num_row_blocks - 1 - i

    def column_block(i, j):
        row = row_block(i)
        return jnp.maximum(s.diagonal_tile(row) - j, s.first_tile(row))

    def rows(lanes):
        return pl.BlockSpec((1, s.rows, lanes), lambda g, i, j: (g_batch(g), row_block(i), g_lane(g)))

    def columns(lanes):
        return pl.BlockSpec((1, s.columns, lanes), lambda g, i, j: (g_batch(g), column_block(i, j), g_lane(g)))

    tile_lanes = s.heads * s.head_dim
    lane_row = pl.BlockSpec((1, s.heads, s.rows), lambda g, i, j: (g, 0, row_block(i)))
    names = ("cotangent", "query", "key_own", "rhs", "u_own", "row_sum", "d_query", "d_key", "d_rhs")
    return dict.fromkeys(names, rows(tile_lanes)) | {
        "key": columns(tile_lanes),
        "u": columns(tile_lanes),
        "lse": lane_row,
        "inverse": rows(s.heads * LANES),
        "ridge": pl.BlockSpec(memory_space=pltpu.SMEM),
        "beta": lane_row,
        "row_segments": pl.BlockSpec((1, 1, s.rows), lambda g, i, j: (g_batch(g), 0, row_block(i))),
        "segments_own": pl.BlockSpec((1, s.rows, LANES), lambda g, i, j: (g_batch(g), row_block(i), 0)),
        "column_segments": pl.BlockSpec((1, s.columns, LANES), lambda g, i, j: (g_batch(g), column_block(i, j), 0)),
        "d_ridge": pl.BlockSpec((1, 1, tile_lanes), lambda g, i, j: (g, 0, 0)),
        "d_beta": lane_row,
    }


def backward_bytes(length: int, rows: int, columns: int, heads: int, head_dim: int, precise: bool) -> int:
    """Limit of vector memory for the compiler, as forward_bytes."""
    width, lanes = 4 if precise else 2, max(head_dim, LANES)
    scratch = 2 * (length + rows) * lanes * 4
    blocks = 2 * rows * (lanes * (8 + 7 * width) + LANES * 4) + 2 * columns * lanes * (4 + width)
    return heads * (scratch + blocks + rows * columns * (16 if precise else 8)) + 4 * MIB


def _kernel(refs, settings):
    s = settings
    group, i, step = pl.program_id(0), s.num_row_blocks - 1 - pl.program_id(1), pl.program_id(2)
    last = s.diagonal_tile(i)
    j = last - step
    remainder = i - last * (s.columns // s.rows)  # row blocks between the start of the last tile and the diagonal
    first_row = pl.multiple_of(i * s.rows, s.rows)

    @pl.when((step == 0) & (i == s.num_row_blocks - 1))
    def _():
        _clear(s, refs)

    @pl.when(step == 0)
    def _():
        refs.d_query_sum[...] = jnp.zeros_like(refs.d_query_sum)
        refs.d_scores_sum[...] = jnp.zeros_like(refs.d_scores_sum)
        weights = {(h, b): _diagonal_weights(s, refs, h, b) for h in range(s.heads) for b in range(s.rows // LANES)}
        _solve_blocks(s, refs, group, first_row, weights)
        _diagonal_gradients(s, refs, first_row, weights)

    for n in range(1, s.columns // s.rows):

        @pl.when((step == 0) & (remainder == n))
        def _(n=n):
            _tile(s, refs, i, j, n * s.rows)

    @pl.when((step > 0) & (j >= s.first_tile(i)))
    def _():
        _tile(s, refs, i, j, s.columns)

    @pl.when(step == s.num_steps - 1)
    def _():
        for h in range(s.heads):
            _finish(s, refs, first_row, h)


def _clear(s, refs):
    """Zeros the sums that all row blocks of a sequence add to."""
    zeros = jnp.zeros((s.heads, s.rows, s.head_dim), jnp.float32)

    def clear(n, _):
        rows = pl.ds(pl.multiple_of(n * s.rows, s.rows), s.rows)
        refs.carried[:, rows] = zeros
        refs.d_key_sum[:, rows] = zeros

    jax.lax.fori_loop(0, s.num_row_blocks, clear, None)
    d_coefficient = refs.d_beta if s.strict else refs.d_ridge
    d_coefficient[...] = jnp.zeros_like(d_coefficient)


def _diagonal_weights(s, refs, h, b):
    """P^T of the columns of block b of the row block and of the rows from there on: [128, rows - 128 b]."""
    rows = slice(b * LANES, None)
    shape = (LANES, s.rows - b * LANES)
    scores = dot(refs.key_own[0, block(b), head(s, h)], refs.query[0, rows, head(s, h)], (1, 1), s.precise)
    mask = visible(
        s,
        shape,
        1,
        0,
        refs.row_segments[0, :, rows] if s.segmented else None,
        refs.segments_own[0, block(b)] if s.segmented else None,
    )
    scores = masked(mask, scores * s.log2_scale - refs.lse[0, h : h + 1, rows], FLOOR)
    edge = jnp.where(causal(1, s.strict), scores[:, :LANES], FLOOR)
    scores = jnp.concatenate([edge, scores[:, LANES:]], axis=1) if shape[1] > LANES else edge
    return jnp.exp2(scores)


def _solve_blocks(s, refs, group, first_row, weights):
    """y of the row block, 128 rows at a time from the last, and what follows from y row by row."""
    blocks = range(s.rows // LANES)
    for b in reversed(blocks):
        for h in range(s.heads):
            target = refs.cotangent[0, block(b), head(s, h)] - refs.carried[h, pl.ds(first_row + b * LANES, LANES)]
            if b < blocks[-1]:
                later = weights[h, b][:, LANES:].astype(s.dtype)
                target = target - dot(later, refs.z[h, (b + 1) * LANES :], precise=s.precise)
            transposed = refs.inverse[0, block(b), h * LANES : (h + 1) * LANES].T
            y = dot_float32(transposed, target, s.precise)
            refs.d_rhs[0, block(b), head(s, h)] = y.astype(refs.d_rhs.dtype)
            u = refs.u_own[0, block(b), head(s, h)]
            rhs = refs.rhs[0, block(b), head(s, h)].astype(jnp.float32)
            if s.strict:
                beta = widen(row_to_column(refs.beta[0, h : h + 1, block(b)]), s.head_dim)
                refs.z[h, block(b)] = (beta * y).astype(s.dtype)
                refs.minus_delta[h, :, block(b)] = _row_sums(y * (rhs - u))
                row_sum = refs.row_sum[0, block(b), head(s, h)].astype(jnp.float32)
                refs.d_beta[0, h : h + 1, block(b)] = -_row_sums(y * row_sum)
            else:
                refs.z[h, block(b)] = y.astype(s.dtype)
                ridge = refs.ridge[group * s.heads + h]
                refs.minus_delta[h, :, block(b)] = _row_sums(y * (rhs - ridge * u))
                refs.d_ridge[0, :, head(s, h)] -= jnp.sum(y * u, axis=0, keepdims=True)


def _row_sums(x):
    """[128, K] -> [1, 128]: the sums over K, as a lane row."""
    return jnp.sum(x.T, axis=0, keepdims=True)


def _diagonal_gradients(s, refs, first_row, weights):
    """What the diagonal block of the row block adds to the gradients."""
    blocks = range(s.rows // LANES)
    for h in range(s.heads):
        for b in blocks:
            # The diagonal of dS follows from the rest of its row (see _finish); for DeltaFormer there is none.
            keep = None
            if not s.strict:
                keep = causal(1, True).astype(jnp.float32)
                if b < blocks[-1]:
                    rest = jnp.ones((LANES, s.rows - (b + 1) * LANES), jnp.float32)
                    keep = jnp.concatenate([keep, rest], axis=1)
            _add_gradients(
                s,
                refs,
                h,
                pl.ds(first_row + b * LANES, LANES),
                slice(b * LANES, s.rows),
                weights[h, b],
                keep,
                refs.key_own[0, block(b), head(s, h)],
                refs.u_own[0, block(b), head(s, h)],
            )


def _tile(s, refs, i, j, width):
    """The first `width` columns of tile j, all of them before the diagonal block of row block i."""
    mask = visible(
        s,
        (width, s.rows),
        1,
        i * s.rows - j * s.columns,
        refs.row_segments[0] if s.segmented else None,
        refs.column_segments[0, :width] if s.segmented else None,
    )
    columns = pl.ds(pl.multiple_of(j * s.columns, s.columns), width)
    for h in range(s.heads):
        key = refs.key[0, :width, head(s, h)]
        scores = dot(key, refs.query[0, :, head(s, h)], (1, 1), s.precise) * s.log2_scale
        weights = jnp.exp2(masked(mask, scores - refs.lse[0, h : h + 1], FLOOR))
        refs.carried[h, columns] += dot(weights.astype(s.dtype), refs.z[h], precise=s.precise)
        _add_gradients(s, refs, h, columns, slice(None), weights, None, key, refs.u[0, :width, head(s, h)])


def _add_gradients(s, refs, h, columns, rows, weights, keep, key, u):
    """dS of a tile from its weights, and what it adds to the gradients.

    columns: of the sequence. rows: of the row block, which are the lanes of weights. keep: factor of dS, 0 or 1.
    """
    z, query = refs.z[h, rows], refs.query[0, rows, head(s, h)]
    minus_d_weights = dot(u.astype(s.dtype), z, (1, 1), s.precise)
    d_scores = weights * (refs.minus_delta[h, :, rows] - minus_d_weights)
    if keep is not None:
        d_scores = d_scores * keep
    if not s.strict:
        refs.d_scores_sum[h, :, rows] += fold_sublanes(d_scores)
    d_scores = d_scores.astype(s.dtype)
    refs.d_key_sum[h, columns] += dot(d_scores, query, precise=s.precise)
    refs.d_query_sum[h, :, rows] += dot(key.T, d_scores, precise=s.precise)


def _finish(s, refs, first_row, h):
    """Writes the gradients of query and key of the row block, which are complete."""
    d_query = refs.d_query_sum[h].T
    d_key = refs.d_key_sum[h, pl.ds(first_row, s.rows)]
    if not s.strict:
        # The rows of dS sum to zero. With peaked weights dP - delta cancels on the diagonal, so it is taken as minus
        # the sum of the others: relative error 3e-4 in d query for bfloat16, where it was 0.29.
        total = jnp.sum(refs.d_scores_sum[h], axis=0, keepdims=True)
        total = widen(row_to_column(total), s.head_dim)
        d_query -= total * refs.key_own[0, :, head(s, h)].astype(jnp.float32)
        d_key -= total * refs.query[0, :, head(s, h)].astype(jnp.float32)
    refs.d_query[0, :, head(s, h)] = (d_query * s.scale).astype(refs.d_query.dtype)
    refs.d_key[0, :, head(s, h)] = (d_key * s.scale).astype(refs.d_key.dtype)
