"""The triangular system of Cubit and DeltaFormer as a pair of TPU kernels.

    D_i u_i + c_i sum_{visible j} P_ij u_j = rhs_i,   P = softmax_visible(scale * query key^T)

Cubit (arXiv 2605.06501, eq. 13): c = 1, the diagonal is visible, D = ridge. DeltaFormer (arXiv 2505.19488): c = beta,
strictly lower triangular, D = 1. The forward kernel makes two matrix products a tile, the backward kernel five, as
flash attention does; memory is linear in the length.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.blocks_tpu import LANES, Settings
from pallas_kernels.kernel_solve_tpu_backward import backward, backward_bytes
from pallas_kernels.kernel_solve_tpu_forward import forward, forward_bytes

HEAD_DIMS = (64, 128, 256)
MIB = 2**20
# Bytes a core, by device kind.
VECTOR_MEMORY = {
    "TPU v5 lite": 128 * MIB,
    "TPU v5": 64 * MIB,
    "TPU v6 lite": 128 * MIB,
    "TPU7x": 64 * MIB,
}


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Tiles of the two kernels.

    rows: rows that are solved at once, a multiple of 128. columns: width of a tile, a multiple of rows. heads: heads a
    program handles side by side, which hides the latency of the solve; it must divide the number of heads.
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
    def best(cls, device_kind, length, num_heads, head_dim, precise, rows=None):
        """Sizes for a device kind as JAX names it; one that is not known gets those for the smallest vector memory.

        Raises NotImplementedError where what has to stay in vector memory does not fit.
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

        def fitting(need, tiles, most, share):
            """The tile and the number of heads with most rows at once that leave enough; else the least, if it fits."""
            heads = [n for n in _allowed_heads(num_heads, head_dim) if n <= most]
            fits = {(*tile, n): need(length, *tile, n, head_dim, precise) for tile in tiles for n in heads}
            # The rest is what XLA may want for the arrays around it: with more than three eighths for the forward
            # kernel, four heads at L=8192 did not compile for v5p.
            enough = [sizes for sizes, size in fits.items() if size <= share * memory // 8]
            if enough:
                return max(enough, key=lambda sizes: (sizes[0] * sizes[2], sizes[2]))
            if fits and min(fits.values()) <= 7 * memory // 8:
                return min(fits, key=fits.get)
            raise NotImplementedError(
                f"the TPU kernel keeps u and its gradients in vector memory: {length=} with {num_heads=}, {head_dim=} "
                f"does not fit in {memory // MIB} MiB"
            )

        # Estimates (experiments/README.md): with little memory the forward kernel gains more from heads side by side.
        forward_tiles = (tall, wide) if large else (wide,)
        together = max(1, LANES // head_dim) * (2 if large else 1)
        return cls(
            *fitting(functools.partial(forward_bytes, residuals=False), forward_tiles, 2 if precise else 4, 3),
            *fitting(backward_bytes, (tall, wide), together, 4),
        )


def _allowed_heads(num_heads, head_dim):
    """How many heads a block may hold: a block is whole registers wide, or as wide as the array."""
    return [n for n in range(1, num_heads + 1) if num_heads % n == 0 and (n * head_dim % LANES == 0 or n == num_heads)]


@dataclasses.dataclass(frozen=True)
class _Config:
    forward: Settings
    backward: Settings
    interpret: object


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
    """Solves the triangular system of Cubit (ridge) or DeltaFormer (beta); differentiable in every array.

    Args:
      query, key, rhs: [B, L, H, K]. Both query and key bfloat16: products take bfloat16 operands and sum in float32.
        Otherwise everything is float32.
      ridge: [H]; Cubit, row i sees j <= i. Exactly one of ridge and beta is given.
      beta: [B, L, H]; DeltaFormer, row i sees j < i.
      segment_ids: [B, L] int; a row sees its own segment only, 0 is padding, which sees nothing.
      window: row i sees i - j < window.
      scale: static factor of the scores.
      block_size: BlockSizes, or rows a block (a multiple of 128), or None for the sizes of the device.
      interpret: run as Pallas' interpreter does: True or pltpu.InterpretParams.

    Returns:
      u [B, L, H, K] float32.

    Raises:
      NotImplementedError: the head dimension or the length is beyond what these kernels hold; the message says which.
      ValueError: a malformed input.
    """
    if (ridge is None) == (beta is None):
        raise ValueError("exactly one of ridge and beta must be given")
    if not query.shape == key.shape == rhs.shape or query.ndim != 4:
        raise ValueError(f"{query.shape=}, {key.shape=} and {rhs.shape=} must be one [B, L, H, K]")
    batch, length, num_heads, head_dim = query.shape
    if 0 in query.shape:
        raise NotImplementedError(f"the TPU kernel needs elements, got {query.shape}")
    if head_dim > HEAD_DIMS[-1]:
        raise NotImplementedError(f"the TPU kernel takes head dimensions up to {HEAD_DIMS[-1]}, not {head_dim}")
    if any(x.dtype == jnp.float64 for x in (query, key, rhs)):
        raise NotImplementedError("the TPU kernel computes in float32, not float64")
    precise = not query.dtype == key.dtype == jnp.bfloat16
    if precise:
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    if rhs.dtype != jnp.bfloat16:
        rhs = rhs.astype(jnp.float32)
    sizes, padded_dim = _sizes(block_size, length, num_heads, head_dim, precise)
    unit = math.lcm(sizes.rows, sizes.backward_rows)
    padded_length = -(-length // unit) * unit

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
            segments=segment_ids is not None,
            precise=precise,
        )

    config = _Config(
        settings(sizes.rows, sizes.columns, sizes.heads),
        settings(sizes.backward_rows, sizes.backward_columns, sizes.backward_heads),
        interpret,
    )
    rows_missing = padded_length - length

    def flat(x):
        x = jnp.pad(x, ((0, 0), (0, rows_missing), (0, 0), (0, padded_dim - head_dim)))
        return x.reshape(batch, padded_length, num_heads * padded_dim)

    if beta is None:
        diagonal = jnp.broadcast_to(ridge.astype(jnp.float32), (batch, num_heads)).reshape(-1)
    else:
        diagonal = jnp.pad(beta.astype(jnp.float32).swapaxes(1, 2), ((0, 0), (0, 0), (0, rows_missing)))
    if segment_ids is not None:
        # The rows that are added see each other, so that their system is never singular.
        segment_ids = jnp.pad(segment_ids.astype(jnp.int32), ((0, 0), (0, rows_missing)), constant_values=2**30)
    u = _solve(config, flat(query), flat(key), flat(rhs), diagonal, segment_ids)
    return u[:, :length, :, :head_dim]


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
def _solve(config, query, key, rhs, diagonal, segment_ids):
    (u,) = _run_forward(config, query, key, rhs, diagonal, segment_ids, residuals=False)
    return _by_head(config, u)


def _by_head(config, u):
    """To [B, L, H, K]."""
    return u.reshape(*u.shape[:2], -1, config.forward.head_dim)


def _run_forward(config, query, key, rhs, diagonal, segment_ids, residuals):
    s = config.forward
    ridge, beta = _diagonal(s, diagonal)
    segments = None
    if s.segments:
        segments = (segment_ids[:, None], _column_ids(segment_ids)[:, None])
    return forward(s, query, key, rhs, ridge, beta, segments, residuals=residuals, interpret=config.interpret)


def _diagonal(s, diagonal):
    """(ridge, beta), one of them None; beta grouped by the heads of a program."""
    return (None, diagonal.reshape(-1, s.heads, s.length)) if s.strict else (diagonal, None)


def _across_lanes(ids):
    return jnp.broadcast_to(ids[:, :, None], (*ids.shape, LANES))


def _column_ids(ids):
    """Padding as a column differs from padding as a row, so equal means visible."""
    return jnp.where(ids == 0, -1, ids)


def _solve_forward(config, query, key, rhs, diagonal, segment_ids):
    u, lse, inverse, *row_sum = _run_forward(config, query, key, rhs, diagonal, segment_ids, residuals=True)
    return _by_head(config, u), (query, key, rhs, diagonal, segment_ids, u, lse, inverse, *row_sum)


def _solve_backward(config, saved, cotangent):
    query, key, rhs, diagonal, segment_ids, u, lse, inverse, *row_sum = saved
    s = config.backward
    ridge, beta = _diagonal(s, diagonal)
    segments = None
    if s.segments:
        segments = (segment_ids[:, None], _across_lanes(_column_ids(segment_ids)))
    d_query, d_key, d_rhs, d_diagonal = backward(
        s,
        cotangent.reshape(query.shape),
        query,
        key,
        rhs,
        ridge,
        beta,
        segments,
        u,
        lse.reshape(-1, s.heads, s.length),
        inverse,
        row_sum[0] if s.strict else None,
        interpret=config.interpret,
    )
    d_diagonal = d_diagonal.reshape(diagonal.shape) if s.strict else d_diagonal.reshape(-1, s.head_dim).sum(1)
    return d_query, d_key, d_rhs, d_diagonal, None


_solve.defvjp(_solve_forward, _solve_backward)
