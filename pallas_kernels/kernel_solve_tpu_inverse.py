"""Inverses of the diagonal blocks of the causal solve, inside a TPU kernel.

The forward kernel solves a block of rows by multiplying with these inverses, and keeps them for the backward kernel.
Where that overflows it uses substitution.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kernel_solve_tpu_tiles import LANES, dot_float32, iota


def invert(blocks: list[jax.Array], precise: bool) -> list[jax.Array]:
    """Inverses of lower-triangular blocks [128, 128] (zeros above the diagonal), all in step.

    The 16 by 16 blocks on the diagonal are inverted by forward substitution. Products then merge them (16 -> 32 -> 64
    -> 128): of [[A, 0], [C, B]] the part below the diagonal is -inv(B) C inv(A). Repeated squaring would be shorter,
    but overflows for uniform weights.

    The blocks advance together, because the chain of one block has too little independent work to fill the machine.
    Two blocks share a product, because the cost of a product of so few rows is loading its [128, 128] operand: the
    factors on the left lie side by side in the lanes, those on the right on the operand's diagonal. So a block that is
    not finite spoils the block that it shares products with: the next in the list, or the one before.
    """
    count = len(blocks)
    blocks = blocks + blocks[: count % 2]
    inverses = _invert_16([_pack(block) for block in blocks])  # those of one size side by side: [size, 128]
    firsts = range(0, len(blocks), 2)

    def product(left, right):
        return dot_float32(left, _spread(right), precise)

    for size in (16, 32, 64):
        even = (iota((size, LANES), 1) & size) == 0  # lanes of A and C; those of B are odd
        below = [_below_diagonal(block, size) for block in blocks]
        products = [
            product(
                jnp.where(even, below[n], pltpu.roll(below[n + 1], size, 1)),
                jnp.where(even, inverses[n], pltpu.roll(inverses[n + 1], size, 1)),
            )
            for n in firsts
        ]
        products = [
            product(jnp.where(even, pltpu.roll(inverses[n], LANES - size, 1), inverses[n + 1]), right)
            for n, right in zip(firsts, products)
        ]
        below = [x for both in products for x in (both, pltpu.roll(both, LANES - size, 1))]
        inverses = [
            jnp.concatenate([jnp.where(even, x, 0.0), jnp.where(even, -y, x)], axis=0) for x, y in zip(inverses, below)
        ]
    return inverses[:count]


def _pack(matrix):
    """The eight 16 by 16 blocks on the diagonal of [128, 128], side by side: [16, 128]."""
    group = iota((16, LANES), 1) >> 4
    packed = matrix[:16]
    for g in range(1, 8):
        packed = jnp.where(group == g, matrix[16 * g : 16 * (g + 1)], packed)
    return packed


def _below_diagonal(matrix, size):
    """The blocks [size, size] of [128, 128] in odd rows of blocks just left of the diagonal, in the lanes they have."""
    lane = iota((size, LANES), 1)
    packed = matrix[size : 2 * size]
    for start in range(2 * size, LANES, 2 * size):
        packed = jnp.where(lane >= start, matrix[start + size : start + 2 * size], packed)
    return packed


def _spread(packed):
    """[size, 128] -> [128, 128] with the blocks on the diagonal."""
    size = packed.shape[0]
    group = iota(packed.shape, 1) >> (size.bit_length() - 1)
    return jnp.concatenate([jnp.where(group == g, packed, 0.0) for g in range(LANES // size)], axis=0)


def _gather_lanes(x, index):
    """x[a, index[a, b]] for [8, 128]."""
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


def _invert_16(packed):
    """Inverses of packed lower-triangular 16 by 16 blocks, in the same packing."""
    halves = [(p[:8], p[8:]) for p in packed]
    lane, sub = iota((8, LANES), 1), iota((8, LANES), 0)
    group = lane & ~15
    position = (sub, sub + 8)
    # Rows are scaled to a unit diagonal before, and the columns of the inverse after: no division inside the chain.
    reciprocal = [
        tuple(1.0 / _gather_lanes(half, group + position[n]) for n, half in enumerate(pair)) for pair in halves
    ]
    below = [
        tuple(
            jnp.where(position[n] > (lane & 15), half * scale, 0.0) for n, (half, scale) in enumerate(zip(pair, scales))
        )
        for pair, scales in zip(halves, reciprocal)
    ]
    unit = tuple((position[n] == (lane & 15)).astype(jnp.float32) for n in range(2))
    inverse = [list(unit) for _ in packed]
    for k in range(15):
        for lower, x in zip(below, inverse):
            row = x[k // 8][k % 8 : k % 8 + 1]
            for n in range(2):
                if k < 8 * n + 7:  # otherwise no row of this half is after k
                    x[n] = x[n] - _gather_lanes(lower[n], group + k) * row
    columns = [jnp.sum(unit[0] * top + unit[1] * low, axis=0, keepdims=True) for top, low in reciprocal]
    return [jnp.concatenate(x, axis=0) * column for x, column in zip(inverse, columns)]


def substitute(system: jax.Array, target: jax.Array) -> jax.Array:
    """x of system x = target, lower-triangular [128, 128], row after row: no row of x depends on a later one."""
    row, system_row, system_column = iota(target.shape, 0), iota(system.shape, 0), iota(system.shape, 1)

    def step(r, x):
        pivot = jnp.where((system_row == r) & (system_column == r), system, 0.0)
        pivot = jnp.sum(jnp.sum(pivot, axis=1, keepdims=True), axis=0, keepdims=True)
        factor = jnp.sum(jnp.where(system_column == r, system, 0.0), axis=1, keepdims=True)
        solved = jnp.sum(jnp.where(row == r, x, 0.0), axis=0, keepdims=True) / pivot
        return jnp.where(row == r, solved, jnp.where(row > r, x - factor * solved, x))

    return lax.fori_loop(0, LANES, step, target)
