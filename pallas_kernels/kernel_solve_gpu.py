"""The causal solve of Cubit and DeltaFormer as GPU kernels (Pallas, Triton backend; Hopper).

    D_i u_i + c_i sum_{visible j} P_ij u_j = rhs_i,    P = softmax_visible(scale * query key^T)

Cubit (arXiv 2605.06501, eq. 13): c = 1, j <= i, D = ridge a head.
DeltaFormer (arXiv 2505.19488): c = beta, j < i, D = 1.

Forward: one kernel that makes flash attention's two products a tile. A program owns a block of C rows, streams the
tiles to its left with an online softmax, then solves its C x C diagonal block. It needs the solutions of the blocks
above, so the blocks of a head form a wavefront: programs take tickets in row order, and a counter a head says how
many blocks are done. Scores need no solution; those of the last tile and the inverse of the diagonal block are made
before the program waits, and only two products and the publication stay on the chain from block to block. Backward:
the same wavefront from the last block, then a pass over row blocks in parallel; seven products a tile and sums in a
fixed order, where atomic sums of one gradient would need five (kernel_solve_gpu_backward).

Precision: softmax, sums, u and the log-sum-exp are float32. With float32 inputs products are three-term TF32, never
plain TF32 whatever the default precision is. With 16-bit inputs weights and solutions are multiplied in float16, a
power of two a tile keeping them in its range: eight times as accurate as bfloat16 at the same speed. Small diagonal
blocks are inverted by substitution in float32 and merged by three-term products.

jax 0.11 deprecates Pallas' Triton backend. `forward` and `backward` of the two modules beside this one are all that
would change; this module's padding, limits and derivative rule stay.

Inside `jax.shard_map` pass check_vma=False: the kernels do not declare over which mesh axes their outputs vary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import kernel_solve_gpu_backward, kernel_solve_gpu_forward
from pallas_kernels.kernel_solve_gpu_tiles import Settings

MAX_HEAD_DIM = {True: 256, False: 128}  # 16-bit inputs or float32, where 256 exceeds shared memory
ROWS = (16, 32, 64)  # rows a block; 128 with three-term merges exceeds an H100's shared memory


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """rows: C. The rest are Triton's warps a program and pipeline stages, of the three kernels."""

    rows: int
    forward_warps: int
    adjoint_warps: int
    query_warps: int
    stages: int

    @classmethod
    def choose(cls, length, head_dim, rows=None):
        """Sizes for an H100; head_dim is the padded one.

        Chosen from registers, spills and shared memory as the compiler reports them for sm_90a (experiments/README.md):
        the tile loops then spill nothing with 16-bit inputs up to K = 128. They have not been tuned on a GPU.
        """
        if rows is None:
            rows = min(64, max(16, 1 << (length - 1).bit_length()))
        wide = 4 if head_dim <= 128 else 8
        return cls(rows=rows, forward_warps=wide, adjoint_warps=4 if head_dim <= 64 else 8, query_warps=wide, stages=2)


def kernel_solve(
    query,
    key,
    rhs,
    *,
    ridge=None,
    beta=None,
    segment_ids=None,
    window=None,
    scale=1.0,
    block_size=None,
    interpret=False,
):
    """Solves the causal system without storing its matrix; differentiable in every floating-point argument.

    Args:
      query, key: [B, L, H, K] bfloat16 or float16 with K <= 256, or float32 with K <= 128.
      rhs: [B, L, H, K], any floating-point dtype but float64.
      ridge: [H], the diagonal D of the inclusive system (Cubit). Exactly one of ridge and beta is given. A row that
        sees nothing has u = rhs / ridge, or 0 where the ridge is 0.
      beta: [B, L, H], the row factors c of the strict system with unit diagonal (DeltaFormer).
      segment_ids: [B, L] integers; rows see columns of their own id only, and nobody sees id 0.
      window: rows see columns j with i - j < window.
      scale: factor of the scores, a Python number.
      block_size: rows a block, one of 16, 32, 64; None chooses.
      interpret: run in Pallas' interpreter (on a CPU).

    Returns:
      u [B, L, H, K] float32.

    Raises:
      NotImplementedError: float64 arguments, a larger K or a block_size that these kernels do not have.
    """
    if (ridge is None) == (beta is None):
        raise ValueError("exactly one of ridge and beta must be given")
    for name, x in (("query", query), ("key", key), ("rhs", rhs), ("ridge", ridge), ("beta", beta)):
        if x is not None and x.dtype == jnp.float64:
            raise NotImplementedError(f"the GPU kernel computes in float32, and {name}.dtype is float64")
    _, length, _, head_dim = query.shape
    if block_size is not None and block_size not in ROWS:
        raise NotImplementedError(f"the GPU kernel has block sizes {ROWS}, not {block_size=}")
    dtype = jnp.result_type(query, key)
    half = dtype != jnp.float32
    if head_dim > MAX_HEAD_DIM[half]:
        raise NotImplementedError(
            f"the GPU kernel needs head_dim <= {MAX_HEAD_DIM[half]} for {dtype.name} inputs, not {head_dim=}"
        )
    padded_dim = max(16, 1 << (head_dim - 1).bit_length())
    sizes = BlockSizes.choose(length, padded_dim, block_size)
    settings = Settings(
        strict=beta is not None,
        segmented=segment_ids is not None,
        window=window,
        scale=float(scale),
        rows=sizes.rows,
        half=half,
        interpret=interpret,
    )

    # Zeros beyond the last row change nothing above it (causality); zeros beyond the last feature change no product.
    rows_pad, dim_pad = -length % sizes.rows, padded_dim - head_dim
    if rows_pad or dim_pad:
        pad = ((0, 0), (0, rows_pad), (0, 0), (0, dim_pad))
        query, key, rhs = (jnp.pad(x, pad) for x in (query, key, rhs))
    if beta is None:
        coefficient = ridge.astype(jnp.float32)
    else:
        coefficient = jnp.pad(jnp.swapaxes(beta.astype(jnp.float32), 1, 2), ((0, 0), (0, 0), (0, rows_pad)))
    if segment_ids is None:
        segment_ids = jnp.zeros((1, 1), jnp.int32)
    else:
        segment_ids = jnp.pad(segment_ids.astype(jnp.int32), ((0, 0), (0, rows_pad)))
    u = _solve(query.astype(dtype), key.astype(dtype), rhs, coefficient, segment_ids, settings, sizes)
    return u[:, :length, :, :head_dim]


def _tile_range(segment_ids, batch_size, length, settings):
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _solve(query, key, rhs, coefficient, segment_ids, settings, sizes):
    return _solve_forward(query, key, rhs, coefficient, segment_ids, settings, sizes)[0]


def _solve_forward(query, key, rhs, coefficient, segment_ids, settings, sizes):
    first, _ = _tile_range(segment_ids, query.shape[0], query.shape[1], settings)
    u, lse = kernel_solve_gpu_forward.forward(
        query,
        key,
        rhs,
        coefficient,
        segment_ids,
        first,
        settings=settings,
        warps=sizes.forward_warps,
        stages=sizes.stages,
    )
    return u, (query, key, rhs, coefficient, segment_ids, u, lse)


def _solve_backward(settings, sizes, residuals, grad):
    query, key, rhs, coefficient, segment_ids, u, lse = residuals
    first, last = _tile_range(segment_ids, query.shape[0], query.shape[1], settings)
    dquery, dkey, y, dcoefficient = kernel_solve_gpu_backward.backward(
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
        settings=settings,
        adjoint_warps=sizes.adjoint_warps,
        query_warps=sizes.query_warps,
        stages=sizes.stages,
    )
    if not settings.strict:
        dcoefficient = -jnp.sum(y * u, axis=(0, 1, 3))
    return dquery, dkey, y.astype(rhs.dtype), dcoefficient, None


_solve.defvjp(_solve_forward, _solve_backward)
