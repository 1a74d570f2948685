"""The triangular system of Cubit and DeltaFormer: D u_i + c_i * sum over visible j of P_ij u_j = rhs_i."""

import jax
import jax.numpy as jnp

from cubit_jax.ops import dispatch
from cubit_jax.ops.attention import check, dense_weights


def kernel_solve(query, key, rhs, *, ridge=None, beta=None, segment_ids=None, window=None, scale=1.0, block_size=None,
                 implementation=None):
    """Solves the system whose weights P are a row softmax of the visible scores scale * query_i . key_j.

    With ridge (Cubit, arXiv 2605.06501, eq. 13): (P + ridge I) u = rhs, row i sees itself.
    With beta (DeltaFormer, arXiv 2505.19488): (I + diag(beta) P) u = rhs, row i sees only the rows before it.
    A row that sees nothing has P = 0: its u is rhs / ridge (0 if the ridge is 0), or rhs in the beta form.

    Args:
      query, key: [B, L, H, K]; Cubit's r and rn, DeltaFormer's w and k.
      rhs: [B, L, H, V].
      ridge: [H], at least 0. Exactly one of ridge and beta is given.
      beta: [B, L, H].
      segment_ids: [B, L] int or None; 0 is padding.
      window: int or None: i sees j only if i - j < window.
      scale: number, of the scores.
      block_size: rows and columns of a tile; None lets the implementation choose. Only speed and memory depend on it.
      implementation: None, "reference", "xla" or "pallas".

    Returns:
      u, [B, L, H, V], float32 (float64 for float64 inputs) whatever the input dtype: it may be a thousand times rhs.

    Raises:
      ValueError: malformed input. NotImplementedError: input the named implementation cannot do.
    """
    window = check(query, key, rhs, segment_ids, window)
    batch, length, num_heads, _ = query.shape
    if (ridge is None) == (beta is None):
        raise ValueError(f"exactly one of ridge and beta must be given, got {ridge=} and {beta=}")
    if ridge is not None and ridge.shape != (num_heads,):
        raise ValueError(f"{ridge.shape=} must be [H] with {num_heads=}")
    if beta is not None and beta.shape != (batch, length, num_heads):
        raise ValueError(f"{beta.shape=} must be [B, L, H] = {(batch, length, num_heads)}")
    if block_size is not None and (int(block_size) != block_size or block_size < 1):
        raise ValueError(f"{block_size=} must be a positive integer")
    return dispatch.run("kernel_solve", IMPLEMENTATIONS, implementation, query, key, rhs, ridge=ridge, beta=beta,
                        segment_ids=segment_ids, window=window, scale=float(scale), block_size=block_size)


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
    u = jax.lax.linalg.triangular_solve(
        system, rhs.astype(dtype).transpose(0, 2, 1, 3), left_side=True, lower=True, unit_diagonal=strict)
    return u.transpose(0, 2, 1, 3)


IMPLEMENTATIONS = {"reference": _reference, "xla": _reference}
