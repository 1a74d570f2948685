"""The causal solve of Cubit and DeltaFormer as GPU kernels (Pallas, Triton backend; Hopper).

    D_i u_i + c_i sum_{visible j} P_ij u_j = rhs_i,    P = softmax_visible(scale * query key^T)

Cubit (arXiv 2605.06501, eq. 13): c = 1, j <= i, D = ridge, per head.
DeltaFormer (arXiv 2505.19488): c = beta, j < i, D = 1.

There is one forward kernel (kernel_solve_gpu_forward), with two matrix products per tile, as in flash attention, and a
pair of backward kernels (kernel_solve_gpu_backward), with seven. Atomic sums of one gradient would need five products,
but their order would differ from run to run. Row blocks of a head wait for each other (kernel_solve_gpu_wavefront).
This module has the public function, its limits and block sizes, the padding and the derivative rule.

Precision: softmax, sums, u and the log-sum-exp are float32. With float32 inputs products are three-term TF32, never
plain TF32, whatever the default precision is. With 16-bit inputs weights and solutions are multiplied in float16, and
a power of two per tile keeps them in its range: eight times as accurate as bfloat16 at the same speed. Diagonal blocks
are inverted in float32, and merged by three-term products.

jax 0.11 deprecates Pallas' Triton backend. The modules beside this one are all that would change.

Inside `jax.shard_map` pass check_vma=False: the kernels do not declare over which mesh axes their outputs vary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.kernel_solve_gpu_backward import backward
from pallas_kernels.kernel_solve_gpu_forward import forward
from pallas_kernels.kernel_solve_gpu_tiles import Settings
from pallas_kernels.kernel_solve_inputs import check, pad, pad_rows_of_heads, zero_padding

MAX_HEAD_DIM = {True: 256, False: 128}  # 16-bit inputs or float32, where 256 exceeds shared memory
ROWS = (16, 32, 64)  # rows per block; 128 with three-term merges exceeds an H100's shared memory


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of the three kernels.

    Attributes:
      rows: rows per block.
      forward_warps, adjoint_warps, query_warps: Triton's number of warps per program.
      stages: Triton's number of pipeline stages.
    """

    rows: int
    forward_warps: int
    adjoint_warps: int
    query_warps: int
    stages: int

    @classmethod
    def best(cls, length: int, head_dim: int, rows: int | None = None) -> "BlockSizes":
        """Sizes for an H100; head_dim is the padded one.

        Chosen from registers, spills and shared memory as the compiler reports them for sm_90a (experiments/README.md):
        the tile loops then spill nothing with 16-bit inputs up to K = 128. They have not been tuned on a GPU.
        """
        if rows is None:
            rows = min(64, max(16, 1 << (length - 1).bit_length()))
        wide = 4 if head_dim <= 128 else 8
        return cls(rows=rows, forward_warps=wide, adjoint_warps=4 if head_dim <= 64 else 8, query_warps=wide, stages=2)


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
    block_size: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Solves the causal system without storing its matrix; differentiable in every floating-point array.

    Args:
      query, key: [B, L, H, K] bfloat16 or float16 with K <= 256, or float32 with K <= 128.
      rhs: [B, L, H, K], any floating-point dtype but float64.
      ridge: [H], the diagonal D of the inclusive system (Cubit). Exactly one of ridge and beta is given.
      beta: [B, L, H], the row factors c of the strict system with unit diagonal (DeltaFormer).
      segment_ids: [B, L] integers; rows see columns of their own id only. In padding, id 0, u is 0, and
        whatever the arrays hold there has no effect.
      window: row i sees columns j with i - j < window.
      scale: factor of the scores, a Python number.
      block_size: number of rows per block, one of 16, 32, 64, or None for the best known.
      interpret: run in Pallas' interpreter (on a CPU).

    Returns:
      u [B, L, H, K] float32. A row that overflows, and rows that depend on it, are not finite; rows before it are what
      they would be without it. With 16-bit inputs a row overflows for the blocks after it beyond 4e28.

    Raises:
      NotImplementedError: float64 arguments, a head dimension or block_size that these kernels do not have.
      ValueError: a malformed input.
    """
    dtype = jnp.result_type(query, key)
    half = dtype != jnp.float32
    check("GPU", query, key, rhs, ridge, beta, MAX_HEAD_DIM[half])
    if block_size is not None and block_size not in ROWS:
        raise NotImplementedError(f"the GPU kernel has block sizes {ROWS}, not {block_size=}")
    _, length, _, head_dim = query.shape
    padded_dim = max(16, 1 << (head_dim - 1).bit_length())
    sizes = BlockSizes.best(length, padded_dim, block_size)
    settings = Settings(
        rows=sizes.rows,
        strict=beta is not None,
        scale=float(scale),
        window=window,
        segmented=segment_ids is not None,
        half=half,
        interpret=interpret,
    )
    real_ids = segment_ids
    query, key, rhs = zero_padding(real_ids, query, key, rhs)
    rows_missing = -length % sizes.rows
    query, key, rhs = (pad(x, rows_missing, padded_dim - head_dim) for x in (query, key, rhs))
    if beta is None:
        coefficient = ridge.astype(jnp.float32)
    else:
        coefficient = pad_rows_of_heads(*zero_padding(real_ids, beta), rows_missing)
    if segment_ids is None:
        segment_ids = jnp.zeros((1, 1), jnp.int32)
    else:
        segment_ids = jnp.pad(segment_ids.astype(jnp.int32), ((0, 0), (0, rows_missing)))
    u = _solve(settings, sizes, query.astype(dtype), key.astype(dtype), rhs, coefficient, segment_ids)
    return zero_padding(real_ids, u[:, :length, :, :head_dim])[0]


def _tile_range(settings, segment_ids, batch_size, length):
    """(first, last), both [B, L / rows] int32: the first block a block of rows sees, the last that sees it."""
    rows = settings.rows
    blocks = length // rows
    block = jnp.arange(blocks)
    first, last = jnp.zeros_like(block), jnp.full_like(block, blocks - 1)
    if settings.window is not None:
        first = jnp.maximum(block * rows - settings.window + 1, 0) // rows
        last = jnp.minimum((block * rows + rows - 1 + settings.window - 1) // rows, blocks - 1)
        # A window wider than one row reaches the block before; window 1 sees nothing outside its own block.
        first, last = jnp.minimum(first, block), jnp.maximum(last, block)
    first, last = (jnp.broadcast_to(x.astype(jnp.int32), (batch_size, blocks)) for x in (first, last))
    if settings.segmented:
        ids = segment_ids.reshape(batch_size, blocks, rows)
        low = jnp.min(jnp.where(ids != 0, ids, jnp.iinfo(jnp.int32).max), axis=2)
        high = jnp.max(jnp.where(ids != 0, ids, jnp.iinfo(jnp.int32).min), axis=2)
        meet = (low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None])
        meet = meet | (block[:, None] == block[None, :])
        first = jnp.maximum(first, jnp.argmax(meet, axis=2).astype(jnp.int32))
        last = jnp.minimum(last, (blocks - 1 - jnp.argmax(meet[:, ::-1, :], axis=1)).astype(jnp.int32))
    return first, last


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _solve(settings, sizes, query, key, rhs, coefficient, segment_ids):
    return _solve_forward(settings, sizes, query, key, rhs, coefficient, segment_ids)[0]


def _solve_forward(settings, sizes, query, key, rhs, coefficient, segment_ids):
    first, _ = _tile_range(settings, segment_ids, query.shape[0], query.shape[1])
    saved = forward(
        settings,
        query,
        key,
        rhs,
        coefficient,
        segment_ids,
        first,
        warps=sizes.forward_warps,
        stages=sizes.stages,
    )
    return saved["u"], (query, key, rhs, coefficient, segment_ids, saved["u"], saved["lse"])


def _solve_backward(settings, sizes, residuals, cotangent):
    query, key, rhs, coefficient, segment_ids, u, lse = residuals
    first, last = _tile_range(settings, segment_ids, query.shape[0], query.shape[1])
    gradients = backward(
        settings,
        query,
        key,
        rhs,
        coefficient,
        segment_ids,
        first,
        last,
        u,
        lse,
        cotangent,
        adjoint_warps=sizes.adjoint_warps,
        query_warps=sizes.query_warps,
        stages=sizes.stages,
    )
    y = gradients["y"]
    d_coefficient = gradients["d_beta"] if settings.strict else -jnp.sum(y * u, axis=(0, 1, 3))
    return gradients["d_query"], gradients["d_key"], y.astype(rhs.dtype), d_coefficient, None


_solve.defvjp(_solve_forward, _solve_backward)
