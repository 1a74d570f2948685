"""What the TPU kernels of the triangular system share: settings, masks, products and the inverses of diagonal blocks.

Everything here runs inside a kernel on values in vector memory. A diagonal block is 128 by 128, the width of a
vector register.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
MIB = 2**20
LOG2_E = math.log2(math.e)
# exp2(MASKED - FLOOR) is 0 and so is exp2(x - UNSEEN): a row that sees nothing gets no weight, never NaN.
MASKED = -2e30
FLOOR = -1e30
UNSEEN = 1e30


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that is known when a kernel is compiled.

    rows and columns: the tile; columns is a multiple of rows, rows of 128. heads: how many a program handles.
    strict: a row does not see itself (DeltaFormer). log2_scale: what turns a product into a base 2 logarithm.
    precise: float32 operands, with products at full precision.
    """

    length: int
    rows: int
    columns: int
    heads: int
    head_dim: int
    strict: bool
    scale: float
    window: int | None
    segments: bool
    precise: bool

    @property
    def log2_scale(self):
        return self.scale * LOG2_E

    @property
    def dtype(self):
        return jnp.float32 if self.precise else jnp.bfloat16

    @property
    def num_row_blocks(self):
        return self.length // self.rows

    @property
    def num_steps(self):
        """Tiles that a row block can touch: all of them, or those that a window reaches."""
        every = -(-self.length // self.columns)
        if self.window is None:
            return every
        return min(every, -(-(self.rows + self.window - 1) // self.columns) + 1)

    def diagonal_tile(self, i):
        return divide(i, self.columns // self.rows)

    def first_tile(self, i):
        if self.window is None:
            return 0
        return divide(jnp.maximum(i * self.rows - (self.window - 1), 0), self.columns)


def divide(x, n):
    """x // n for x >= 0 and a static n. The compiler's estimator follows shifts, not divisions."""
    return x >> (n.bit_length() - 1) if n & (n - 1) == 0 else lax.div(x, n)


def output_type(inputs, interpret):
    """(shape, dtype) -> type of an output, which varies over the axes of a shard_map over which any input varies."""
    varying = frozenset().union(*(jax.typeof(x).mat.varying for x in inputs))
    kind = jax.sharding.ManualAxisType(varying=varying)
    if interpret:
        return functools.partial(jax.ShapeDtypeStruct, manual_axis_type=kind)
    return lambda shape, dtype: pl.MemoryRef(
        jax.core.ShapedArray(shape, dtype, manual_axis_type=kind), memory_space=pltpu.HBM
    )


def in_hbm(inputs, interpret):
    """Keeps XLA from moving the operands of a kernel to vector memory, which the kernel needs for its own arrays."""
    if interpret:
        return inputs
    return [x if x.ndim == 1 else pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in inputs]


def head(settings, h):
    """The lanes of head h in an array whose last axis holds the heads side by side."""
    return slice(h * settings.head_dim, (h + 1) * settings.head_dim)


def block(s):
    return slice(s * LANES, (s + 1) * LANES)


def dot(a, b, contract=(1, 0), precise=False):
    """A product with float32 accumulation; contract names the summed axis of a and of b."""
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if precise else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def dot_float32(a, b, precise):
    """A product of float32 arrays; when not precise in three bfloat16 passes (2e-5 relative)."""
    if precise:
        return dot(a, b, precise=True)
    (a_high, a_low), (b_high, b_low) = ([x.astype(jnp.bfloat16) for x in split(y)] for y in (a, b))
    return dot(a_high, b_high) + (dot(a_low, b_high) + dot(a_high, b_low))


def split(x):
    """x as a sum of two values with the precision of bfloat16, by its bits: a cast back and forth is not compiled."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high, x - high


def widen(x, width):
    """[N, 128] with all lanes equal -> [N, width]."""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * (width // LANES), axis=1)


def fold_lanes(x):
    """[N, width] -> [N, 128], adding the groups of 128 lanes."""
    total = x[:, :LANES]
    for start in range(LANES, x.shape[1], LANES):
        total = total + x[:, start : start + LANES]
    return total


def fold_sublanes(x):
    """[N, width] -> [8, width], adding the groups of 8 rows."""
    return jnp.sum(x.reshape(x.shape[0] // 8, 8, x.shape[1]), axis=0)


def row_to_column(row):
    """[1, N] -> [N, 128] with all lanes equal."""
    return jnp.concatenate(
        [jnp.broadcast_to(row[:, start : start + LANES], (LANES, LANES)).T for start in range(0, row.shape[1], LANES)],
        axis=0,
    )


def column_to_row(column):
    """[128, 128] with all lanes equal -> [1, 128]."""
    return column.T[:1]


def iota(shape, axis):
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def invert(blocks, precise):
    """Inverses of lower-triangular blocks [128, 128] (zeros above the diagonal), all in step.

    The 16 by 16 blocks on the diagonal are inverted by forward substitution and merged by products (16 -> 32 -> 64 ->
    128): of [[A, 0], [C, B]] the part below the diagonal is -inv(B) C inv(A). Repeated squaring would be shorter, but
    overflows for uniform weights. The blocks advance together because the chain of one is too short of independent work
    to fill the machine. Two of them share a product, because loading a [128, 128] operand is what a product of so
    few rows costs: the factors on the left lie side by side in the lanes, those on the right on the operand's diagonal.
    A block that is not finite spoils the one that it shares products with: the next in the list, or the one before.
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


def visible(settings, shape, row_axis, offset, row_segments, column_segments):
    """Mask of a tile, or None where nothing is hidden. The causal edge is not part of it: see causal.

    offset: first row of the tile minus its first column. Segments: broadcast against each other, one of them [N, 128]
    with equal lanes, the other [1, M].
    """
    mask = None
    if settings.segments:
        if row_axis == 0:
            mask = widen(row_segments, shape[1]) == column_segments
        else:
            mask = row_segments == widen(column_segments, shape[1])
    if settings.window is not None:
        distance = iota(shape, row_axis) - iota(shape, 1 - row_axis)
        near = distance < settings.window - offset
        mask = near if mask is None else mask & near
    return mask


def causal(settings, row_axis, strict):
    """Mask of a [128, 128] block on the diagonal."""
    row, column = iota((LANES, LANES), row_axis), iota((LANES, LANES), 1 - row_axis)
    return column < row if strict else column <= row


def hide(x, mask, value):
    return x if mask is None else jnp.where(mask, x, jnp.float32(value))
