"""Batches of a token stream that is one array: the held-out pass, and training on prepared data."""

import json
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from cubit_jax.data.packing import Batch, local_rows, pack
from cubit_jax.data.read_ahead import check_state


def stream_rows(stream: np.ndarray, indices: Sequence[int], seq_len: int, end_id: int) -> Batch:
    """`pack` of the rows number `indices` of a token stream [n]. Rows beyond its end are padding."""
    start = np.asarray(indices, np.int64) * seq_len
    place = start[:, None] + np.arange(seq_len + 1)
    return pack(stream[np.minimum(place, len(stream) - 1)], end_id, real=np.clip(len(stream) - 1 - start, 0, seq_len))


def count_rows(stream: np.ndarray, seq_len: int) -> int:
    """Rows of a token stream [n]. The last one may be shorter than seq_len."""
    return -(-(len(stream) - 1) // seq_len)


class HeldoutBatches:
    """Every target of a token stream exactly once, in order; can be iterated over repeatedly.

    The last batch is filled with rows of padding. Each process gets its rows of every batch, so that all processes get
    the same number of batches.

    Attributes:
      stream: [n] int, the token stream.
      num_targets: n - 1.
    """

    def __init__(
        self,
        stream: np.ndarray,
        end_id: int,
        *,
        seq_len: int,
        batch_size: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        self.stream = stream
        self.num_targets = len(stream) - 1
        self._end_id, self._seq_len, self._batch_size = end_id, seq_len, batch_size
        self._local = local_rows(batch_size, process_index, process_count)

    def __len__(self) -> int:
        return -(-count_rows(self.stream, self._seq_len) // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for index in range(len(self)):
            rows = [index * self._batch_size + row for row in self._local]
            yield stream_rows(self.stream, rows, self._seq_len, self._end_id)


class PreparedBatches:
    """Endless training batches from a token stream [n]: its rows, reshuffled each epoch.

    Each process reads its own rows only. The position is the number of rows used so far by all processes together, so
    a run may go on with another number of processes or another batch size.
    """

    def __init__(
        self,
        stream: np.ndarray,
        end_id: int,
        *,
        seq_len: int,
        batch_size: int,
        seed: int,
        process_index: int,
        process_count: int,
    ):
        self._local = local_rows(batch_size, process_index, process_count)
        self._stream, self._end_id, self._seq_len, self._batch_size = stream, end_id, seq_len, batch_size
        rows = count_rows(stream, seq_len)
        self._identity = {"kind": "prepared", "rows": rows, "seq_len": seq_len, "seed": seed}
        self._order = grain.MapDataset.range(rows).seed(seed).shuffle().repeat()
        self._row = 0

    def __iter__(self):
        return self

    def __next__(self) -> Batch:
        rows = [self._order[self._row + row] for row in self._local]
        self._row += self._batch_size
        return stream_rows(self._stream, rows, self._seq_len, self._end_id)

    def get_state(self) -> bytes:
        return json.dumps(self._identity | {"row": self._row}).encode()

    def set_state(self, state: bytes) -> None:
        self._row = check_state(state, self._identity)["row"]

    def close(self) -> None:
        """Nothing to end: no worker reads the stream."""
