"""What the GPU kernels of the causal solve share: static settings, tile products, masks, the counter protocol.

Letters: C rows a block (tiles are C x C), K head dim (padded to a power of two), I/J the block of rows/columns that one
program owns, i/j the blocks it streams. Arrays keep the layout [B, L, H, K]; row vectors are [B, H, L].
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

LOG2E = 1.4426950408889634
COUNTER_STRIDE = 32  # int32 words: one 128-byte line of memory a counter, so that heads do not contend for one
SUBSTITUTED = 16  # rows of the blocks inverted by substitution before matrix products merge them


@dataclasses.dataclass(frozen=True)
class Settings:
    """Static settings of one call; the same object goes to all of its kernels.

    Attributes:
      strict: j < i and unit diagonal with beta (DeltaFormer); else j <= i with a ridge (Cubit).
      segmented: segment ids are given; zero is padding.
      window: i - j < window, or None.
      scale: factor of the scores.
      rows: C, a power of two of at least 16.
      half: products of weights and solutions in float16 (16-bit inputs); else three-term TF32 (float32 inputs).
      interpret: Pallas' interpreter, for a CPU.
    """

    strict: bool
    segmented: bool
    window: int | None
    scale: float
    rows: int
    half: bool
    interpret: bool

    @property
    def bias(self):
        """Binary exponent added to weights, which are at most 1, so that float16 keeps those down to 2^-29 normal."""
        return 15.0 if self.half else 0.0

    @property
    def score_scale(self):
        """Scores are in base 2: exp2 is the instruction there is."""
        return self.scale * LOG2E


def dot(a, b, settings, contract=(1, 0)):
    """a @ b summed in float32, contracting dimension contract[0] of a with contract[1] of b.

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


def quantize(x, axes=(0, 1)):
    """x float32 -> (x / unit in float16, unit float32), unit the power of two that brings max|x| over `axes` near 2^15.

    `unit` keeps the reduced axes with size 1. The clip bounds ratios of two units, which scale accumulators.
    """
    peak = jnp.abs(x)
    for axis in axes:
        peak = jnp.max(peak, axis=axis, keepdims=True)
    exponent = (lax.bitcast_convert_type(peak, jnp.int32) >> 23) - (127 + 14)
    exponent = jnp.minimum(jnp.maximum(exponent, -40), 80)
    return (x * _power_of_two(-exponent)).astype(jnp.float16), _power_of_two(exponent)


def load_rows(ref, batch, block, head, rows):
    """[C, K] rows of a [B, L, H, K] array."""
    return ref[batch, pl.ds(block * rows, rows), head, :]


def store_rows(ref, batch, block, head, rows, value):
    ref[batch, pl.ds(block * rows, rows), head, :] = value.astype(ref.dtype)


def load_vector(ref, batch, block, head, rows):
    """[C] entries of a [B, H, L] array."""
    return ref[batch, head, pl.ds(block * rows, rows)]


def store_vector(ref, batch, block, head, rows, value):
    ref[batch, head, pl.ds(block * rows, rows)] = value


def load_segments(ref, batch, block, settings):
    """[C] segment ids, or None where there are none."""
    return ref[batch, pl.ds(block * settings.rows, settings.rows)] if settings.segmented else None


def visible(i, j, row_segments, column_segments, settings, *, diagonal, transposed=False):
    """[C, C] bool: which columns of tile (i, j) its rows see, or None if all; [column, row] if transposed.

    diagonal: i == j, where causality cuts through the tile; off the diagonal only window and segments do.
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


def masked(mask, x, fill):
    return x if mask is None else jnp.where(mask, x, fill)


def unit_lower_inverse(n, settings):
    """(I + n)^-1 for strictly lower triangular n [C, C] float32.

    Blocks of 16 rows by substitution, all at once in 15 rank-one steps, then merged in pairs: X <- X - X O X with O the
    part of n between the two of a pair. Repeated squaring would be fewer steps but overflows with near-uniform weights.
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
        product = dot(jnp.where(between, n, 0.0), x, settings)
        return x - dot(x, product, settings)

    # A loop, not unrolled: unrolled levels cost kilobytes of spilled registers.
    return lax.fori_loop(0, count.bit_length() - 1, merge, x)


def take_ticket(counters_ref, num_heads_total):
    """(block in ticket order, batch*head) of this program.

    Programs start in no defined order, and a program waits for earlier blocks of its head. Taking numbers at the start
    makes every block that is waited for belong to a program that already runs, so nothing can wait for ever.
    """
    ticket = plt.atomic_add(counters_ref, (pl.program_id(0) * 0,), jnp.int32(1))
    return ticket // num_heads_total, ticket % num_heads_total


def _counter(head):
    return ((head + 1) * COUNTER_STRIDE,)


def wait_for(counters_ref, head, count, seen):
    """Spins until `count` blocks of the head are published; returns how many are (`seen` if that is enough already).

    atomic_max with 0 reads with acquire order: loads after it see what was stored before the counter was raised.
    """
    return lax.while_loop(lambda n: n < count, lambda n: plt.atomic_max(counters_ref, _counter(head), n * 0), seen)


def publish(counters_ref, head, count, settings):
    """Raises the head's counter to `count` after every thread of this program has stored its part."""
    if not settings.interpret:
        plt.debug_barrier()
    plt.atomic_max(counters_ref, _counter(head), count)


def new_counters(num_heads_total):
    """The ticket, then a counter a head."""
    return jnp.zeros(((num_heads_total + 1) * COUNTER_STRIDE,), jnp.int32)


def stream(counters_ref, head, start, stop, tile, carry, seen):
    """Runs carry = tile(t, carry) for t in [start, stop), waiting until each block t is published.

    Published blocks run in a plain loop, which the compiler pipelines; only reaching the end of them polls.
    Returns (carry, published blocks seen).
    """

    def more(state):
        t, seen, carry = state
        seen = wait_for(counters_ref, head, t + 1, seen)
        end = jnp.minimum(seen, stop)
        return end, seen, lax.fori_loop(t, end, tile, carry)

    _, seen, carry = lax.while_loop(lambda state: state[0] < stop, more, (start, seen, carry))
    return carry, seen


def call(kernel, name, operands, out_shapes, grid, *, settings, warps, stages, aliases=None):
    """pallas_call on whole arrays, a program indexing what it needs. out_shapes: (shape, dtype) an output."""
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in out_shapes],
        input_output_aliases=aliases or {},
        interpret=settings.interpret,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        name=name,
    )(*operands)
