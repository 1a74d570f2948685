"""What the GPU kernels of the causal solve share: settings, products, masks, loads and stores, inverses.

L is the sequence length, H the number of heads, K the head dimension, padded to a power of two. A tile is C rows of the
system by C columns of it. Arrays keep the layout [B, L, H, K]; row vectors are [B, H, L]. Functions take and return
values in registers unless they say otherwise.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.kernel_call import Ref

LOG2_E = math.log2(math.e)
SUBSTITUTED = 16  # rows of the blocks inverted by substitution before matrix products merge them


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that is known when a kernel is compiled; all kernels of a call get the same.

    Attributes:
      rows: C, a power of two of at least 16.
      strict: row i sees j < i and D = 1 (DeltaFormer); else j <= i and D = ridge (Cubit).
      scale: factor of the scores.
      window: row i sees i - j < window, or None.
      segmented: segment ids are given; zero is padding.
      half: products of weights and solutions in float16 (16-bit inputs); else three-term TF32 (float32 inputs).
      interpret: Pallas' interpreter, for a CPU.
    """

    rows: int
    strict: bool
    scale: float
    window: int | None
    segmented: bool
    half: bool
    interpret: bool

    @property
    def bias(self) -> float:
        """Binary exponent added to weights, which are at most 1, so that float16 keeps those down to 2^-29 normal."""
        return 15.0 if self.half else 0.0

    @property
    def log2_scale(self) -> float:
        """Scores are in base 2, because the hardware has exp2."""
        return self.scale * LOG2_E


def dot(settings: Settings, a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """A product with float32 accumulation; contract names the summed axis of a and of b.

    Float32 operands are never rounded to TF32 once, which is what Triton's default precision does: three TF32 products,
    or float32 where the interpreter runs on a CPU, which has no TF32.
    """
    precision = None
    if a.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST if settings.interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _power_of_two(exponent):
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def quantize(x: jax.Array, axes: tuple[int, ...] = (0, 1)) -> tuple[jax.Array, jax.Array]:
    """x float32 -> (x / unit in float16, unit float32), unit the power of two that brings max|x| over `axes` near 2^15.

    `unit` keeps the reduced axes with size 1. The clip bounds ratios of two units, which scale accumulators.
    """
    peak = jnp.abs(x)
    for axis in axes:
        peak = jnp.max(peak, axis=axis, keepdims=True)
    exponent = (lax.bitcast_convert_type(peak, jnp.int32) >> 23) - (127 + 14)
    exponent = jnp.minimum(jnp.maximum(exponent, -40), 80)
    return (x * _power_of_two(-exponent)).astype(jnp.float16), _power_of_two(exponent)


def load_rows(ref: Ref, batch: jax.Array, block: jax.Array, head: jax.Array, rows: int) -> jax.Array:
    """[C, K] rows of a [B, L, H, K] array."""
    return ref[batch, pl.ds(block * rows, rows), head, :]


def store_rows(ref: Ref, batch: jax.Array, block: jax.Array, head: jax.Array, rows: int, value: jax.Array) -> None:
    ref[batch, pl.ds(block * rows, rows), head, :] = value.astype(ref.dtype)


def load_vector(ref: Ref, batch: jax.Array, block: jax.Array, head: jax.Array, rows: int) -> jax.Array:
    """[C] entries of a [B, H, L] array."""
    return ref[batch, head, pl.ds(block * rows, rows)]


def store_vector(ref: Ref, batch: jax.Array, block: jax.Array, head: jax.Array, rows: int, value: jax.Array) -> None:
    ref[batch, head, pl.ds(block * rows, rows)] = value


def load_segments(settings: Settings, ref: Ref, batch: jax.Array, block: jax.Array) -> jax.Array | None:
    """[C] segment ids, or None where there are none."""
    return ref[batch, pl.ds(block * settings.rows, settings.rows)] if settings.segmented else None


def visible(
    settings: Settings,
    i: jax.Array,
    j: jax.Array,
    row_segments: jax.Array | None,
    column_segments: jax.Array | None,
    *,
    diagonal: bool,
    transposed: bool = False,
) -> jax.Array | None:
    """Mask [C, C] of tile (i, j), or None where nothing is hidden.

    Args:
      row_segments, column_segments: ids [C] of the tile's rows and columns.
      diagonal: whether i == j, where causality cuts through the tile.
      transposed: the mask's axes are (column, row), not (row, column).
    """
    rows = settings.rows
    row_axis, column_axis = (1, 0) if transposed else (0, 1)
    row = i * rows + lax.broadcasted_iota(jnp.int32, (rows, rows), row_axis)
    column = j * rows + lax.broadcasted_iota(jnp.int32, (rows, rows), column_axis)
    mask = None
    if diagonal:
        mask = column < row if settings.strict else column <= row
    if settings.window is not None:
        near = row - column < settings.window
        mask = near if mask is None else mask & near
    if settings.segmented:
        row_segments = jnp.expand_dims(row_segments, column_axis)
        column_segments = jnp.expand_dims(column_segments, row_axis)
        same = (row_segments == column_segments) & (column_segments != 0)
        mask = same if mask is None else mask & same
    return mask


def masked(mask: jax.Array | None, x: jax.Array, fill: float) -> jax.Array:
    return x if mask is None else jnp.where(mask, x, fill)


def unit_lower_inverse(settings: Settings, n: jax.Array) -> jax.Array:
    """(I + n)^-1 for strictly lower triangular n [C, C] float32.

    The blocks of 16 rows on the diagonal are inverted by forward substitution, all at once in 15 rank-one steps.
    Products then merge them in pairs: X <- X - X O X, with O the part of n between the two of a pair. Repeated squaring
    would need fewer steps, but overflows for uniform weights.
    """
    size, sub = settings.rows, SUBSTITUTED
    count = size // sub
    block_row = lax.broadcasted_iota(jnp.int32, (count, 1, count, 1), 0)
    block_column = lax.broadcasted_iota(jnp.int32, (count, 1, count, 1), 2)
    own = block_row == block_column
    blocks = jnp.sum(jnp.where(own, n.reshape(count, sub, count, sub), 0.0), axis=2)
    row = lax.broadcasted_iota(jnp.int32, (1, sub, sub), 1)
    column = lax.broadcasted_iota(jnp.int32, (1, sub, sub), 2)

    def substitute(step, x):
        factor = jnp.sum(jnp.where(column == step, blocks, 0.0), axis=2)
        solved = jnp.sum(jnp.where(row == step, x, 0.0), axis=1)
        return x - factor[:, :, None] * solved[:, None, :]

    identity = jnp.where((row == column) & (lax.broadcasted_iota(jnp.int32, (count, 1, 1), 0) >= 0), 1.0, 0.0)
    x = lax.fori_loop(0, sub - 1, substitute, identity)
    x = jnp.where(own, x[:, :, None, :], 0.0).reshape(size, size)
    if count == 1:
        return x
    block_row = lax.broadcasted_iota(jnp.int32, (size, size), 0) // sub
    block_column = lax.broadcasted_iota(jnp.int32, (size, size), 1) // sub

    def merge(level, x):
        between = ((block_row >> level) != (block_column >> level)) & (
            (block_row >> (level + 1)) == (block_column >> (level + 1))
        )
        product = dot(settings, jnp.where(between, n, 0.0), x)
        return x - dot(settings, x, product)

    # A loop, not unrolled: unrolled levels cost kilobytes of spilled registers.
    return lax.fori_loop(0, count.bit_length() - 1, merge, x)


def substitute(n: jax.Array, target: jax.Array) -> jax.Array:
    """x of (I + n) x = target for strictly lower triangular n [C, C], row after row: no row depends on a later one."""
    row = lax.broadcasted_iota(jnp.int32, target.shape, 0)
    column = lax.broadcasted_iota(jnp.int32, n.shape, 1)

    def step(r, x):
        factor = jnp.sum(jnp.where(column == r, n, 0.0), axis=1)
        solved = jnp.sum(jnp.where(row == r, x, 0.0), axis=0)
        return jnp.where(row > r, x - factor[:, None] * solved[None, :], x)

    return lax.fori_loop(0, n.shape[0] - 1, step, target)
