"""Tiles of the lower triangle: what blockwise attention and the blockwise solve share.

Inside, arrays are [N, B, H, C, K]: N blocks of C positions. A row block visits its tiles in a loop, so compile time
does not depend on the length, and nothing of size L x L exists.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from cubit_jax.ops import dispatch, masks

# Largest C that is chosen, by backend: smaller tiles waste less of the diagonal, larger ones keep more cores busy.
MAX_BLOCK = {"cpu": 128}
OTHER_MAX_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The blocks of a sequence, and which tiles are visible. All of it is static.

    Attributes:
      length: L, of the sequence.
      block: C, rows and columns of a tile; the last block is padded at its end, where causality hides the padding.
      window: as in masks.visible.
      strict: as in masks.visible.
    """

    length: int
    block: int
    window: int | None = None
    strict: bool = False

    @property
    def num_blocks(self) -> int:
        """N."""
        return -(-self.length // self.block)

    def split(self, x: jax.Array) -> jax.Array:
        """[B, L, H, ...] -> [N, B, H, C, ...], padded with zeros."""
        x = jnp.pad(x, [(0, 0), (0, self.num_blocks * self.block - self.length)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(x.shape[0], self.num_blocks, self.block, *x.shape[2:])
        return jnp.moveaxis(x, (1, 2), (0, 3)) if x.ndim > 3 else jnp.moveaxis(x, 1, 0)

    def merge(self, x: jax.Array) -> jax.Array:
        """[N, B, H, C, ...] -> [B, L, H, ...]: undoes split."""
        x = jnp.moveaxis(x, (0, 3), (1, 2))
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : self.length]

    def first(self, i: jax.Array) -> jax.Array | int:
        """The first column block that row block i sees."""
        return 0 if self.window is None else lax.max(0, i * self.block - (self.window - 1)) // self.block

    def mask(self, i: jax.Array, j: jax.Array, segments: jax.Array | None, diagonal: bool = False) -> jax.Array | None:
        """Visible part of tile (i, j), broadcastable to [B, H, C, C]; None if all of it is.

        segments: [N, B, C] or None. diagonal: whether i == j (static).
        """
        if not diagonal and self.window is None and segments is None:
            return None
        index = jnp.arange(self.block)
        rows = columns = None
        if segments is not None:
            rows, columns = take(segments, i)[:, None], take(segments, j)[:, None]
        return masks.visible(
            i * self.block + index, j * self.block + index, rows, columns, window=self.window, strict=self.strict
        )


def choose_block(length: int, block_size: int | None = None) -> int:
    """C for sequences of this length: block_size if given, else even blocks of a multiple of 16 rows."""
    if block_size is not None:
        return min(block_size, length)
    count = -(-length // MAX_BLOCK.get(dispatch.current_backend(), OTHER_MAX_BLOCK))
    return -(-length // (count * 16)) * 16


def compute_dtype(*arrays: jax.Array) -> jnp.dtype:
    """float32, or float64 if one of the arrays is."""
    return functools.reduce(jnp.promote_types, (x.dtype for x in arrays), jnp.float32)


def precision(*arrays: jax.Array) -> lax.Precision:
    """Of a product: the device's fastest, in which bfloat16 operands keep all their digits, or else full."""
    return lax.Precision.DEFAULT if all(x.dtype == jnp.bfloat16 for x in arrays) else lax.Precision.HIGHEST


def split_rows(array: jax.Array, count: int) -> jax.Array:
    """[B, L, ...] (or [L]) -> [count, B, ceil(L / count), ...], zero-padded: blocks of rows for a loop."""
    axis = 0 if array.ndim == 1 else 1
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, -array.shape[axis] % count)
    array = jnp.pad(array, padding)
    shape = (*array.shape[:axis], count, array.shape[axis] // count, *array.shape[axis + 1 :])
    return jnp.moveaxis(array.reshape(shape), axis, 0)


def join_rows(blocks: jax.Array, length: int) -> jax.Array:
    """The inverse of `split_rows` for [count, B, C, ...] -> [B, L, ...]."""
    joined = jnp.moveaxis(blocks, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :length]


def take(x: jax.Array, i: jax.Array) -> jax.Array:
    """Block i of [N, ...]."""
    return lax.dynamic_index_in_dim(x, i, keepdims=False)


def put(x: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
    """[N, ...] with this value as its block i."""
    return lax.dynamic_update_index_in_dim(x, value, i, 0)


def dot(spec: str, x: jax.Array, y: jax.Array, precision: lax.Precision = lax.Precision.HIGHEST) -> jax.Array:
    """jnp.einsum at full precision, unless another is given."""
    return jnp.einsum(spec, x, y, precision=precision)


def score(q_i: jax.Array, k_j: jax.Array, scale: float, dtype: jnp.dtype) -> jax.Array:
    """scale * q . k of the rows and columns of a tile, both [B, H, C, K]: [B, H, C, C] in the given dtype."""
    return scale * dot("bhik,bhjk->bhij", q_i.astype(dtype), k_j.astype(dtype), precision(q_i, k_j))


def exponentials(top: jax.Array, scores: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """exp(scores - m) of a tile, the factor exp(top - m) for what was summed before, and m: the new row maximum."""
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    new = lax.max(top, jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - new)
    if mask is not None:
        weights = jnp.where(mask, weights, 0)  # in a row that sees nothing every score is the maximum
    return weights, jnp.exp(top - new), new


def finite_part(values: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a product may read without 0 times infinity, which is NaN, in rows before one that is not finite.

    Args:
      values: [..., C, V]; index: int [C], the sequence index of each.

    Returns:
      The values with 0 where they are not finite; and the first index where they are not, [..., 1, V].
    """
    finite = jnp.isfinite(values)
    none = jnp.iinfo(index.dtype).max
    first = jnp.min(jnp.where(finite, none, index[:, None]), axis=-2, keepdims=True)
    return jnp.where(finite, values, 0), first


def from_row_on(product: jax.Array, index: jax.Array, first: jax.Array) -> jax.Array:
    """The product [..., C, V] of causal weights and a `finite_part`, NaN from the first row on that could read more."""
    return jnp.where(index[:, None] < first, product, jnp.nan)


def start(q: jax.Array, width: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(row maximum, total, sum of weighted values [..., width]) of an online softmax of rows q before any column."""
    shape = q.shape[:-1]
    return (
        jnp.full_like(q, jnp.finfo(dtype).min, dtype, shape=(*shape, 1)),
        jnp.zeros_like(q, dtype, shape=(*shape, 1)),
        jnp.zeros_like(q, dtype, shape=(*shape, width)),
    )


def forward_row(
    tiling: Tiling,
    scale: float,
    i: jax.Array,
    q_i: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    state: Sequence[jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row block i up to its diagonal tile.

    Args:
      q_i: [B, H, C, K]; k, v: [N, B, H, C, ...]; segments: [N, B, C] or None.
      state: from `start`, or after other columns than these; its dtype is that of the computation.

    Returns:
      The diagonal tile of the weights [B, H, C, C]; the sum of P_ij v_j over everything before it [B, H, C, V]; the
      log-sum-exp of each row [B, H, C]. For a row that sees nothing the first two are 0 and the last is finite.
    """
    dtype = state[0].dtype

    def step(top, total, summed, j, mask):
        weights, decay, top = exponentials(top, score(q_i, take(k, j), scale, dtype), mask)
        return weights, top, decay * total + jnp.sum(weights, axis=-1, keepdims=True), decay * summed

    def column_block(j, state):
        weights, top, total, summed = step(*state, j, tiling.mask(i, j, segments))
        v_j = take(v, j)
        return top, total, summed + dot("bhij,bhjk->bhik", weights, v_j.astype(dtype), precision(v_j))

    state = lax.fori_loop(tiling.first(i), i, column_block, tuple(state))
    weights, top, total, summed = step(*state, i, tiling.mask(i, i, segments, diagonal=True))
    total = jnp.where(total == 0, 1, total)
    return weights / total, summed / total, (top + jnp.log(total))[..., 0]


def backward_row(
    tiling: Tiling,
    scale: float,
    i: jax.Array,
    q_i: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lse_i: jax.Array,
    segments: jax.Array | None,
    dk: jax.Array,
    dv: jax.Array,
    cotangent: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row block i of the gradient of o = P v; the weights are made anew from the log-sum-exp.

    Args:
      dk, dv: [N, B, H, C, ...] accumulators; dk lacks the factor scale.
      cotangent: called with the diagonal tile of the weights and with block i of dv as summed from later rows; returns
        the cotangent of o_i, its delta = sum_j P_ij dP_ij [B, H, C, 1], and the final block i of dv.

    Returns:
      dq_i, dk, dv.
    """
    dtype = dk.dtype
    by_key, by_value = precision(q_i, k), precision(v)

    def weights(j, mask):
        p = jnp.exp(score(q_i, take(k, j), scale, dtype) - lse_i[..., None])
        return p if mask is None else jnp.where(mask, p, 0)

    def step(j, p, dk, dq, rows, on_diagonal):
        k_j = take(k, j).astype(dtype)
        ds = p * (dot("bhik,bhjk->bhij", z, take(v, j).astype(dtype), by_value) - delta)
        if on_diagonal and not tiling.strict:
            ds = jnp.where(jnp.eye(tiling.block, dtype=bool), 0, ds)
        dk = put(dk, take(dk, j) + dot("bhij,bhik->bhjk", ds, q_i.astype(dtype), by_key), j)
        return dk, dq + dot("bhij,bhjk->bhik", ds, k_j, by_key), rows + jnp.sum(ds, axis=-1, keepdims=True)

    def column_block(j, carry):
        dv, *rest = carry
        p = weights(j, tiling.mask(i, j, segments))
        dv = put(dv, take(dv, j) + dot("bhij,bhik->bhjk", p, z, by_value), j)
        return dv, *step(j, p, *rest, False)

    p = weights(i, tiling.mask(i, i, segments, diagonal=True))
    z, delta, dv_i = cotangent(p, take(dv, i))
    zeros = jnp.zeros_like(q_i, dtype)
    carry = put(dv, dv_i, i), *step(i, p, dk, zeros, zeros[..., :1], True)
    dv, dk, dq, rows = lax.fori_loop(tiling.first(i), i, column_block, carry)
    if not tiling.strict:
        # A row of the scores' gradient sums to 0. With peaked weights its diagonal entry P_ii (dP_ii - delta_i) cancels
        # to few digits; minus the sum of the others keeps them.
        dq -= rows * take(k, i).astype(dtype)
        dk = put(dk, take(dk, i) - rows * q_i.astype(dtype), i)
    return scale * dq, dk, dv


def solve_triangular(system: jax.Array, rhs: jax.Array, transpose: bool = False) -> jax.Array:
    """Solution of system x = rhs, or of its transpose, for lower-triangular system [..., C, C] and rhs [..., C, V].

    By blocks of at most 16 rows (for C up to 16 times a power of two): substitution inverts those on the diagonal, the
    rest is matrix products. An inverse by repeated squaring would overflow: powers of near-uniform weights grow like
    binomial coefficients. A row whose diagonal entry is 0 (nothing visible and no ridge) has the solution 0. A row that
    overflows leaves the rows before it as they are (not in the transposed system, where they read it).
    """
    size = system.shape[-1]
    base = size
    while base > 16 and base % 2 == 0:
        base //= 2
    inverse = _inverse_of_diagonal_blocks(system, base)
    spec = "...ji,...jk->...ik" if transpose else "...ij,...jk->...ik"
    index = jnp.arange(base)

    def block(t, x):
        s = (size // base - 1 - t if transpose else t) * base
        rows = lax.dynamic_slice_in_dim(system, s, base, -1 if transpose else -2)
        target = lax.dynamic_slice_in_dim(rhs, s, base, -2) - dot(spec, rows, x)  # x is 0 where it is not yet known
        if not transpose:
            target, bad = finite_part(target, index)
        solved = dot(spec, lax.dynamic_index_in_dim(inverse, s // base, -3, keepdims=False), target)
        if not transpose:
            solved = from_row_on(solved, index, bad)
        return lax.dynamic_update_slice_in_dim(x, solved, s, -2)

    return lax.fori_loop(0, size // base, block, jnp.zeros_like(rhs))


def _inverse_of_diagonal_blocks(system, base):
    """[..., C, C] -> [..., C / base, base, base], all blocks at once."""
    count = system.shape[-1] // base
    blocks = system.reshape(*system.shape[:-2], count, base, count, base)
    on_diagonal = jnp.eye(count, dtype=bool)[:, None, :, None]
    blocks = jnp.sum(jnp.where(on_diagonal, blocks, 0), axis=-2)
    pivot = jnp.diagonal(blocks, axis1=-2, axis2=-1)
    reciprocal = jnp.where(pivot == 0, 0, 1 / jnp.where(pivot == 0, 1, pivot))
    index = jnp.arange(base)[:, None]

    def substitute(k, inverse):
        row = lax.dynamic_slice_in_dim(inverse, k, 1, -2) * lax.dynamic_slice_in_dim(reciprocal, k, 1, -1)[..., None]
        column = lax.dynamic_slice_in_dim(blocks, k, 1, -1)
        below = jnp.where(index > k, inverse - column * row, inverse)  # no product above: it could be 0 times infinity
        return jnp.where(index == k, row, below)

    return lax.fori_loop(0, base, substitute, jnp.zeros_like(blocks) + jnp.eye(base, dtype=system.dtype))
