"""The causal solve of Cubit and DeltaFormer as TPU kernels (Pallas, Mosaic backend).

    D_i u_i + c_i sum_{visible j} P_ij u_j = rhs_i,    P = softmax_visible(scale * query key^T)

Cubit (arXiv 2605.06501, eq. 13): c = 1, j <= i, D = ridge, per head.
DeltaFormer (arXiv 2505.19488): c = beta, j < i, D = 1.

There is one forward kernel (kernel_solve_tpu_forward), with two matrix products per tile, and one backward kernel
(kernel_solve_tpu_backward), with five, as in flash attention. Memory is linear in the length. This module has the
public function, its limits and block sizes, the padding and the derivative rule.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kernel_solve_inputs import check, pad, pad_rows_of_heads, zero_padding
from pallas_kernels.kernel_solve_tpu_backward import backward, backward_bytes
from pallas_kernels.kernel_solve_tpu_forward import forward, forward_bytes
from pallas_kernels.kernel_solve_tpu_tiles import LANES, MIB, Settings

HEAD_DIMS = (64, 128, 256)
# Bytes per core, by device kind.
VECTOR_MEMORY = {
    "TPU v5 lite": 128 * MIB,
    "TPU v5": 64 * MIB,
    "TPU v6 lite": 128 * MIB,
    "TPU7x": 64 * MIB,
}


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Tiles of the two kernels.

    Attributes:
      rows, backward_rows: number of rows that are solved at once, a multiple of 128.
      columns, backward_columns: width of a tile, a multiple of rows.
      heads, backward_heads: number of heads that one program handles side by side, which hides the latency of the
        solve. It must divide the number of heads.
    """

    rows: int
    columns: int
    heads: int
    backward_rows: int
    backward_columns: int
    backward_heads: int

    def __post_init__(self):
        for rows, columns in ((self.rows, self.columns), (self.backward_rows, self.backward_columns)):
            if rows < LANES or rows % LANES:
                raise ValueError(f"{rows=} must be a multiple of {LANES}")
            if columns % rows or columns < rows:
                raise ValueError(f"{columns=} must be a multiple of {rows=}")

    @classmethod
    def best(
        cls, device_kind: str, length: int, num_heads: int, head_dim: int, precise: bool, rows: int | None = None
    ) -> "BlockSizes":
        """Sizes for a device kind as JAX names it. An unknown one gets the sizes for the smallest vector memory.

        Raises:
          NotImplementedError: what has to stay in vector memory does not fit.
        """
        memory = VECTOR_MEMORY.get(device_kind, min(VECTOR_MEMORY.values()))
        large = memory >= 128 * MIB
        if rows is None:
            blocks = -(-length // 512)
            rows = -(-length // (blocks * LANES)) * LANES  # as even as the unit of 128 allows
            wide = (rows, rows if precise or blocks == 1 else 2 * rows)
            tall = (2 * rows, 2 * rows) if blocks % 2 == 0 and not precise else wide
        else:
            wide = tall = (rows, rows)
        length = -(-length // rows) * rows

        def fitting(need, tiles, most_heads, share):
            heads = [n for n in _allowed_heads(num_heads, head_dim) if n <= most_heads]
            sizes = [(*tile, n) for tile in tiles for n in heads]
            need = {x: need(length, *x, head_dim, precise) for x in sizes}
            if found := _largest_that_fits(need, share * memory // 8, 7 * memory // 8):
                return found
            raise NotImplementedError(
                f"the TPU kernel keeps u and its gradients in vector memory: {length=} with {num_heads=}, {head_dim=} "
                f"does not fit in {memory // MIB} MiB"
            )

        # Estimates (experiments/README.md): with little memory the forward kernel gains more from heads side by side.
        # A share is what leaves XLA enough for the arrays around the kernel: with more than three eighths for the
        # forward kernel, four heads at L=8192 did not compile for v5p.
        forward_tiles = (tall, wide) if large else (wide,)
        together = max(1, LANES // head_dim) * (2 if large else 1)
        return cls(
            *fitting(functools.partial(forward_bytes, residuals=False), forward_tiles, 2 if precise else 4, 3),
            *fitting(backward_bytes, (tall, wide), together, 4),
        )


def _largest_that_fits(need, enough, limit):
    """Of {(rows, columns, heads): bytes} the sizes with the most rows at once in `enough` bytes.

    If there are none, those with the least bytes, if these are within `limit`; else None.
    """
    if fits := [sizes for sizes, size in need.items() if size <= enough]:
        return max(fits, key=lambda sizes: (sizes[0] * sizes[2], sizes[2]))
    least = min(need, key=need.get, default=None)
    return least if least and need[least] <= limit else None


def _allowed_heads(num_heads, head_dim):
    """How many heads a block may hold: a block is whole registers wide, or as wide as the array."""
    return [n for n in range(1, num_heads + 1) if num_heads % n == 0 and (n * head_dim % LANES == 0 or n == num_heads)]


@dataclasses.dataclass(frozen=True)
class _Config:
    """What the derivative rule knows besides arrays."""

    forward: Settings
    backward: Settings
    interpret: object


def kernel_solve(
    query: jax.Array,
    key: jax.Array,
    rhs: jax.Array,
    *,
    ridge: jax.Array | None = None,
    beta: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    window: int | None = None,
    scale: float = 1.0,
    block_size: BlockSizes | int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Solves the causal system without storing its matrix; differentiable in every floating-point array.

    Args:
      query, key: [B, L, H, K], K <= 256. If both are bfloat16, products take bfloat16 operands and sum in float32.
        Otherwise everything is float32.
      rhs: [B, L, H, K], any floating-point dtype but float64.
      ridge: [H], the diagonal D of the inclusive system (Cubit). Exactly one of ridge and beta is given.
      beta: [B, L, H], the row factors c of the strict system with unit diagonal (DeltaFormer).
      segment_ids: [B, L] integers; rows see columns of their own id only. In padding, id 0, u is 0, and
        whatever the arrays hold there has no effect.
      window: row i sees columns j with i - j < window.
      scale: factor of the scores, a Python number.
      block_size: BlockSizes, or the number of rows per block (a multiple of 128), or None for those of the device.
      interpret: run in Pallas' interpreter (on a CPU): True or pltpu.InterpretParams.

    Returns:
      u [B, L, H, K] float32. A row that overflows, and rows that depend on it, are not finite; rows before it are what
      they would be without it.

    Raises:
      NotImplementedError: float64 arguments, a head dimension, length or block_size that these kernels do not have.
      ValueError: a malformed input.
    """
    check("TPU", query, key, rhs, ridge, beta, HEAD_DIMS[-1])
    real_ids = segment_ids
    query, key, rhs = zero_padding(real_ids, query, key, rhs)
    batch, length, num_heads, head_dim = query.shape
    precise = not query.dtype == key.dtype == jnp.bfloat16
    if precise:
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    if rhs.dtype != jnp.bfloat16:
        rhs = rhs.astype(jnp.float32)
    sizes, padded_dim = _sizes(block_size, length, num_heads, head_dim, precise)
    unit = math.lcm(sizes.rows, sizes.backward_rows)
    padded_length = -(-length // unit) * unit
    rows_missing = padded_length - length

    def settings(rows, columns, heads):
        return Settings(
            length=padded_length,
            rows=rows,
            columns=min(columns, padded_length),
            heads=heads,
            head_dim=padded_dim,
            strict=beta is not None,
            scale=float(scale),
            window=None if window is None or window >= length else int(window),
            segmented=segment_ids is not None,
            precise=precise,
        )

    config = _Config(
        settings(sizes.rows, sizes.columns, sizes.heads),
        settings(sizes.backward_rows, sizes.backward_columns, sizes.backward_heads),
        interpret,
    )

    def flat(x):
        return pad(x, rows_missing, padded_dim - head_dim).reshape(batch, padded_length, num_heads * padded_dim)

    if beta is None:
        coefficient = jnp.broadcast_to(ridge.astype(jnp.float32), (batch, num_heads)).reshape(-1)
    else:
        coefficient = pad_rows_of_heads(*zero_padding(real_ids, beta), rows_missing)
    if segment_ids is not None:
        # The rows that are added see each other, so that their system is never singular.
        segment_ids = jnp.pad(segment_ids.astype(jnp.int32), ((0, 0), (0, rows_missing)), constant_values=2**30)
    u = _solve(config, flat(query), flat(key), flat(rhs), coefficient, segment_ids)
    return zero_padding(real_ids, u[:, :length, :, :head_dim])[0]


def _sizes(block_size, length, num_heads, head_dim, precise):
    """(block sizes, head dimension that they are for: padded to what a register holds)."""
    dims = [n for n in HEAD_DIMS if n >= head_dim]
    if isinstance(block_size, BlockSizes):
        for heads in (block_size.heads, block_size.backward_heads):
            allowed = _allowed_heads(num_heads, dims[0])
            if heads not in allowed:
                raise ValueError(f"{heads=} of the block sizes must be one of {allowed}")
        return block_size, dims[0]
    if block_size is not None and (block_size < LANES or block_size % LANES):
        raise NotImplementedError(f"the TPU kernel takes a {block_size=} that is a multiple of {LANES}")
    device_kind = _device_kind()
    try:
        return BlockSizes.best(device_kind, length, num_heads, dims[0], precise, block_size), dims[0]
    except NotImplementedError:
        if dims[0] >= LANES:
            raise
    # Two heads of 64 share a register; where both do not fit, one alone may.
    return BlockSizes.best(device_kind, length, num_heads, LANES, precise, block_size), LANES


def _device_kind():
    """Of the mesh in use, whose devices need not be here, or of this process's TPU; "" where neither is known."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform == "tpu":
        return device.device_kind
    return jax.devices()[0].device_kind if jax.default_backend() == "tpu" else ""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _solve(config, query, key, rhs, coefficient, segment_ids):
    return _by_head(config, _run_forward(config, query, key, rhs, coefficient, segment_ids, residuals=False)["u"])


def _by_head(config, u):
    """To [B, L, H, K]."""
    return u.reshape(*u.shape[:2], -1, config.forward.head_dim)


def _run_forward(config, query, key, rhs, coefficient, segment_ids, residuals):
    s = config.forward
    ridge, beta = _ridge_or_beta(s, coefficient)
    segments = None
    if s.segmented:
        segments = (segment_ids[:, None], _column_ids(segment_ids)[:, None])
    return forward(s, query, key, rhs, ridge, beta, segments, residuals=residuals, interpret=config.interpret)


def _ridge_or_beta(s, coefficient):
    """(ridge, beta), one of them None; beta grouped by the heads of a program."""
    return (None, coefficient.reshape(-1, s.heads, s.length)) if s.strict else (coefficient, None)


def _across_lanes(ids):
    return jnp.broadcast_to(ids[:, :, None], (*ids.shape, LANES))


def _column_ids(ids):
    """Padding as a column differs from padding as a row, so equal means visible."""
    return jnp.where(ids == 0, -1, ids)


def _solve_forward(config, query, key, rhs, coefficient, segment_ids):
    saved = _run_forward(config, query, key, rhs, coefficient, segment_ids, residuals=True)
    return _by_head(config, saved["u"]), (query, key, rhs, coefficient, segment_ids, saved)


def _solve_backward(config, residuals, cotangent):
    query, key, rhs, coefficient, segment_ids, saved = residuals
    s = config.backward
    ridge, beta = _ridge_or_beta(s, coefficient)
    segments = None
    if s.segmented:
        segments = (segment_ids[:, None], _across_lanes(_column_ids(segment_ids)))
    gradients = backward(
        s,
        cotangent.reshape(query.shape),
        query,
        key,
        rhs,
        ridge,
        beta,
        segments,
        saved["u"],
        saved["lse"].reshape(-1, s.heads, s.length),
        saved["inverse"],
        saved.get("row_sum"),
        interpret=config.interpret,
    )
    if s.strict:
        d_coefficient = gradients["d_beta"].reshape(coefficient.shape)
    else:
        d_coefficient = gradients["d_ridge"].reshape(-1, s.head_dim).sum(1)
    return gradients["d_query"], gradients["d_key"], gradients["d_rhs"], d_coefficient, None


_solve.defvjp(_solve_forward, _solve_backward)
