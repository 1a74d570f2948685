"""The triangular system of Cubit and DeltaFormer: D u_i + c_i * sum over visible j of P_ij u_j = rhs_i."""

import jax
import jax.numpy as jnp

from cubit_jax.ops import dispatch, masks
from cubit_jax.ops.attention import dense_weights
from cubit_jax.ops.blockwise import tiles
from cubit_jax.ops.blockwise.kernel_solve import kernel_solve_xla
from cubit_jax.ops.checks import check_block_size, check_rows, check_scale, check_system
from cubit_jax.ops.context_parallel import solve as context
from cubit_jax.ops.context_parallel.layout import Layout
from cubit_jax.ops.overflow import spare_other_rows


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
    implementation: str | None = None,
    layout: Layout | None = None,
) -> jax.Array:
    """Solves the system whose weights P are a row softmax of the visible scores scale * query_i . key_j.

    With ridge (Cubit, arXiv 2605.06501, eq. 13): (P + ridge I) u = rhs, row i sees itself.
    With beta (DeltaFormer, arXiv 2505.19488): (I + diag(beta) P) u = rhs, row i sees only the rows before it.
    A row that sees nothing has P = 0: its u is rhs / ridge (0 if the ridge is 0), or rhs in the beta form. What stands
    in padding, even NaN, reaches no other row. A row that overflows reaches the rows that see it and no other; with a
    layout no row before it, but it may reach later documents.

    Args:
      query, key: [B, L, H, K]; Cubit's r and rn, DeltaFormer's w and k.
      rhs: [B, L, H, V].
      ridge: [H], finite and at least 0. Exactly one of ridge and beta is given. A traced ridge has no value to check:
        below 0 the system may have no solution, and what is returned then is not finite or means nothing.
      beta: [B, L, H].
      segment_ids: [B, L] int or None; 0 is padding.
      window: int or None: i sees j only if i - j < window.
      scale: number, of the scores.
      block_size: rows and columns of a tile; None lets the implementation choose. Only speed and memory depend on it.
      implementation: None, "reference", "xla" or "pallas"; what None takes on a GPU: `dispatch.UNPROVEN`.
      layout: None, or the ops.Layout by which devices share the rows: each then passes and gets its own rows.

    Returns:
      u, [B, L, H, V], float32 (float64 for float64 inputs) whatever the input dtype: it may be a thousand times rhs.

    Raises:
      ValueError: malformed input; a ridge out of its range where its value is known, that is outside jit.
      NotImplementedError: input the named implementation cannot do.
    """
    window = check_rows(query, key, rhs, segment_ids, window, layout)
    ridge, beta = check_system(query.shape, ridge, beta)
    check_block_size(block_size)
    scale = check_scale(scale)
    query, key, real_rhs, beta = masks.zero_padding(segment_ids, query, key, rhs, beta)
    implementations = IMPLEMENTATIONS if layout is None else context.implementations(context.kernel_solve, layout)
    u = dispatch.run(
        "kernel_solve",
        implementations,
        implementation,
        query,
        key,
        real_rhs,
        ridge=ridge,
        beta=beta,
        segment_ids=segment_ids,
        window=window,
        scale=scale,
        block_size=block_size,
    )
    if layout is None:
        start = jnp.zeros(query.shape[:1], jnp.int32)
        values = jnp.zeros_like(u)
        u = spare_other_rows(
            u, query, key, values, start, segment_ids, real_rhs, ridge, beta, window=window, scale=scale
        )
    return u if segment_ids is None else jnp.where((segment_ids != 0)[..., None, None], u, _of_padding(rhs, ridge, u))


def _of_padding(rhs, ridge, u):
    """The solution of a row that sees nothing, 0 where that is not finite: a gradient of 0 has to stay 0."""
    rhs = jnp.where(jnp.isfinite(rhs), rhs, 0).astype(u.dtype)
    if ridge is None:
        return rhs
    ridge = ridge.astype(u.dtype)[:, None]
    positive = ridge > 0
    fits = positive & (jnp.abs(rhs) < jnp.finfo(u.dtype).max * jnp.minimum(ridge, 1))
    return jnp.where(fits, jnp.where(fits, rhs, 0) / jnp.where(positive, ridge, 1), 0)


def _reference(query, key, rhs, *, ridge, beta, segment_ids, window, scale, block_size):
    del block_size
    strict = ridge is None
    weights = dense_weights(query, key, segment_ids=segment_ids, window=window, scale=scale, strict=strict)
    dtype = jnp.promote_types(weights.dtype, rhs.dtype)
    eye = jnp.eye(query.shape[1], dtype=dtype)
    if strict:
        system = eye + beta.astype(dtype).transpose(0, 2, 1)[..., None] * weights
    else:
        system = weights + ridge.astype(dtype)[:, None, None] * eye
        system = jnp.where((eye == 1) & (system == 0), jnp.inf, system)

    def solve(arrays):
        return jax.lax.linalg.triangular_solve(*arrays, left_side=True, lower=True, unit_diagonal=strict)

    # One after the other: on a CPU two batches of solves in one program (u and its gradient) can wait for each other
    # for ever, each holding threads that the other needs. Under jax.vmap they are batches again.
    u = jax.lax.map(lambda batch: jax.lax.map(solve, batch), (system, rhs.astype(dtype).transpose(0, 2, 1, 3)))
    return u.transpose(0, 2, 1, 3)


def _pallas(query, key, rhs, **kwargs):
    platform, interpret = dispatch.kernel_platform()
    if rhs.shape != query.shape:
        raise NotImplementedError(f"the kernels need {rhs.shape=} to equal {query.shape=}")
    if platform == "tpu":
        from pallas_kernels.kernel_solve_tpu import kernel_solve as kernel
    else:
        from pallas_kernels.kernel_solve_gpu import kernel_solve as kernel
    return kernel(query, key, rhs, interpret=interpret, **kwargs)


def system_diagonal(
    query: jax.Array,
    key: jax.Array,
    ridge: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    window: int | None = None,
    scale: float = 1.0,
    layout: Layout | None = None,
) -> jax.Array:
    """P_ii + ridge, the diagonal of Cubit's system, in memory linear in L: near 0 the solution explodes.

    Args: as for kernel_solve. No gradient flows through the result.

    Returns:
      [B, L, H], float32 (float64 for float64 inputs).
    """
    window = check_rows(query, key, key, segment_ids, window, layout)
    query, key = masks.zero_padding(segment_ids, query, key)
    query, key, ridge = jax.lax.stop_gradient((query, key, ridge))
    if layout is None:
        lse = _log_sum_exp(query, key, segment_ids=segment_ids, window=window, scale=float(scale))
    else:
        lse = context.log_sum_exp(query, key, segment_ids=segment_ids, window=window, scale=float(scale), layout=layout)
    scores = float(scale) * jnp.sum(query.astype(lse.dtype) * key.astype(lse.dtype), axis=-1)
    real = True if segment_ids is None else (segment_ids != 0)[..., None]
    return jnp.where(real, jnp.exp(scores - lse), 0) + ridge.astype(lse.dtype)


def _log_sum_exp(query, key, *, segment_ids, window, scale):
    """Of each row's visible scores, [B, L, H]; finite where nothing is visible."""
    tiling = tiles.Tiling(query.shape[1], tiles.choose_block(query.shape[1]), window)
    q, k, segments = jax.tree.map(tiling.split, (query, key, segment_ids))
    nothing = jnp.zeros_like(k, shape=(*k.shape[:-1], 1))

    def row_block(_, x):
        i, q_i = x
        state = tiles.start(q_i, 1, tiles.compute_dtype(query, key))
        return None, tiles.forward_row(tiling, scale, i, q_i, k, nothing, segments, state)[2]

    return tiling.merge(jax.lax.scan(row_block, None, (jnp.arange(tiling.num_blocks), q))[1])


IMPLEMENTATIONS = {"reference": _reference, "xla": kernel_solve_xla, "pallas": _pallas}
