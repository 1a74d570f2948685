"""Backward GPU kernels of the causal solve (see kernel_solve_gpu).

1. `_adjoint_kernel`, a wavefront over column blocks from the last: y = M^-T g and the part of dk below the diagonal
   blocks (four products a tile: scores, P^T z, dP, dS^T q).
2. `_query_kernel`, row blocks in parallel: dq, d beta and the rest of dk (three products a tile: scores, dP, dS k).
No sum depends on timing, so gradients are the same bits in every run. With D u + c P u = rhs and z = c y:
    dP_ij = - z_i . u_j;   delta_i = sum_j P_ij dP_ij = - y_i . (rhs_i - D u_i);   dS = P (dP - delta)
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import kernel_solve_gpu_tiles as tiles


def _weights(a, b, lse, mask, settings):
    """exp2(scale a b^T - lse) * 2^bias where visible; `lse` is broadcast against the tile."""
    s = tiles.dot(a, b, settings, (1, 1)) * settings.score_scale
    return tiles.masked(mask, jnp.exp2(s - (lse - settings.bias)), 0.0)


def _for_dot(ds, other, settings):
    """dS and the query or key it multiplies, in the type of their product: bfloat16 has float32's range, so no unit."""
    if settings.half:
        return ds.astype(jnp.bfloat16), other.astype(jnp.bfloat16)
    return ds, other


def _in_units(x, settings):
    """x float32 as an operand of a product, and its unit (a scalar)."""
    if not settings.half:
        return x, 1.0
    half, unit = tiles.quantize(x)
    return half, jnp.sum(unit)


def _adjoint_kernel(
    query_ref, key_ref, u_ref, rhs_ref, grad_ref, lse_ref, coefficient_ref, segment_ref, last_ref, _, *refs, settings
):
    if settings.half:
        y_ref, delta_ref, dkey_ref, z_ref, unit_ref, counters_ref = refs
    else:
        y_ref, delta_ref, dkey_ref, counters_ref = refs
    batch_size, length, num_heads, head_dim = query_ref.shape
    rows, blocks = settings.rows, length // settings.rows
    count, head = tiles.take_ticket(counters_ref, batch_size * num_heads)  # count: finished blocks needed, from the end
    b, h = head // num_heads, head % num_heads
    block = blocks - 1 - count
    start = blocks - 1 - last_ref[b, block]
    key = tiles.load_rows(key_ref, b, block, h, rows)
    column_segments = tiles.load_segments(segment_ref, b, block, settings)
    u, u_unit = _in_units(_seen_rows(tiles.load_rows(u_ref, b, block, h, rows), column_segments), settings)
    unbias = 2.0**-settings.bias

    def weights(i):
        """(P^T of tile i [C columns, C rows] times 2^bias, query block i)."""
        query = tiles.load_rows(query_ref, b, i, h, rows)
        mask = tiles.visible(
            i,
            block,
            tiles.load_segments(segment_ref, b, i, settings),
            column_segments,
            settings,
            diagonal=False,
            transposed=True,
        )
        return _weights(key, query, tiles.load_vector(lse_ref, b, i, h, rows)[None, :], mask, settings), query

    def load_z(i):
        if settings.half:
            return tiles.load_rows(z_ref, b, i, h, rows), unit_ref[b, h, i]
        z = tiles.load_rows(y_ref, b, i, h, rows)
        if settings.strict:
            z = z * tiles.load_vector(coefficient_ref, b, i, h, rows)[:, None]
        return z, 1.0

    def scores_gradient(p, z, unit, delta):
        """dS^T from P^T (times 2^bias)."""
        dp = tiles.dot(u, z, settings, (1, 1)) * (-u_unit * unit * unbias)
        return p * (dp - delta[None, :] * unbias)

    def tile(t, carry):
        acc, dkey = carry
        i = blocks - 1 - t
        p, query = weights(i)
        z, unit = load_z(i)
        acc = acc + tiles.dot(p.astype(z.dtype), z, settings) * (unit * unbias)
        ds = scores_gradient(p, z, unit, tiles.load_vector(delta_ref, b, i, h, rows))
        return acc, dkey + tiles.dot(*_for_dot(ds, query, settings), settings)

    zeros = jnp.zeros((rows, head_dim), jnp.float32)
    (acc, dkey), seen = tiles.stream(
        counters_ref, head, start, jnp.maximum(count - 1, start), tile, (zeros, zeros), block * 0
    )

    # Before waiting for the block below: its weights, and the inverse of the diagonal block. dkey leaves the registers,
    # which the inverse needs, and comes back from the cache after the block is published.
    tiles.store_rows(dkey_ref, b, block, h, rows, dkey)
    has_last = start < count
    following = jnp.minimum(block + 1, blocks - 1)
    p = jnp.where(has_last, weights(following)[0], 0.0).astype(jnp.float16 if settings.half else jnp.float32)
    query = tiles.load_rows(query_ref, b, block, h, rows)
    mask = tiles.visible(block, block, column_segments, column_segments, settings, diagonal=True)
    own = _weights(query, key, tiles.load_vector(lse_ref, b, block, h, rows)[:, None], mask, settings) * unbias
    if settings.strict:
        beta = tiles.load_vector(coefficient_ref, b, block, h, rows)
        n = own * beta[:, None]
    else:
        row = lax.broadcasted_iota(jnp.int32, (rows, rows), 0)
        column = lax.broadcasted_iota(jnp.int32, (rows, rows), 1)
        diagonal = jnp.sum(jnp.where(row == column, own, 0.0), axis=1) + coefficient_ref[h]
        diagonal = jnp.where(diagonal == 0.0, jnp.inf, diagonal)
        n = jnp.where(column < row, own, 0.0) / diagonal[:, None]
    inverse = tiles.unit_lower_inverse(n, settings)
    grad = tiles.load_rows(grad_ref, b, block, h, rows)

    seen = tiles.wait_for(counters_ref, head, jnp.where(has_last, count, 0), seen)
    z, unit = load_z(following)
    z = jnp.where(has_last, z, jnp.zeros_like(z))
    if settings.half:
        unit = jnp.where(has_last, unit, 1.0)
    acc = acc + tiles.dot(p, z, settings) * (unit * unbias)
    y = tiles.dot(inverse, grad - acc, settings, (0, 0))
    if not settings.strict:
        y = y / diagonal[:, None]
    tiles.store_rows(y_ref, b, block, h, rows, y)
    weighted_u = tiles.load_rows(rhs_ref, b, block, h, rows).astype(jnp.float32)
    own_u = tiles.load_rows(u_ref, b, block, h, rows)
    weighted_u = weighted_u - (own_u if settings.strict else coefficient_ref[h] * own_u)
    tiles.store_vector(delta_ref, b, block, h, rows, -jnp.sum(y * weighted_u, axis=1))
    if settings.half:
        own_z, own_unit = tiles.quantize(_seen_rows(y * beta[:, None] if settings.strict else y, column_segments))
        tiles.store_rows(z_ref, b, block, h, rows, own_z)
        unit_ref[b, h, block] = jnp.sum(own_unit)
    tiles.wait_for(counters_ref, head, count, seen)
    tiles.publish(counters_ref, head, count + 1, settings)

    @pl.when(has_last)
    def _():
        p, query = weights(following)
        ds = scores_gradient(p, *load_z(following), tiles.load_vector(delta_ref, b, following, h, rows))
        dkey = tiles.load_rows(dkey_ref, b, block, h, rows) + tiles.dot(*_for_dot(ds, query, settings), settings)
        tiles.store_rows(dkey_ref, b, block, h, rows, dkey)


def _seen_rows(x, segments):
    """x with the rows of padding zeroed: no weight touches them, and rhs / ridge would set the unit of the block."""
    return x if segments is None else jnp.where((segments != 0)[:, None], x, 0.0)


def _query_kernel(
    query_ref,
    key_ref,
    u_ref,
    unit_ref,
    y_ref,
    delta_ref,
    lse_ref,
    coefficient_ref,
    segment_ref,
    first_ref,
    below_ref,
    dquery_ref,
    dkey_ref,
    *dbeta_ref,
    settings,
):
    batch_size, length, num_heads, head_dim = query_ref.shape
    rows, blocks = settings.rows, length // settings.rows
    block, head = blocks - 1 - pl.program_id(0) // (batch_size * num_heads), pl.program_id(0) % (batch_size * num_heads)
    b, h = head // num_heads, head % num_heads
    query = tiles.load_rows(query_ref, b, block, h, rows)
    row_segments = tiles.load_segments(segment_ref, b, block, settings)
    lse = tiles.load_vector(lse_ref, b, block, h, rows)[:, None]
    delta = tiles.load_vector(delta_ref, b, block, h, rows)[:, None]
    y, y_unit = _in_units(_seen_rows(tiles.load_rows(y_ref, b, block, h, rows), row_segments), settings)
    beta = tiles.load_vector(coefficient_ref, b, block, h, rows)[:, None] if settings.strict else 1.0
    unbias = 2.0**-settings.bias

    def gradients(j, diagonal):
        """(dS, P (dP / beta), key block) of tile (block, j)."""
        key = tiles.load_rows(key_ref, b, j, h, rows)
        mask = tiles.visible(
            block, j, row_segments, tiles.load_segments(segment_ref, b, j, settings), settings, diagonal=diagonal
        )
        p = _weights(query, key, lse, mask, settings)
        unit = unit_ref[b, h, j] if settings.half else 1.0
        dm = tiles.dot(y, tiles.load_rows(u_ref, b, j, h, rows), settings, (1, 1)) * (-y_unit * unit * unbias)
        return p * (beta * dm - delta * unbias), p * dm, key

    def tile(j, carry):
        dquery, total = carry
        ds, pdm, key = gradients(j, False)
        total = total + jnp.sum(pdm if settings.strict else ds, axis=1)
        return dquery + tiles.dot(*_for_dot(ds, key, settings), settings), total

    dquery, total = lax.fori_loop(
        first_ref[b, block], block, tile, (jnp.zeros((rows, head_dim), jnp.float32), jnp.zeros((rows,), jnp.float32))
    )
    ds, pdm, key = gradients(block, True)
    if settings.strict:
        tiles.store_vector(dbeta_ref[0], b, block, h, rows, total + jnp.sum(pdm, axis=1))
    else:
        # A row of dS sums to zero. Where the diagonal weight is near 1, dP - delta cancels there; its sum does not.
        row = lax.broadcasted_iota(jnp.int32, (rows, rows), 0)
        column = lax.broadcasted_iota(jnp.int32, (rows, rows), 1)
        ds = jnp.where(row == column, 0.0, ds)
        total = total + jnp.sum(ds, axis=1)
        ds = jnp.where(row == column, -total[:, None], ds)
    dquery = dquery + tiles.dot(*_for_dot(ds, key, settings), settings)
    tiles.store_rows(dquery_ref, b, block, h, rows, dquery * settings.scale)
    ds, query = _for_dot(ds, query, settings)
    dkey = tiles.load_rows(below_ref, b, block, h, rows) + tiles.dot(ds, query, settings, (0, 0))
    tiles.store_rows(dkey_ref, b, block, h, rows, dkey * settings.scale)


def backward(
    query,
    key,
    rhs,
    coefficient,
    segment_ids,
    first,
    last,
    u,
    lse,
    grad,
    *,
    settings,
    adjoint_warps,
    query_warps,
    stages,
):
    """Gradients of the padded system for the cotangent grad [B, L, H, K] float32 of u; arguments as in `forward`.

    last: [B, L / rows] int32, the last block with a row that sees any column of a block.

    Returns:
      dquery, dkey in the inputs' dtypes, y = d rhs [B, L, H, K] float32, and d beta [B, H, L] (None unless strict).
    """
    batch_size, length, num_heads, head_dim = query.shape
    rows = settings.rows
    blocks = length // rows
    full, vector = (batch_size, length, num_heads, head_dim), (batch_size, num_heads, length)
    counters = tiles.new_counters(batch_size * num_heads)
    out = [(full, jnp.float32), (vector, jnp.float32), (full, jnp.float32)]
    if settings.half:
        out += [(full, jnp.float16), ((batch_size, num_heads, blocks), jnp.float32)]
    out.append((counters.shape, jnp.int32))
    grid = (blocks * batch_size * num_heads,)
    y, delta, below, *_ = tiles.call(
        functools.partial(_adjoint_kernel, settings=settings),
        "kernel_solve_gpu_adjoint",
        (query, key, u, rhs, grad, lse, coefficient, segment_ids, last, counters),
        out,
        grid,
        settings=settings,
        warps=adjoint_warps,
        stages=stages,
        aliases={9: len(out) - 1},
    )
    operand, unit = u, lse  # lse: a dummy that the kernel does not read
    if settings.half:
        seen = jnp.where((segment_ids != 0)[:, :, None, None], u, 0.0) if settings.segmented else u
        operand, unit = tiles.quantize(seen.reshape(batch_size, blocks, rows, num_heads, head_dim), axes=(2, 4))
        operand, unit = operand.reshape(full), jnp.swapaxes(unit[:, :, 0, :, 0], 1, 2)
    out = [(full, query.dtype), (full, key.dtype)] + [(vector, jnp.float32)] * settings.strict
    dquery, dkey, *dbeta = tiles.call(
        functools.partial(_query_kernel, settings=settings),
        "kernel_solve_gpu_query",
        (query, key, operand, unit, y, delta, lse, coefficient, segment_ids, first, below),
        out,
        grid,
        settings=settings,
        warps=query_warps,
        stages=stages,
    )
    return dquery, dkey, y, dbeta[0] if settings.strict else None
