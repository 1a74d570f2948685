"""Softmax attention: Nadaraya-Watson regression of the values on the keys."""

import jax
import jax.numpy as jnp
import numpy as np

from cubit_jax.ops import dispatch, masks


def attention(q, k, v, *, segment_ids=None, window=None, scale=None, implementation=None):
    """o_i = sum_j A_ij v_j with A = softmax over visible j of scale * q_i . k_j; causal.

    A row that sees nothing (padding) gives 0.

    Args:
      q, k: [B, L, H, K].
      v: [B, L, H, V]; may be float32 beside 16-bit q and k.
      segment_ids: [B, L] int or None; 0 is padding.
      window: int or None: i sees j only if i - j < window.
      scale: of the scores; None is 1 / sqrt(K).
      implementation: None, "reference", "xla" or "pallas".

    Returns:
      [B, L, H, V] in the dtype of q; computed in float32 (float64 for float64 inputs).

    Raises:
      ValueError: malformed input. NotImplementedError: input the named implementation cannot do.
    """
    window = check(q, k, v, segment_ids, window)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return dispatch.run("attention", IMPLEMENTATIONS, implementation, q, k, v,
                        segment_ids=segment_ids, window=window, scale=scale)


def check(q, k, v, segment_ids, window):
    """Raises ValueError for malformed arguments that attention and kernel_solve share; returns the window as an int."""
    if q.ndim != 4 or k.shape != q.shape:
        raise ValueError(f"{k.shape=} must equal {q.shape=}, both [B, L, H, K]")
    if v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(f"{v.shape=} must be [B, L, H, V] beside {q.shape=}")
    for array in (q, k, v):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{array.dtype=} must be floating")
    if segment_ids is not None and segment_ids.shape != q.shape[:2]:
        raise ValueError(f"{segment_ids.shape=} must be [B, L] = {q.shape[:2]}")
    if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"{segment_ids.dtype=} must be an integer type")
    if window is None:
        return None
    if isinstance(window, bool) or int(window) != window or window < 1:
        raise ValueError(f"{window=} must be a positive integer")
    return int(window)


def dense_weights(q, k, *, segment_ids, window, scale, strict=False):
    """Row softmax of the visible scores, [B, H, L, L]; a row that sees nothing is 0 and safe to differentiate."""
    dtype = jnp.promote_types(jnp.promote_types(q.dtype, k.dtype), jnp.float32)
    scores = scale * jnp.einsum("bihk,bjhk->bhij", q.astype(dtype), k.astype(dtype), precision="highest")
    index = np.arange(q.shape[1])
    mask = jnp.asarray(masks.visible(index, index, segment_ids, segment_ids, window=window, strict=strict))
    mask = mask[..., None, :, :]
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, where=mask, initial=jnp.finfo(dtype).min))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)


def _reference(q, k, v, *, segment_ids, window, scale):
    weights = dense_weights(q, k, segment_ids=segment_ids, window=window, scale=scale)
    dtype = jnp.promote_types(weights.dtype, v.dtype)
    return jnp.einsum("bhij,bjhk->bihk", weights, v.astype(dtype), precision="highest").astype(q.dtype)


IMPLEMENTATIONS = {"reference": _reference, "xla": _reference}
