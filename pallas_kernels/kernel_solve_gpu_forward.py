"""Forward kernel of the causal solve on a GPU.

It computes u of (D + c P) u = rhs (see kernel_solve_gpu) with two products per tile, as flash attention does. One
program computes one row block of one head, in the order of kernel_solve_gpu_wavefront:

1. it streams the tiles to the left with a running softmax, as far as their u is published (`_tile`);
2. it finishes the softmax and inverts its diagonal block, which need scores but no u (`_finish_softmax`);
3. it waits for the row block before it, whose tile is the last, and multiplies with the inverse.

So only two products and the publication lie on the chain from one row block to the next. A product with the inverse
spoils a whole block where one row overflows, because 0 * inf is NaN. Such a block is solved again by substitution
(tiles.substitute), as a dense solver does, which keeps the rows before that row.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import kernel_solve_gpu_tiles as tiles
from pallas_kernels import kernel_solve_gpu_wavefront as wavefront
from pallas_kernels.kernel_call import Operand, Ref, call

MASKED = -jnp.inf  # score of a column that is not seen
FLOOR = -1e30  # first running maximum: finite, so that no difference is inf - inf


class Refs(NamedTuple):
    """The whole arrays; a program reads and writes its part."""

    query: Ref  # [B, L, H, K]
    key: Ref  # [B, L, H, K]
    rhs: Ref  # [B, L, H, K]
    coefficient: Ref  # ridge [H], or beta [B, H, L]
    segments: Ref  # [B, L], a dummy without segments
    first: Ref  # [B, L / C], the first block that any row of a block sees
    zeros: Ref  # the memory of `counters`
    u: Ref  # out: [B, L, H, K]
    lse: Ref  # out: [B, H, L], log-sum-exp in base 2
    counters: Ref  # out: see kernel_solve_gpu_wavefront
    u_half: Ref = None  # out, 16-bit inputs: [B, L, H, K], u in float16, in units
    unit: Ref = None  # out, 16-bit inputs: [B, H, L / C], the unit of each block of u_half


class _Place(NamedTuple):
    """Which rows a program computes."""

    batch: jax.Array
    block: jax.Array
    head: jax.Array
    counter: jax.Array  # number of the head among all of the batch


def forward(
    settings: tiles.Settings,
    query: jax.Array,
    key: jax.Array,
    rhs: jax.Array,
    coefficient: jax.Array,
    segment_ids: jax.Array,
    first: jax.Array,
    *,
    warps: int,
    stages: int,
) -> dict[str, jax.Array]:
    """Solves the padded system.

    Args:
      query, key: [B, L, H, K], L a multiple of settings.rows, K a power of two of at least 16.
      rhs: [B, L, H, K].
      coefficient: float32 ridge [H], or beta [B, H, L] if settings.strict.
      segment_ids: [B, L] int32, a dummy unless settings.segmented.
      first: [B, L / rows] int32, the first block that any row of a block sees.
      warps, stages: of Triton's compiler.

    Returns:
      u [B, L, H, K] float32 and lse [B, H, L] float32, the log-sum-exp of the visible scores in base 2.
    """
    batch_size, length, num_heads, _ = query.shape
    blocks = length // settings.rows
    counters = wavefront.new_counters(batch_size * num_heads)
    outputs = [
        Operand("u", jax.ShapeDtypeStruct(query.shape, jnp.float32)),
        Operand("lse", jax.ShapeDtypeStruct((batch_size, num_heads, length), jnp.float32)),
    ]
    if settings.half:
        outputs += [
            Operand("u_half", jax.ShapeDtypeStruct(query.shape, jnp.float16)),
            Operand("unit", jax.ShapeDtypeStruct((batch_size, num_heads, blocks), jnp.float32)),
        ]
    return call(
        functools.partial(_kernel, settings=settings),
        Refs,
        inputs=[
            Operand("query", query),
            Operand("key", key),
            Operand("rhs", rhs),
            Operand("coefficient", coefficient),
            Operand("segments", segment_ids),
            Operand("first", first),
            Operand("zeros", counters),
        ],
        outputs=[*outputs, Operand("counters", jax.ShapeDtypeStruct(counters.shape, jnp.int32))],
        aliases={"zeros": "counters"},
        grid=(blocks * batch_size * num_heads,),
        interpret=settings.interpret,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        name="kernel_solve_gpu_forward",
    )


def _kernel(refs, settings):
    s = settings
    batch_size, _, num_heads, head_dim = refs.query.shape
    block, counter = wavefront.take_ticket(refs.counters, batch_size * num_heads)
    place = _Place(counter // num_heads, block, counter % num_heads, counter)
    first = refs.first[place.batch, block]
    query = tiles.load_rows(refs.query, place.batch, block, place.head, s.rows)
    row_segments = tiles.load_segments(s, refs.segments, place.batch, block)
    scores = functools.partial(_scores, s, refs, place, query, row_segments)

    def tile(j, carry):
        return _tile(s, refs, place, scores(j, False), j, carry)

    one = (block * 0 + 1).astype(jnp.float32)  # not a constant, which the lowering does not take in a loop's state
    start = (
        jnp.zeros((s.rows, head_dim), jnp.float32),
        jnp.full((s.rows,), FLOOR, jnp.float32),
        jnp.zeros((s.rows,), jnp.float32),
        one,
    )
    last = jnp.maximum(block - 1, first)
    carry, seen = wavefront.stream(refs.counters, counter, first, last, tile, start, block * 0)

    # The normaliser needs scores only: finish it, and invert the diagonal block, before waiting for the block above.
    has_last = first < block
    previous = jnp.maximum(block - 1, 0)
    scores_last = jnp.where(has_last, scores(previous, False), MASKED)
    rows, weights_last = _finish_softmax(s, refs, place, scores(block, True), scores_last, carry)
    tiles.store_vector(refs.lse, place.batch, block, place.head, s.rows, rows.lse)
    inverse = tiles.unit_lower_inverse(s, rows.below)

    seen = wavefront.wait_for(refs.counters, counter, jnp.where(has_last, block, 0), seen)
    u, unit = _load_u(s, refs, place, previous, rows.unit)
    u, unit = jnp.where(has_last, u, jnp.zeros_like(u)), jnp.where(has_last, unit, 1.0)
    weighted = rows.weighted * rows.unit + tiles.dot(s, weights_last, u) * unit
    u = tiles.dot(s, inverse, _target(s, refs, place, rows, weighted))
    _store_u(s, refs, place, u)

    @pl.when(jnp.logical_not(jnp.sum(jnp.abs(u)) < jnp.inf))
    def _():
        carry = lax.fori_loop(first, block, tile, start)
        rows, _ = _finish_softmax(s, refs, place, scores(block, True), None, carry)
        target = _target(s, refs, place, rows, rows.weighted * rows.unit)
        wavefront.barrier(s.interpret)  # what is stored above is overwritten, perhaps by other threads
        _store_u(s, refs, place, tiles.substitute(rows.below, target))

    # Counters count blocks from the front; one that did not need its predecessors still waits before it is counted.
    wavefront.wait_for(refs.counters, counter, block, seen)
    wavefront.publish(refs.counters, counter, block + 1, s.interpret)


def _scores(s, refs, place, query, row_segments, j, diagonal):
    """Scores of tile j in base 2, MASKED where a row does not see a column."""
    key = tiles.load_rows(refs.key, place.batch, j, place.head, s.rows)
    column_segments = tiles.load_segments(s, refs.segments, place.batch, j)
    mask = tiles.visible(s, place.block, j, row_segments, column_segments, diagonal=diagonal)
    return tiles.masked(mask, tiles.dot(s, query, key, (1, 1)) * s.log2_scale, MASKED)


def _load_u(s, refs, place, j, unit):
    """Solution block j and the unit it is in: `unit` itself, which is 1, where u is float32."""
    if s.half:
        return tiles.load_rows(refs.u_half, place.batch, j, place.head, s.rows), refs.unit[place.batch, place.head, j]
    return tiles.load_rows(refs.u, place.batch, j, place.head, s.rows), unit


def _tile(s, refs, place, scores, j, carry):
    """One step of the running softmax. weighted, the sum of weights times u, is in the unit of the last tile."""
    weighted, maximum, total, unit = carry
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - (new_maximum - s.bias)[:, None])
    rescale = jnp.exp2(maximum - new_maximum)
    u, new_unit = _load_u(s, refs, place, j, unit)
    # So float16 units cost nothing beside the rescaling that a running softmax has anyway.
    weighted = weighted * (rescale * (unit / new_unit))[:, None] + tiles.dot(s, weights.astype(u.dtype), u)
    return weighted, new_maximum, total * rescale + jnp.sum(weights, axis=1), new_unit


class _Rows(NamedTuple):
    """A row block after its softmax: (c E + D diag(total)) u = total rhs - c weighted, E not normalised."""

    weighted: jax.Array  # [C, K] float32, weights times u of the tiles before, in `unit`
    unit: jax.Array  # scalar
    total: jax.Array  # [C], sum of the weights
    lse: jax.Array  # [C]
    beta: jax.Array | None  # [C], DeltaFormer
    diagonal: jax.Array  # [C], of the system
    below: jax.Array  # [C, C], the system's diagonal block below its diagonal, after division by it


def _finish_softmax(s, refs, place, scores_own, scores_last, carry):
    """The softmax with the diagonal block and with a last tile, or None: (_Rows, weights of the last tile or None)."""
    weighted, maximum, total, unit = carry
    new_maximum = jnp.max(scores_own, axis=1)
    if scores_last is not None:
        new_maximum = jnp.maximum(new_maximum, jnp.max(scores_last, axis=1))
    new_maximum = jnp.maximum(maximum, new_maximum)
    rescale = jnp.exp2(maximum - new_maximum)
    own = jnp.exp2(scores_own - (new_maximum - s.bias)[:, None])
    total = total * rescale + jnp.sum(own, axis=1)
    last = None
    if scores_last is not None:
        last = jnp.exp2(scores_last - (new_maximum - s.bias)[:, None])
        total = total + jnp.sum(last, axis=1)
        last = last.astype(jnp.float16 if s.half else jnp.float32)
    total = jnp.where(total > 0.0, total, 1.0)  # a row that sees nothing has no weights
    weighted = weighted * rescale[:, None]
    lse = new_maximum + jnp.log2(total) - s.bias
    row = lax.broadcasted_iota(jnp.int32, (s.rows, s.rows), 0)
    column = lax.broadcasted_iota(jnp.int32, (s.rows, s.rows), 1)
    if s.strict:
        beta = tiles.load_vector(refs.coefficient, place.batch, place.block, place.head, s.rows)
        return _Rows(weighted, unit, total, lse, beta, total, own * (beta / total)[:, None]), last
    diagonal = jnp.sum(jnp.where(row == column, own, 0.0), axis=1) + refs.coefficient[place.head] * total
    diagonal = jnp.where(diagonal == 0.0, jnp.inf, diagonal)  # ridge 0 and nothing seen: u = 0
    below = jnp.where(column < row, own, 0.0) / diagonal[:, None]
    return _Rows(weighted, unit, total, lse, None, diagonal, below), last


def _target(s, refs, place, rows, weighted):
    """Right side [C, K] of the diagonal block's system after division by its diagonal."""
    if s.strict:
        weighted = weighted * rows.beta[:, None]
    rhs = tiles.load_rows(refs.rhs, place.batch, place.block, place.head, s.rows).astype(jnp.float32)
    return (rhs * rows.total[:, None] - weighted) / rows.diagonal[:, None]


def _store_u(s, refs, place, u):
    tiles.store_rows(refs.u, place.batch, place.block, place.head, s.rows, u)
    if s.half:
        half, unit = tiles.quantize(u)
        tiles.store_rows(refs.u_half, place.batch, place.block, place.head, s.rows, half)
        refs.unit[place.batch, place.head, place.block] = jnp.sum(unit)
