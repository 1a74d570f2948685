"""Which columns a row sees, and the softmax over them.

The one definition that dense, blockwise and decoding code share.
"""

import jax
import jax.numpy as jnp


def visible(
    row: jax.Array,
    column: jax.Array,
    row_segments: jax.Array | None = None,
    column_segments: jax.Array | None = None,
    *,
    window: int | None = None,
    strict: bool = False,
) -> jax.Array:
    """Whether row i sees column j: causal, inside the sliding window, in the same segment, never padding.

    Args:
      row: [..., R] int, sequence index of each row (not the position within a document, which restarts).
      column: [..., C] int, sequence index of each column.
      row_segments, column_segments: [..., R] and [..., C] int, or both None. Segment 0 is padding: it sees nothing and
        nothing sees it.
      window: a row sees itself and the window - 1 columns before it; None is no limit.
      strict: leave out the row's own column.

    Returns:
      [..., R, C] bool.
    """
    row, column = row[..., :, None], column[..., None, :]
    mask = column < row if strict else column <= row
    if window is not None:
        mask = mask & (row - column < window)
    if row_segments is not None:
        row_segments, column_segments = row_segments[..., :, None], column_segments[..., None, :]
        mask = mask & (row_segments == column_segments) & (column_segments != 0)
    return mask


def zero_padding(segment_ids: jax.Array | None, *arrays: jax.Array | None) -> list[jax.Array | None]:
    """The arrays [B, L, ...] with 0 in rows of segment 0, whatever stands there, and no gradient to them.

    A row of weights is 0 at padding, but 0 times NaN is NaN: padding has to be finite before it is multiplied.
    """
    if segment_ids is None:
        return list(arrays)
    real = segment_ids != 0
    return [None if x is None else jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, 0) for x in arrays]


def masked_softmax(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax over the last axis where mask is True; a row without a True is 0, and safe to differentiate.

    Args:
      scores: [..., R, C] floating.
      mask: bool, broadcastable to the shape of scores.
    """
    lowest = jnp.finfo(scores.dtype).min
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, where=mask, initial=lowest))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)


def masked_logsumexp(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """log sum exp over the last axis where mask; 0, and safe to differentiate, where a row has no True."""
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, where=mask, initial=jnp.finfo(scores.dtype).min))
    shifted = jnp.where(mask, scores - top[..., None], 0)
    total = jnp.sum(jnp.where(mask, jnp.exp(shifted), 0), axis=-1)
    sees = jnp.any(mask, axis=-1)
    return jnp.where(sees, jnp.where(sees, top, 0) + jnp.log(jnp.where(sees, total, 1)), 0)
