"""Which columns a row sees: the one definition that dense, blockwise and decoding code share."""

import jax.numpy as jnp
import numpy as np


def visible(row, column, row_segments=None, column_segments=None, *, window=None, strict=False):
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


def check_masks(shape, segment_ids, window):
    """Raises ValueError unless segment_ids fit arrays of shape [B, L, ...] and window is None or at least 1."""
    if segment_ids is not None and np.shape(segment_ids) != shape[:2]:
        raise ValueError(f"segment_ids.shape={np.shape(segment_ids)} must be [B, L] = {shape[:2]}")
    if segment_ids is not None and not jnp.issubdtype(jnp.result_type(segment_ids), jnp.integer):
        raise ValueError(f"segment_ids.dtype={jnp.result_type(segment_ids)} must be an integer type")
    if window is None:
        return
    if isinstance(window, bool) or not isinstance(window, int | np.integer) or window < 1:
        raise ValueError(f"{window=} must be a positive integer")
