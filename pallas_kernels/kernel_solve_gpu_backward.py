"""Backward kernels of the causal solve on a GPU.

For the cotangent g of u they solve (D + c P)^T y = g, and with z = c y compute

    d rhs = y,   dP = -z u^T,   delta_i = sum_j P_ij dP_ij = -y_i . (rhs_i - D_i u_i),   dS = P (dP - delta)

and from dS, the gradient of the scores, those of query and key. One program computes one block of one head.

1. `_adjoint_kernel`: column blocks, as a wavefront from the last one. It computes y and the part of d key below the
   diagonal blocks, with four products per tile: scores, P^T z, dP, dS^T query.
2. `_query_kernel`: row blocks, in parallel. It computes d query, d beta and the rest of d key, with three products per
   tile: scores, dP, dS key.

No sum depends on timing, so gradients are the same bits in every run.
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


class AdjointRefs(NamedTuple):
    """The whole arrays; a program reads and writes its part."""

    query: Ref  # [B, L, H, K]
    key: Ref  # [B, L, H, K]
    u: Ref  # [B, L, H, K]
    rhs: Ref  # [B, L, H, K]
    cotangent: Ref  # [B, L, H, K]
    lse: Ref  # [B, H, L]
    coefficient: Ref  # ridge [H], or beta [B, H, L]
    segments: Ref  # [B, L], a dummy without segments
    last: Ref  # [B, L / C], the last block with a row that sees any column of a block
    zeros: Ref  # the memory of `counters`
    y: Ref  # out: [B, L, H, K], d rhs
    delta: Ref  # out: [B, H, L]
    d_key: Ref  # out: [B, L, H, K], without the diagonal blocks' part
    counters: Ref  # out: see kernel_solve_gpu_wavefront; blocks are counted from the last
    z_half: Ref = None  # out, 16-bit inputs: [B, L, H, K], z in float16, in units
    unit: Ref = None  # out, 16-bit inputs: [B, H, L / C], the unit of each block of z_half


class QueryRefs(NamedTuple):
    """The whole arrays; a program reads and writes its part."""

    query: Ref  # [B, L, H, K]
    key: Ref  # [B, L, H, K]
    u: Ref  # [B, L, H, K], float16 in units for 16-bit inputs
    unit: Ref  # [B, H, L / C], the unit of each block of u; a dummy for float32 inputs
    y: Ref  # [B, L, H, K]
    delta: Ref  # [B, H, L]
    lse: Ref  # [B, H, L]
    coefficient: Ref  # ridge [H], or beta [B, H, L]
    segments: Ref  # [B, L], a dummy without segments
    first: Ref  # [B, L / C], the first block that any row of a block sees
    d_key_below: Ref  # [B, L, H, K], from the adjoint kernel
    d_query: Ref  # out: [B, L, H, K]
    d_key: Ref  # out: [B, L, H, K]
    d_beta: Ref = None  # out, DeltaFormer: [B, H, L]


class _Place(NamedTuple):
    """Which block a program computes."""

    batch: jax.Array
    block: jax.Array
    head: jax.Array


def backward(
    settings: tiles.Settings,
    query: jax.Array,
    key: jax.Array,
    rhs: jax.Array,
    coefficient: jax.Array,
    segment_ids: jax.Array,
    first: jax.Array,
    last: jax.Array,
    u: jax.Array,
    lse: jax.Array,
    cotangent: jax.Array,
    *,
    adjoint_warps: int,
    query_warps: int,
    stages: int,
) -> dict[str, jax.Array]:
    """Gradients of the padded system for the cotangent [B, L, H, K] float32 of u.

    Args: as `forward` takes and returns them, and
      last: [B, L / rows] int32, the last block with a row that sees any column of a block.

    Returns:
      d_query, d_key in the inputs' dtypes, y = d rhs [B, L, H, K] float32, and if strict d_beta [B, H, L].
    """
    batch_size, length, num_heads, head_dim = query.shape
    blocks = length // settings.rows
    full = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    vector = jax.ShapeDtypeStruct((batch_size, num_heads, length), jnp.float32)
    counters = wavefront.new_counters(batch_size * num_heads)
    adjoint = {"query": query, "key": key, "u": u, "rhs": rhs, "cotangent": cotangent, "lse": lse}
    adjoint |= {"coefficient": coefficient, "segments": segment_ids, "last": last, "zeros": counters}
    types = {"y": full, "delta": vector, "d_key": full}
    if settings.half:
        types["z_half"] = jax.ShapeDtypeStruct(query.shape, jnp.float16)
        types["unit"] = jax.ShapeDtypeStruct((batch_size, num_heads, blocks), jnp.float32)
    types["counters"] = jax.ShapeDtypeStruct(counters.shape, jnp.int32)
    options = {"grid": (blocks * batch_size * num_heads,), "interpret": settings.interpret}
    solved = call(
        functools.partial(_adjoint_kernel, settings=settings),
        AdjointRefs,
        inputs=[Operand(*item) for item in adjoint.items()],
        outputs=[Operand(*item) for item in types.items()],
        aliases={"zeros": "counters"},
        compiler_params=plt.CompilerParams(num_warps=adjoint_warps, num_stages=stages),
        name="kernel_solve_gpu_adjoint",
        **options,
    )
    unit = lse  # a dummy that the kernel does not read
    if settings.half:
        u, unit = tiles.quantize(u.reshape(batch_size, blocks, settings.rows, num_heads, head_dim), axes=(2, 4))
        u, unit = u.reshape(query.shape), jnp.swapaxes(unit[:, :, 0, :, 0], 1, 2)
    inputs = {"query": query, "key": key, "u": u, "unit": unit, "y": solved["y"], "delta": solved["delta"], "lse": lse}
    inputs |= {"coefficient": coefficient, "segments": segment_ids, "first": first, "d_key_below": solved["d_key"]}
    types = {"d_query": jax.ShapeDtypeStruct(query.shape, query.dtype)}
    types["d_key"] = jax.ShapeDtypeStruct(key.shape, key.dtype)
    if settings.strict:
        types["d_beta"] = vector
    gradients = call(
        functools.partial(_query_kernel, settings=settings),
        QueryRefs,
        inputs=[Operand(*item) for item in inputs.items()],
        outputs=[Operand(*item) for item in types.items()],
        compiler_params=plt.CompilerParams(num_warps=query_warps, num_stages=stages),
        name="kernel_solve_gpu_query",
        **options,
    )
    return gradients | {"y": solved["y"]}


def _weights(s, a, b, lse, mask):
    """exp2(scale a b^T - lse) * 2^bias where visible; `lse` is broadcast against the tile."""
    scores = tiles.dot(s, a, b, (1, 1)) * s.log2_scale
    return tiles.masked(mask, jnp.exp2(scores - (lse - s.bias)), 0.0)


def _for_dot(s, d_scores, other):
    """dS and the query or key it multiplies, in the type of their product: bfloat16 has float32's range, so no unit."""
    if s.half:
        return d_scores.astype(jnp.bfloat16), other.astype(jnp.bfloat16)
    return d_scores, other


def _in_units(s, x):
    """x float32 as an operand of a product, and its unit (a scalar)."""
    if not s.half:
        return x, 1.0
    half, unit = tiles.quantize(x)
    return half, jnp.sum(unit)


class _Columns(NamedTuple):
    """The column block of one adjoint program."""

    key: jax.Array  # [C, K]
    u: jax.Array  # [C, K], in `unit`
    unit: jax.Array | float  # scalar
    segments: jax.Array | None  # [C]


def _adjoint_kernel(refs, settings):
    s = settings
    batch_size, length, num_heads, head_dim = refs.query.shape
    blocks = length // s.rows
    count, counter = wavefront.take_ticket(refs.counters, batch_size * num_heads)  # count: blocks after this one
    place = _Place(counter // num_heads, blocks - 1 - count, counter % num_heads)
    b, block, h = place
    start = blocks - 1 - refs.last[b, block]
    key = tiles.load_rows(refs.key, b, block, h, s.rows)
    segments = tiles.load_segments(s, refs.segments, b, block)
    own = _Columns(key, *_in_units(s, tiles.load_rows(refs.u, b, block, h, s.rows)), segments)
    unbias = 2.0**-s.bias

    def tile(t, carry):
        subtracted, d_key = carry
        i = blocks - 1 - t
        p, query = _transposed_weights(s, refs, place, own, i)
        z, unit = _load_z(s, refs, place, i)
        subtracted = subtracted + tiles.dot(s, p.astype(z.dtype), z) * (unit * unbias)
        d_scores = _d_scores(s, own, p, z, unit, tiles.load_vector(refs.delta, b, i, h, s.rows))
        return subtracted, d_key + tiles.dot(s, *_for_dot(s, d_scores, query))

    zeros = jnp.zeros((s.rows, head_dim), jnp.float32)
    (subtracted, d_key), seen = wavefront.stream(
        refs.counters, counter, start, jnp.maximum(count - 1, start), tile, (zeros, zeros), block * 0
    )

    # Before waiting for the block below: its weights, and the inverse of the diagonal block. d_key leaves the
    # registers, which the inverse needs, and comes back from the cache after the block is published.
    tiles.store_rows(refs.d_key, b, block, h, s.rows, d_key)
    has_last = start < count
    following = jnp.minimum(block + 1, blocks - 1)
    p = jnp.where(has_last, _transposed_weights(s, refs, place, own, following)[0], 0.0)
    p = p.astype(jnp.float16 if s.half else jnp.float32)
    beta, diagonal, inverse = _diagonal_block(s, refs, place, own)
    cotangent = tiles.load_rows(refs.cotangent, b, block, h, s.rows)

    seen = wavefront.wait_for(refs.counters, counter, jnp.where(has_last, count, 0), seen)
    z, unit = _load_z(s, refs, place, following)
    z = jnp.where(has_last, z, jnp.zeros_like(z))
    if s.half:
        unit = jnp.where(has_last, unit, 1.0)
    subtracted = subtracted + tiles.dot(s, p, z) * (unit * unbias)
    y = tiles.dot(s, inverse, cotangent - subtracted, (0, 0))
    if not s.strict:
        y = y / diagonal[:, None]
    _store_solution(s, refs, place, beta, y)
    wavefront.wait_for(refs.counters, counter, count, seen)
    wavefront.publish(refs.counters, counter, count + 1, s.interpret)

    @pl.when(has_last)
    def _():
        p, query = _transposed_weights(s, refs, place, own, following)
        z, unit = _load_z(s, refs, place, following)
        d_scores = _d_scores(s, own, p, z, unit, tiles.load_vector(refs.delta, b, following, h, s.rows))
        d_key = tiles.load_rows(refs.d_key, b, block, h, s.rows) + tiles.dot(s, *_for_dot(s, d_scores, query))
        tiles.store_rows(refs.d_key, b, block, h, s.rows, d_key)


def _transposed_weights(s, refs, place, own, i):
    """(P^T of tile (i, block) times 2^bias [C columns, C rows], query block i)."""
    query = tiles.load_rows(refs.query, place.batch, i, place.head, s.rows)
    row_segments = tiles.load_segments(s, refs.segments, place.batch, i)
    mask = tiles.visible(s, i, place.block, row_segments, own.segments, diagonal=False, transposed=True)
    lse = tiles.load_vector(refs.lse, place.batch, i, place.head, s.rows)
    return _weights(s, own.key, query, lse[None, :], mask), query


def _load_z(s, refs, place, i):
    """Block i of z and the unit it is in."""
    if s.half:
        return tiles.load_rows(refs.z_half, place.batch, i, place.head, s.rows), refs.unit[place.batch, place.head, i]
    z = tiles.load_rows(refs.y, place.batch, i, place.head, s.rows)
    if s.strict:
        z = z * tiles.load_vector(refs.coefficient, place.batch, i, place.head, s.rows)[:, None]
    return z, 1.0


def _d_scores(s, own, p, z, unit, delta):
    """dS^T from P^T (times 2^bias)."""
    unbias = 2.0**-s.bias
    d_weights = tiles.dot(s, own.u, z, (1, 1)) * (-own.unit * unit * unbias)
    return p * (d_weights - delta[None, :] * unbias)


def _diagonal_block(s, refs, place, own):
    """(beta or None, diagonal or None, inverse of the diagonal block after division by its diagonal)."""
    b, block, h = place
    query = tiles.load_rows(refs.query, b, block, h, s.rows)
    mask = tiles.visible(s, block, block, own.segments, own.segments, diagonal=True)
    lse = tiles.load_vector(refs.lse, b, block, h, s.rows)
    weights = _weights(s, query, own.key, lse[:, None], mask) * 2.0**-s.bias
    if s.strict:
        beta = tiles.load_vector(refs.coefficient, b, block, h, s.rows)
        return beta, None, tiles.unit_lower_inverse(s, weights * beta[:, None])
    row = lax.broadcasted_iota(jnp.int32, (s.rows, s.rows), 0)
    column = lax.broadcasted_iota(jnp.int32, (s.rows, s.rows), 1)
    diagonal = jnp.sum(jnp.where(row == column, weights, 0.0), axis=1) + refs.coefficient[h]
    diagonal = jnp.where(diagonal == 0.0, jnp.inf, diagonal)
    below = jnp.where(column < row, weights, 0.0) / diagonal[:, None]
    return None, diagonal, tiles.unit_lower_inverse(s, below)


def _store_solution(s, refs, place, beta, y):
    """Stores y and what other programs need that follows from it: delta, and z in units."""
    b, block, h = place
    tiles.store_rows(refs.y, b, block, h, s.rows, y)
    rhs = tiles.load_rows(refs.rhs, b, block, h, s.rows).astype(jnp.float32)
    u = tiles.load_rows(refs.u, b, block, h, s.rows)
    weighted_u = rhs - (u if s.strict else refs.coefficient[h] * u)
    tiles.store_vector(refs.delta, b, block, h, s.rows, -jnp.sum(y * weighted_u, axis=1))
    if s.half:
        z, unit = tiles.quantize(y * beta[:, None] if s.strict else y)
        tiles.store_rows(refs.z_half, b, block, h, s.rows, z)
        refs.unit[b, h, block] = jnp.sum(unit)


class _Rows(NamedTuple):
    """The row block of one query program; row vectors are [C, 1]."""

    query: jax.Array  # [C, K]
    segments: jax.Array | None  # [C]
    lse: jax.Array
    delta: jax.Array
    y: jax.Array  # [C, K], in `unit`
    unit: jax.Array | float  # scalar
    beta: jax.Array | float


def _query_kernel(refs, settings):
    s = settings
    batch_size, length, num_heads, head_dim = refs.query.shape
    blocks = length // s.rows
    block, counter = (
        blocks - 1 - pl.program_id(0) // (batch_size * num_heads),
        pl.program_id(0) % (batch_size * num_heads),
    )
    place = _Place(counter // num_heads, block, counter % num_heads)
    b, _, h = place
    query = tiles.load_rows(refs.query, b, block, h, s.rows)
    segments = tiles.load_segments(s, refs.segments, b, block)
    lse = tiles.load_vector(refs.lse, b, block, h, s.rows)[:, None]
    delta = tiles.load_vector(refs.delta, b, block, h, s.rows)[:, None]
    y, unit = _in_units(s, tiles.load_rows(refs.y, b, block, h, s.rows))
    beta = tiles.load_vector(refs.coefficient, b, block, h, s.rows)[:, None] if s.strict else 1.0
    own = _Rows(query, segments, lse, delta, y, unit, beta)

    def tile(j, carry):
        d_query, total = carry
        d_scores, p_d_system, key = _row_gradients(s, refs, place, own, j, False)
        total = total + jnp.sum(p_d_system if s.strict else d_scores, axis=1)
        return d_query + tiles.dot(s, *_for_dot(s, d_scores, key)), total

    zeros = jnp.zeros((s.rows, head_dim), jnp.float32), jnp.zeros((s.rows,), jnp.float32)
    d_query, total = lax.fori_loop(refs.first[b, block], block, tile, zeros)
    d_scores, p_d_system, key = _row_gradients(s, refs, place, own, block, True)
    if s.strict:
        tiles.store_vector(refs.d_beta, b, block, h, s.rows, total + jnp.sum(p_d_system, axis=1))
    else:
        # A row of dS sums to zero. Where the diagonal weight is near 1, dP - delta cancels there; its sum does not.
        row = lax.broadcasted_iota(jnp.int32, (s.rows, s.rows), 0)
        column = lax.broadcasted_iota(jnp.int32, (s.rows, s.rows), 1)
        d_scores = jnp.where(row == column, 0.0, d_scores)
        total = total + jnp.sum(d_scores, axis=1)
        d_scores = jnp.where(row == column, -total[:, None], d_scores)
    d_query = d_query + tiles.dot(s, *_for_dot(s, d_scores, key))
    tiles.store_rows(refs.d_query, b, block, h, s.rows, d_query * s.scale)
    d_scores, query = _for_dot(s, d_scores, query)
    d_key = tiles.load_rows(refs.d_key_below, b, block, h, s.rows) + tiles.dot(s, d_scores, query, (0, 0))
    tiles.store_rows(refs.d_key, b, block, h, s.rows, d_key * s.scale)


def _row_gradients(s, refs, place, own, j, diagonal):
    """(dS, P (dP / beta), key block) of tile (block, j)."""
    b, block, h = place
    unbias = 2.0**-s.bias
    key = tiles.load_rows(refs.key, b, j, h, s.rows)
    column_segments = tiles.load_segments(s, refs.segments, b, j)
    mask = tiles.visible(s, block, j, own.segments, column_segments, diagonal=diagonal)
    p = _weights(s, own.query, key, own.lse, mask)
    unit = refs.unit[b, h, j] if s.half else 1.0
    u = tiles.load_rows(refs.u, b, j, h, s.rows)
    d_system = tiles.dot(s, own.y, u, (1, 1)) * (-own.unit * unit * unbias)
    return p * (own.beta * d_system - own.delta * unbias), p * d_system, key
