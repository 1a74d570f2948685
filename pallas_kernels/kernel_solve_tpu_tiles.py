"""What the TPU kernels of the causal solve share: settings, products, masks and changes of layout.

L is the sequence length, H the number of heads, K the head dimension. A tile is rows of the system by columns of it. A
diagonal block is 128 by 128, because a vector register has 128 lanes. Functions take and return values in vector
memory unless they say otherwise.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kernel_call import Operand

LANES = 128
MIB = 2**20
LOG2_E = math.log2(math.e)
# Finite, so that no difference is NaN: exp2(MASKED - FLOOR) and exp2(x - UNSEEN) are 0. A row that sees nothing has
# no weights.
MASKED = -2e30  # score of a column that is not seen
FLOOR = -1e30  # first running maximum
UNSEEN = 1e30  # log-sum-exp of a row that sees nothing


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that is known when a kernel is compiled.

    Attributes:
      length: L, padded to a multiple of rows.
      rows, columns: the shape of a tile; columns is a multiple of rows, rows a multiple of 128.
      heads: number of heads that one program handles.
      head_dim: K, padded to 64, 128 or 256.
      strict: row i sees j < i and D = 1 (DeltaFormer); else j <= i and D = ridge (Cubit).
      scale: factor of the scores.
      window: row i sees i - j < window, or None.
      segmented: segment ids are given; zero is padding.
      precise: products take float32 operands at full precision; else bfloat16 operands.
    """

    length: int
    rows: int
    columns: int
    heads: int
    head_dim: int
    strict: bool
    scale: float
    window: int | None
    segmented: bool
    precise: bool

    @property
    def log2_scale(self) -> float:
        """Scores are in base 2, because the hardware has exp2."""
        return self.scale * LOG2_E

    @property
    def dtype(self) -> Any:
        return jnp.float32 if self.precise else jnp.bfloat16

    @property
    def num_row_blocks(self) -> int:
        return self.length // self.rows

    @property
    def num_steps(self) -> int:
        """Number of tiles that a row block can touch: all of them, or those that a window reaches."""
        every = -(-self.length // self.columns)
        if self.window is None:
            return every
        return min(every, -(-(self.rows + self.window - 1) // self.columns) + 1)

    def diagonal_tile(self, i: jax.Array) -> jax.Array:
        """The tile with the diagonal of row block i, which is the last one that its rows see."""
        return divide(i, self.columns // self.rows)

    def first_tile(self, i: jax.Array) -> jax.Array | int:
        """The first tile that row block i sees."""
        if self.window is None:
            return 0
        return divide(jnp.maximum(i * self.rows - (self.window - 1), 0), self.columns)


def divide(x: jax.Array, n: int) -> jax.Array:
    """x // n for x >= 0 and a static n. The compiler's estimator follows shifts, not divisions."""
    return x >> (n.bit_length() - 1) if n & (n - 1) == 0 else lax.div(x, n)


def output_type(inputs: Iterable[jax.Array], interpret: Any) -> Callable[..., Any]:
    """(shape, dtype) -> type of an output, which varies over the axes of a shard_map over which any input varies."""
    varying = frozenset().union(*(jax.typeof(x).mat.varying for x in inputs))
    kind = jax.sharding.ManualAxisType(varying=varying)
    if interpret:
        return functools.partial(jax.ShapeDtypeStruct, manual_axis_type=kind)
    return lambda shape, dtype: pl.MemoryRef(
        jax.core.ShapedArray(shape, dtype, manual_axis_type=kind), memory_space=pltpu.HBM
    )


def in_hbm(inputs: list[Operand], interpret: Any) -> list[Operand]:
    """Keeps XLA from moving the operands of a kernel to vector memory, which the kernel needs for its own arrays."""
    if interpret:
        return inputs

    def pin(x):
        return x if x.ndim == 1 else pltpu.with_memory_space_constraint(x, pltpu.HBM)

    return [operand._replace(value=pin(operand.value)) for operand in inputs]


def head(settings: Settings, h: int) -> slice:
    """The lanes of head h in an array whose last axis holds the heads side by side."""
    return slice(h * settings.head_dim, (h + 1) * settings.head_dim)


def block(b: int) -> slice:
    """Rows or lanes of the 128 by 128 block b."""
    return slice(b * LANES, (b + 1) * LANES)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0), precise: bool = False) -> jax.Array:
    """A product with float32 accumulation; contract names the summed axis of a and of b."""
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if precise else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def dot_float32(a: jax.Array, b: jax.Array, precise: bool) -> jax.Array:
    """A product of float32 arrays, unless precise in three bfloat16 passes (relative error 2e-5)."""
    if precise:
        return dot(a, b, precise=True)
    (a_high, a_low), (b_high, b_low) = ([x.astype(jnp.bfloat16) for x in split(y)] for y in (a, b))
    return dot(a_high, b_high) + (dot(a_low, b_high) + dot(a_high, b_low))


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x as a sum of two values with the precision of bfloat16.

    The bits are masked, because the compiler's estimator does not take a cast to bfloat16 and back.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high, x - high


def widen(x: jax.Array, width: int) -> jax.Array:
    """[N, 128] with all lanes equal -> [N, width]."""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * (width // LANES), axis=1)


def fold_lanes(x: jax.Array) -> jax.Array:
    """[N, width] -> [N, 128], adding the groups of 128 lanes."""
    total = x[:, :LANES]
    for start in range(LANES, x.shape[1], LANES):
        total = total + x[:, start : start + LANES]
    return total


def fold_sublanes(x: jax.Array) -> jax.Array:
    """[N, width] -> [8, width], adding the groups of 8 rows."""
    return jnp.sum(x.reshape(x.shape[0] // 8, 8, x.shape[1]), axis=0)


def row_to_column(row: jax.Array) -> jax.Array:
    """[1, N] -> [N, 128] with all lanes equal."""
    return jnp.concatenate(
        [jnp.broadcast_to(row[:, start : start + LANES], (LANES, LANES)).T for start in range(0, row.shape[1], LANES)],
        axis=0,
    )


def column_to_row(column: jax.Array) -> jax.Array:
    """[128, 128] with all lanes equal -> [1, 128]."""
    return column.T[:1]


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def visible(
    settings: Settings,
    shape: tuple[int, int],
    row_axis: int,
    offset: jax.Array | int,
    row_segments: jax.Array | None,
    column_segments: jax.Array | None,
) -> jax.Array | None:
    """Mask of a tile by segments and window, or None where nothing is hidden. `causal` has the causal edge.

    Args:
      shape: of the tile, with the rows of the system along row_axis.
      offset: first row of the tile minus its first column.
      row_segments, column_segments: ids along axis 0 are [N, 128] with equal lanes, those along axis 1 are [1, M].
    """
    mask = None
    if settings.segmented:
        if row_axis == 0:
            mask = widen(row_segments, shape[1]) == column_segments
        else:
            mask = row_segments == widen(column_segments, shape[1])
    if settings.window is not None:
        distance = iota(shape, row_axis) - iota(shape, 1 - row_axis)
        near = distance < settings.window - offset
        mask = near if mask is None else mask & near
    return mask


def identity() -> jax.Array:
    """[128, 128] float32."""
    return (iota((LANES, LANES), 0) == iota((LANES, LANES), 1)).astype(jnp.float32)


def causal(row_axis: int, strict: bool) -> jax.Array:
    """Mask of a [128, 128] block on the diagonal."""
    row, column = iota((LANES, LANES), row_axis), iota((LANES, LANES), 1 - row_axis)
    return column < row if strict else column <= row


def masked(mask: jax.Array | None, x: jax.Array, fill: float) -> jax.Array:
    return x if mask is None else jnp.where(mask, x, jnp.float32(fill))
