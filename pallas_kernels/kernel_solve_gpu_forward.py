"""Forward GPU kernel of the causal solve: a wavefront over row blocks (see kernel_solve_gpu)."""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels import kernel_solve_gpu_tiles as tiles

MASKED = -jnp.inf
NOTHING_SEEN = -1e30  # first running maximum: finite, so that no difference is inf - inf


def _kernel(query_ref, key_ref, rhs_ref, coefficient_ref, segment_ref, first_ref, _, *refs, settings):
    if settings.half:
        u_ref, lse_ref, half_ref, unit_ref, counters_ref = refs
    else:
        u_ref, lse_ref, counters_ref = refs
    batch_size, _, num_heads, head_dim = query_ref.shape
    rows, bias = settings.rows, settings.bias
    block, head = tiles.take_ticket(counters_ref, batch_size * num_heads)
    b, h = head // num_heads, head % num_heads
    first = first_ref[b, block]
    query = tiles.load_rows(query_ref, b, block, h, rows)
    row_segments = tiles.load_segments(segment_ref, b, block, settings)

    def scores(j, diagonal):
        key = tiles.load_rows(key_ref, b, j, h, rows)
        mask = tiles.visible(
            block, j, row_segments, tiles.load_segments(segment_ref, b, j, settings), settings, diagonal=diagonal
        )
        return tiles.masked(mask, tiles.dot(query, key, settings, (1, 1)) * settings.score_scale, MASKED)

    def load_u(j, unit):
        """Solution block j and the unit it is in: `unit` itself, which is 1, where u is float32."""
        if settings.half:
            return tiles.load_rows(half_ref, b, j, h, rows), unit_ref[b, h, j]
        return tiles.load_rows(u_ref, b, j, h, rows), unit

    def tile(j, carry):
        acc, top, total, unit = carry
        s = scores(j, False)
        new_top = jnp.maximum(top, jnp.max(s, axis=1))
        e = jnp.exp2(s - (new_top - bias)[:, None])
        shrink = jnp.exp2(top - new_top)
        u, new_unit = load_u(j, unit)
        # The accumulator is in the unit of the last tile, so float16 units cost nothing beside the rescaling there is.
        acc = acc * (shrink * (unit / new_unit))[:, None] + tiles.dot(e.astype(u.dtype), u, settings)
        return acc, new_top, total * shrink + jnp.sum(e, axis=1), new_unit

    one = (block * 0 + 1).astype(jnp.float32)  # not a constant, which the lowering does not take in a loop's state
    carry = (
        jnp.zeros((rows, head_dim), jnp.float32),
        jnp.full((rows,), NOTHING_SEEN, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        one,
    )
    last = jnp.maximum(block - 1, first)
    (acc, top, total, unit), seen = tiles.stream(counters_ref, head, first, last, tile, carry, block * 0)

    # The normaliser needs scores only: finish it, and invert the diagonal block, before waiting for the block above.
    has_last = first < block
    previous = jnp.maximum(block - 1, 0)
    s_last = jnp.where(has_last, scores(previous, False), MASKED)
    s_own = scores(block, True)
    new_top = jnp.maximum(top, jnp.maximum(jnp.max(s_last, axis=1), jnp.max(s_own, axis=1)))
    shrink = jnp.exp2(top - new_top)
    e_last = jnp.exp2(s_last - (new_top - bias)[:, None])
    e_own = jnp.exp2(s_own - (new_top - bias)[:, None])
    total = total * shrink + jnp.sum(e_last, axis=1) + jnp.sum(e_own, axis=1)
    total = jnp.where(total > 0.0, total, 1.0)  # a row that sees nothing has no weights
    acc = acc * shrink[:, None]
    e_last = e_last.astype(jnp.float16 if settings.half else jnp.float32)
    tiles.store_vector(lse_ref, b, block, h, rows, new_top + jnp.log2(total) - bias)

    # (c E + D diag(total)) u = total rhs - c acc: the system in weights that are not yet normalised.
    row = lax.broadcasted_iota(jnp.int32, (rows, rows), 0)
    column = lax.broadcasted_iota(jnp.int32, (rows, rows), 1)
    if settings.strict:
        beta = tiles.load_vector(coefficient_ref, b, block, h, rows)
        diagonal = total
        n = e_own * (beta / diagonal)[:, None]
    else:
        diagonal = jnp.sum(jnp.where(row == column, e_own, 0.0), axis=1) + coefficient_ref[h] * total
        diagonal = jnp.where(diagonal == 0.0, jnp.inf, diagonal)  # ridge 0 and nothing seen: u = 0
        n = jnp.where(column < row, e_own, 0.0) / diagonal[:, None]
    inverse = tiles.unit_lower_inverse(n, settings)

    seen = tiles.wait_for(counters_ref, head, jnp.where(has_last, block, 0), seen)
    u, new_unit = load_u(previous, unit)
    u, new_unit = jnp.where(has_last, u, jnp.zeros_like(u)), jnp.where(has_last, new_unit, 1.0)
    acc = acc * unit + tiles.dot(e_last, u, settings) * new_unit
    if settings.strict:
        acc = acc * beta[:, None]
    rhs = tiles.load_rows(rhs_ref, b, block, h, rows).astype(jnp.float32)
    solution = tiles.dot(inverse, (rhs * total[:, None] - acc) / diagonal[:, None], settings)
    tiles.store_rows(u_ref, b, block, h, rows, solution)
    if settings.half:
        if settings.segmented:  # nobody sees padding, and its u = rhs / ridge would set the unit
            solution = jnp.where((row_segments != 0)[:, None], solution, 0.0)
        half, unit = tiles.quantize(solution)
        tiles.store_rows(half_ref, b, block, h, rows, half)
        unit_ref[b, h, block] = jnp.sum(unit)
    # Counters count blocks from the front; one that did not need its predecessors still waits before it is counted.
    tiles.wait_for(counters_ref, head, block, seen)
    tiles.publish(counters_ref, head, block + 1, settings)


def forward(query, key, rhs, coefficient, segment_ids, first, *, settings, warps, stages):
    """Solves the padded system.

    Args:
      query, key: [B, L, H, K], L a multiple of settings.rows, K a power of two of at least 16.
      rhs: [B, L, H, K].
      coefficient: float32 ridge [H], or beta [B, H, L] if settings.strict.
      segment_ids: [B, L] int32 (a dummy unless settings.segmented).
      first: [B, L / rows] int32, the first block that any row of a block can see.

    Returns:
      u [B, L, H, K] float32 and the base-2 log-sum-exp of the visible scores [B, H, L] float32.
    """
    batch_size, length, num_heads, head_dim = query.shape
    blocks = length // settings.rows
    counters = tiles.new_counters(batch_size * num_heads)
    out = [((batch_size, length, num_heads, head_dim), jnp.float32), ((batch_size, num_heads, length), jnp.float32)]
    if settings.half:
        out += [
            ((batch_size, length, num_heads, head_dim), jnp.float16),
            ((batch_size, num_heads, blocks), jnp.float32),
        ]
    out.append((counters.shape, jnp.int32))
    u, lse, *_ = tiles.call(
        functools.partial(_kernel, settings=settings),
        "kernel_solve_gpu_forward",
        (query, key, rhs, coefficient, segment_ids, first, counters),
        out,
        (blocks * batch_size * num_heads,),
        settings=settings,
        warps=warps,
        stages=stages,
        aliases={6: len(out) - 1},
    )
    return u, lse
