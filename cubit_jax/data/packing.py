"""Packing: windows of a token stream to rows of segments, each a document or a part of one.

A token stream is  E d1.. E d2.. E ...  (E: the end-of-text id; d: the tokens of a document). Rows are its windows of
seq_len + 1 tokens that overlap by one: the inputs are a window without its last token, the targets a window without its
first. A document of n tokens is therefore n + 1 predictions, each made exactly once: its tokens, the first from E, and
then E. A document that does not fit into a row goes on in the next row, as a new segment.
"""

from collections.abc import Sequence

import numpy as np

from cubit_jax.runtime.errors import UserError

Batch = dict[str, np.ndarray]


def pack(windows: np.ndarray, end_id: int, real: Sequence[int] | np.ndarray | None = None) -> Batch:
    """Batch of rows from windows of a token stream.

    Args:
      windows: [rows, seq_len + 1] int.
      end_id: the end-of-text id. It begins every document and does not occur inside one.
      real: [rows] int, the number of real targets per row; the others are padding. None: no padding.

    Returns:
      dict of [rows, seq_len] arrays: tokens, targets: int32, 0 in padding; weights: float32, 1 on real targets, 0 in
      padding; segment_ids: int32, from 1 in every row, 0 in padding; positions: int32, from 0 in every segment.
    """
    tokens, targets = windows[:, :-1].astype(np.int32), windows[:, 1:].astype(np.int32)
    starts = tokens == end_id
    starts[:, 0] = True
    column = np.arange(tokens.shape[1], dtype=np.int32)
    segment_ids = np.cumsum(starts, axis=1, dtype=np.int32)
    positions = column - np.maximum.accumulate(np.where(starts, column, 0), axis=1)
    mask = np.ones_like(starts) if real is None else column < np.asarray(real)[:, None]
    batch = {"tokens": tokens, "targets": targets, "segment_ids": segment_ids, "positions": positions}
    return {name: np.where(mask, array, 0) for name, array in batch.items()} | {"weights": mask.astype(np.float32)}


def local_rows(batch_size: int, process_index: int, process_count: int) -> range:
    """The rows of a global batch that belong to a process. UserError if the processes cannot have equal parts."""
    if batch_size % process_count:
        raise UserError(f"batch size {batch_size} is not a multiple of the number of processes, {process_count}")
    local = batch_size // process_count
    return range(process_index * local, (process_index + 1) * local)
