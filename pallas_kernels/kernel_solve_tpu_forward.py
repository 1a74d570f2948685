"""Forward kernel of the causal solve on a TPU.

It computes u of (D + c P) u = rhs (see kernel_solve_tpu) with two products per tile, as flash attention does. The grid
is (groups of heads of a sequence, row blocks, tiles left of the diagonal). The last two run in order: a row block needs
the u of all blocks before it, which stays in vector memory. For one row block

1. each tile before the diagonal block adds to a running softmax and to P u (`_tile`);
2. the diagonal block finishes the softmax (`_finish_softmax`), inverts the 128 by 128 systems on the diagonal
   (kernel_solve_tpu_inverse) and solves for u, 128 rows after 128 rows (`_solve_blocks`).

Where one row overflows, products with the inverses spoil 128 rows of one or two heads, because 0 * inf is NaN. Such a
row block is solved again by substitution (`_solve_again`), as a dense solver does. That keeps the rows before.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kernel_call import Operand, Ref, call
from pallas_kernels.kernel_solve_tpu_inverse import invert, substitute
from pallas_kernels.kernel_solve_tpu_tiles import (
    FLOOR,
    LANES,
    LOG2_E,
    MASKED,
    MIB,
    UNSEEN,
    Settings,
    block,
    causal,
    column_to_row,
    dot,
    dot_float32,
    fold_lanes,
    fold_sublanes,
    head,
    identity,
    in_hbm,
    iota,
    masked,
    output_type,
    row_to_column,
    visible,
    widen,
)


class Refs(NamedTuple):
    """What one program sees. Arrays that end in heads * K hold the heads side by side."""

    query: Ref  # [1, rows, heads * K]
    key: Ref  # [1, columns, heads * K]
    rhs: Ref  # [1, rows, heads * K]
    u: Ref  # out: [1, rows, 1, heads, K], or [1, rows, heads * K] beside residuals
    maximum: Ref  # scratch: [heads, rows, 128], running maximum, all lanes equal
    total: Ref  # scratch: [heads, rows, 128], running sum of the weights, a part in each lane
    weighted: Ref  # scratch: [heads, rows, K], weights times u
    u_low: Ref  # scratch: [heads, L, K], u for the products of later rows
    ridge: Ref = None  # Cubit: [B * H], scalars
    beta: Ref = None  # DeltaFormer: [1, heads, rows]
    row_ids: Ref = None  # with segments: [1, 1, rows]
    column_ids: Ref = None  # with segments: [1, 1, columns]
    row_segments: Ref = None  # scratch, with segments: [rows, 128], row_ids with all lanes equal
    lse: Ref = None  # out, residuals: [1, heads, rows]
    inverse: Ref = None  # out, residuals: [1, rows, heads * 128]
    row_sum: Ref = None  # out, residuals of DeltaFormer: [1, rows, heads * K], P u


def forward(
    settings: Settings,
    query: jax.Array,
    key: jax.Array,
    rhs: jax.Array,
    ridge: jax.Array | None,
    beta: jax.Array | None,
    segments: tuple[jax.Array, jax.Array] | None,
    *,
    residuals: bool,
    interpret: Any,
) -> dict[str, jax.Array]:
    """u and, with residuals, what the backward pass needs.

    Args:
      query, key, rhs: [B, L, H * K].
      ridge: [B * H], or None.
      beta: [B * H / heads, heads, L], or None.
      segments: ids of rows and of columns, each [B, 1, L], or None.

    Returns:
      u [B, L, H / heads, heads, K]. With residuals: u [B, L, H * K]; lse [B * H / heads, heads, L] in base 2; inverse
      [B, L, H * 128], of the diagonal blocks; for DeltaFormer row_sum [B, L, H * K] = P u.
    """
    s = settings
    batch, length, width = query.shape
    groups = width // (s.heads * s.head_dim)  # groups of heads
    arrays = {"query": query, "key": key, "rhs": rhs, "ridge": ridge, "beta": beta}
    arrays |= dict(zip(("row_ids", "column_ids"), segments or ()))
    arrays = {name: x for name, x in arrays.items() if x is not None}
    shape = output_type(arrays.values(), interpret)
    if residuals:
        types = {
            "u": shape((batch, length, width), jnp.float32),
            "lse": shape((batch * groups, s.heads, length), jnp.float32),
            "inverse": shape((batch, length, groups * s.heads * LANES), jnp.float32),
        }
        if s.strict:
            types["row_sum"] = shape((batch, length, width), s.dtype)
    else:
        # As it lies in memory this is [B, L, H, K], so no copy follows. The backward pass wants the heads side by side.
        types = {"u": shape((batch, length, groups, s.heads, s.head_dim), jnp.float32)}
    scratch = {
        "maximum": pltpu.VMEM((s.heads, s.rows, LANES), jnp.float32),
        "total": pltpu.VMEM((s.heads, s.rows, LANES), jnp.float32),
        "weighted": pltpu.VMEM((s.heads, s.rows, s.head_dim), jnp.float32),
        "u_low": pltpu.VMEM((s.heads, length, s.head_dim), s.dtype),
    }
    if s.segmented:
        scratch["row_segments"] = pltpu.VMEM((s.rows, LANES), jnp.int32)
    specs = _specs(s, groups, residuals)
    return call(
        functools.partial(_kernel, settings=s),
        Refs,
        inputs=in_hbm([Operand(name, x, specs[name]) for name, x in arrays.items()], interpret),
        outputs=[Operand(name, kind, specs[name]) for name, kind in types.items()],
        scratch=scratch,
        grid=(batch * groups, s.num_row_blocks, s.num_steps),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=forward_bytes(length, s.rows, s.columns, s.heads, s.head_dim, s.precise, residuals),
        ),
        interpret=interpret,
        name="kernel_solve_tpu_forward",
    )


def _specs(s, groups, residuals):
    """{name: the block that program (g, i, j) sees}, for every input and output."""

    def g_batch(g):
        return jax.lax.div(g, groups)

    def g_lane(g):
        return jax.lax.rem(g, groups)

    def column_block(i, j):
        return jnp.minimum(s.first_tile(i) + j, s.diagonal_tile(i))

    def rows(lanes):
        return pl.BlockSpec((1, s.rows, lanes), lambda g, i, j: (g_batch(g), i, g_lane(g)))

    tile_lanes = s.heads * s.head_dim
    lane_row = pl.BlockSpec((1, s.heads, s.rows), lambda g, i, j: (g, 0, i))
    u_by_head = pl.BlockSpec((1, s.rows, 1, s.heads, s.head_dim), lambda g, i, j: (g_batch(g), i, g_lane(g), 0, 0))
    return {
        **dict.fromkeys(("query", "rhs", "row_sum"), rows(tile_lanes)),
        "key": pl.BlockSpec((1, s.columns, tile_lanes), lambda g, i, j: (g_batch(g), column_block(i, j), g_lane(g))),
        "ridge": pl.BlockSpec(memory_space=pltpu.SMEM),
        "beta": lane_row,
        "row_ids": pl.BlockSpec((1, 1, s.rows), lambda g, i, j: (g_batch(g), 0, i)),
        "column_ids": pl.BlockSpec((1, 1, s.columns), lambda g, i, j: (g_batch(g), 0, column_block(i, j))),
        "u": rows(tile_lanes) if residuals else u_by_head,
        "lse": lane_row,
        "inverse": rows(s.heads * LANES),
    }


def forward_bytes(
    length: int, rows: int, columns: int, heads: int, head_dim: int, precise: bool, residuals: bool = True
) -> int:
    """Limit of vector memory for the compiler: scratch, two of every block, and what was seen to be spilled.

    It is tight on purpose: XLA puts arrays of its own beyond the limit, whatever the kernel uses of it.
    """
    width, lanes = 4 if precise else 2, max(head_dim, LANES)
    scratch = rows * (2 * LANES + lanes) * 4 + length * lanes * width
    blocks = 2 * lanes * (rows * (2 * width + 4) + columns * width)
    if residuals:
        blocks += 2 * rows * (LANES * 4 + lanes * width)
    return heads * (scratch + blocks + rows * columns * (12 if precise else 4)) + 3 * MIB


def _kernel(refs, settings):
    s = settings
    group, i, step = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    j = s.first_tile(i) + step
    last = s.diagonal_tile(i)
    remainder = i - last * (s.columns // s.rows)  # row blocks between the start of the last tile and the diagonal

    @pl.when(step == 0)
    def _():
        refs.maximum[...] = jnp.full_like(refs.maximum, FLOOR)
        refs.total[...] = jnp.zeros_like(refs.total)
        refs.weighted[...] = jnp.zeros_like(refs.weighted)
        if s.segmented:
            refs.row_segments[...] = row_to_column(refs.row_ids[0])

    @pl.when(j < last)
    def _():
        _tile(s, refs, i, j, s.columns)

    for n in range(1, s.columns // s.rows):

        @pl.when((j == last) & (remainder == n))
        def _(n=n):
            _tile(s, refs, i, j, n * s.rows)

    @pl.when(j == last)
    def _():
        _diagonal_block(s, refs, group, i, remainder)


def _tile(s, refs, i, j, width):
    """The first `width` columns of tile j, all of them before the diagonal block of row block i."""
    mask = visible(
        s,
        (s.rows, width),
        0,
        i * s.rows - j * s.columns,
        refs.row_segments[...] if s.segmented else None,
        refs.column_ids[0, :, :width] if s.segmented else None,
    )
    for h in range(s.heads):
        scores = dot(refs.query[0, :, head(s, h)], refs.key[0, :width, head(s, h)], (1, 1), s.precise) * s.log2_scale
        weights, rescale = _accumulate(refs, h, slice(None), masked(mask, scores, MASKED))
        start = pl.multiple_of(j * s.columns, s.columns)
        refs.weighted[h] = refs.weighted[h] * widen(rescale, s.head_dim) + dot(
            weights.astype(s.dtype), refs.u_low[h, pl.ds(start, width)], precise=s.precise
        )


def _accumulate(refs, h, rows, scores):
    """One step of the running softmax: the unnormalised weights and the factor of what was summed before."""
    before = refs.maximum[h, rows]
    after = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp2(scores - widen(after, scores.shape[1]))
    rescale = jnp.exp2(before - after)
    refs.maximum[h, rows] = after
    refs.total[h, rows] = refs.total[h, rows] * rescale + fold_lanes(weights)
    return weights, rescale


class _Rows(NamedTuple):
    """128 rows of one head, with the columns of the row block's own diagonal block."""

    weights: jax.Array  # [128, columns before these rows], not normalised; up to these rows if row_sum is wanted
    known: jax.Array  # [128, K], weights times the u of earlier rows
    factor: jax.Array  # [128, 128] with equal lanes, what makes c P of the weights
    system: jax.Array  # [128, 128], D + c P


def _diagonal_block(s, refs, group, i, remainder):
    """Finishes the softmax of row block i and solves for its u."""
    offset = pl.multiple_of(remainder * s.rows, s.rows)
    first_row = pl.multiple_of(i * s.rows, s.rows)
    key = refs.key.at[0, pl.ds(offset, s.rows)]
    column_ids = refs.column_ids.at[0, :, pl.ds(offset, s.rows)] if s.segmented else None
    u_low = refs.u_low.at[:, pl.ds(first_row, s.rows)]
    blocks = range(s.rows // LANES)
    pairs = [(h, b) for h in range(s.heads) for b in blocks]
    # By blocks of columns, here and in the solution below, so that the matrix unit loads each of them once.
    scores = {
        (h, c): dot(refs.query[0, c * LANES :, head(s, h)], key[block(c), head(s, h)], (1, 1), s.precise) * s.log2_scale
        for h, c in pairs
    }
    rows = {}
    for h, b in pairs:
        strip = jnp.concatenate([scores[h, c][block(b - c)] for c in range(b + 1)], axis=1)
        rows[h, b] = _finish_softmax(s, refs, group, h, b, _hide(s, refs, b, strip, column_ids))
    # Neighbours share products: heads of the same rows, so that what is not finite there spoils no row before these.
    pairs = [(h, b) for b in blocks for h in range(s.heads)]
    inverses = dict(zip(pairs, invert([rows[pair].system for pair in pairs], s.precise)))
    size = _solve_blocks(s, refs, u_low, rows, inverses)

    @pl.when(jnp.logical_not(size < jnp.inf))
    def _():
        _solve_again(s, refs, group, key, column_ids, u_low)


def _hide(s, refs, b, scores, column_ids):
    """Scores of the 128 rows b of the row block, for its columns up to and with these rows, where they are seen."""
    width = (b + 1) * LANES
    mask = visible(
        s,
        (LANES, width),
        0,
        b * LANES,
        refs.row_segments[block(b)] if s.segmented else None,
        column_ids[:, :width] if s.segmented else None,
    )
    scores = masked(mask, scores, MASKED)
    edge = jnp.where(causal(0, s.strict), scores[:, block(b)], MASKED)
    return jnp.concatenate([scores[:, : b * LANES], edge], axis=1) if b else edge


def _finish_softmax(s, refs, group, h, b, scores):
    """The last step of the softmax of 128 rows: scores [128, columns up to and with these rows] -> _Rows.

    From here on `weighted` holds the sum in the final scale, and `total` what makes P of the weights, in every lane.
    """
    weights, rescale = _accumulate(refs, h, block(b), scores)
    known = refs.weighted[h, block(b)] * widen(rescale, s.head_dim)
    refs.weighted[h, block(b)] = known
    norm = jnp.broadcast_to(jnp.sum(refs.total[h, block(b)], axis=1, keepdims=True), (LANES, LANES))
    lse = refs.maximum[h, block(b)] + jnp.log(norm) * LOG2_E
    if s.strict or s.segmented:  # some rows see nothing
        seen = norm > 0
        norm = jnp.where(seen, 1.0 / jnp.where(seen, norm, 1.0), 0.0)
        lse = jnp.where(seen, lse, UNSEEN)
    else:
        norm = 1.0 / norm
    refs.total[h, block(b)] = norm
    if refs.lse is not None:
        refs.lse[0, h : h + 1, block(b)] = column_to_row(lse)
    before = weights if refs.row_sum is not None else weights[:, : b * LANES]
    return _Rows(before, known, *_system(s, refs, group, h, block(b), weights[:, block(b)], norm))


def _system(s, refs, group, h, rows, own, norm):
    """(factor, system) of _Rows, from the weights of the rows among themselves."""
    if s.strict:
        factor = norm * row_to_column(refs.beta[0, h : h + 1, rows])
        return factor, own * factor + identity()
    ridge = refs.ridge[group * s.heads + h]
    if s.segmented:  # padding sees nothing, and its u is 0 for any D but 0
        ridge = jnp.where(norm > 0, ridge, 1.0)
    return norm, own * norm + ridge * identity()


def _solve_blocks(s, refs, u_low, rows, inverses):
    """u of the row block from its rows and the inverses of their systems; both are {(head, block of 128 rows): ...}.

    Returns the sum of the sizes of u, a scalar that is finite only if u is.
    """
    blocks = range(s.rows // LANES)
    known = {pair: x.known for pair, x in rows.items()}
    row_sum_wanted = refs.row_sum is not None
    size = jnp.zeros((8, s.head_dim), jnp.float32)
    for b in blocks:
        for h in range(s.heads):
            target = refs.rhs[0, block(b), head(s, h)].astype(jnp.float32)
            target = target - widen(rows[h, b].factor, s.head_dim) * known[h, b]
            u = dot_float32(inverses[h, b], target, s.precise)
            size = size + fold_sublanes(jnp.abs(u))
            u_low[h, block(b)] = u.astype(s.dtype)  # read again below: the estimator does not take a cast and its use
            if later := blocks[b + (not row_sum_wanted) :]:
                below = jnp.concatenate([rows[h, c].weights[:, block(b)] for c in later], axis=0)
                below = dot(below.astype(s.dtype), u_low[h, block(b)], precise=s.precise)
                for c in later:
                    known[h, c] = known[h, c] + below[block(c - later[0])]
            _write(s, refs, h, block(b), u, inverses[h, b], known[h, b])
    return jnp.sum(size)


def _write(s, refs, h, rows, u, inverse, known):
    """Writes the outputs of 128 rows of one head, except lse; known is weights times u up to and with these rows."""
    if refs.inverse is None:
        refs.u[0, rows, 0, h] = u
        return
    refs.u[0, rows, head(s, h)] = u
    refs.inverse[0, rows, h * LANES : (h + 1) * LANES] = inverse
    if refs.row_sum is not None:
        refs.row_sum[0, rows, head(s, h)] = (widen(refs.total[h, rows], s.head_dim) * known).astype(s.dtype)


def _solve_again(s, refs, group, key, column_ids, u_low):
    """Solves the row block by substitution, 128 rows after 128 rows: many steps, but no row depends on a later one."""
    column = iota((LANES, s.rows), 1)
    row_of_u = iota((s.rows, s.head_dim), 0)

    def solve(b, _):
        first = pl.multiple_of(b * LANES, LANES)
        rows = pl.ds(first, LANES)
        row_ids = refs.row_segments[rows] if s.segmented else None

        def weights(h, columns, offset, seen):
            scores = dot(refs.query[0, rows, head(s, h)], key[columns, head(s, h)], (1, 1), s.precise) * s.log2_scale
            ids = column_ids[:, columns] if s.segmented else None
            scores = masked(visible(s, scores.shape, 0, offset, row_ids, ids), scores, MASKED)
            return jnp.exp2(jnp.where(seen, scores, MASKED) - widen(refs.maximum[h, rows], scores.shape[1]))

        for h in range(s.heads):
            own = weights(h, rows, 0, causal(0, s.strict))
            factor, system = _system(s, refs, group, h, rows, own, refs.total[h, rows])
            # What is not solved yet is perhaps not finite, and zero weights would not hide that.
            u_before = jnp.where(row_of_u < first, u_low[h], jnp.zeros((), s.dtype))
            before = weights(h, slice(None), first, column < first).astype(s.dtype)
            known = refs.weighted[h, rows] + dot(before, u_before, precise=s.precise)
            target = refs.rhs[0, rows, head(s, h)].astype(jnp.float32) - widen(factor, s.head_dim) * known
            inverse, u = jnp.split(substitute(system, jnp.concatenate([identity(), target], axis=1)), [LANES], axis=1)
            u_low[h, rows] = u.astype(s.dtype)
            if refs.row_sum is not None:
                known = known + dot(own.astype(s.dtype), u_low[h, rows], precise=s.precise)
            _write(s, refs, h, rows, u, inverse, known)

    jax.lax.fori_loop(0, s.rows // LANES, solve, None)
