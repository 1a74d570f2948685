"""Token batches with an exact position: packing, the shuffled training streams, the held-out pass, read-ahead.

All of them cut one token stream  E d1.. E d2.. E ...  (E = end of text, d = a document's tokens) into windows of
seq_len + 1 that overlap by one token: inputs are a window without its last token, targets the same without its first.
A document of n tokens is therefore n + 1 predictions, each made exactly once: its tokens, the first from E, then E.
A document that does not fit in a row goes on in the next one, as a new segment whose positions restart at 0.
"""

import atexit
import collections
import json
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import threading
import weakref

import grain
import numpy as np
from absl import flags

from cubit_jax.runtime.errors import UserError


def pack(windows, end_id, real=None):
    """Batch of rows from windows of the token stream.

    Args:
      windows: [rows, seq_len + 1] int.
      end_id: the id that begins every document, and stands nowhere inside one.
      real: [rows] int, the number of targets that exist in each row; None is all. The others become padding.

    Returns:
      dict of [rows, seq_len] arrays: tokens, targets int32 (0 in padding); weights float32, 1 on real targets, 0 in
      padding; segment_ids int32 from 1 in every row, 0 in padding; positions int32, from 0 in every segment.
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


def stream_rows(stream, indices, seq_len, end_id):
    """`pack` of the rows number `indices` of a whole token stream [n]; rows beyond the end are padding."""
    start = np.asarray(indices, np.int64) * seq_len
    place = start[:, None] + np.arange(seq_len + 1)
    return pack(stream[np.minimum(place, len(stream) - 1)], end_id, real=np.clip(len(stream) - 1 - start, 0, seq_len))


def count_rows(stream, seq_len):
    """Rows of a token stream [n], the last one possibly not full."""
    return -(-(len(stream) - 1) // seq_len)


def local_rows(batch_size, process_index, process_count):
    """The rows of a global batch that a process holds, as a range; UserError if they cannot be equal parts."""
    if batch_size % process_count:
        raise UserError(f"batch size {batch_size} is not a multiple of the number of processes, {process_count}")
    local = batch_size // process_count
    return range(process_index * local, (process_index + 1) * local)


class HeldoutBatches:
    """Every target of a token stream exactly once, in order; iterate over it as often as wanted.

    The last batch is filled with rows of padding. All processes get equally many batches, each its own rows of them.
    """

    def __init__(self, stream, end_id, *, seq_len, batch_size, process_index=0, process_count=1):
        self.stream = stream  # [n] int: document after document, see the head of this file
        self.num_targets = len(stream) - 1
        self._end_id, self._seq_len, self._batch_size = end_id, seq_len, batch_size
        self._local = local_rows(batch_size, process_index, process_count)

    def __len__(self):
        return -(-count_rows(self.stream, self._seq_len) // self._batch_size)

    def __iter__(self):
        for index in range(len(self)):
            rows = [index * self._batch_size + row for row in self._local]
            yield stream_rows(self.stream, rows, self._seq_len, self._end_id)


class DocumentBatches:
    """Endless training batches from documents: shuffled anew each epoch, tokenized and packed on the fly.

    Consecutive rows are mostly parts of one long document, so windows of `shuffle_rows` rows are shuffled once more;
    a window never reaches into the next epoch.

    The rows depend on (documents, tokenizer, seed, seq_len, shuffle_rows) only. Every process reads the whole stream
    and keeps its rows of each batch, so the global batches, and the position, are those of a single process; what that
    costs is one tokenizer's work a process. The position is where the window begins (document, token), and how many
    of its rows are used.
    """

    def __init__(
        self,
        documents,
        tokenizer,
        *,
        seq_len,
        batch_size,
        seed,
        num_workers,
        process_index,
        process_count,
        shuffle_rows,
    ):
        self._local = local_rows(batch_size, process_index, process_count)
        self._batch_size, self._seq_len, self._end_id = batch_size, seq_len, tokenizer.end_id
        self._num_workers, self._seed, self._shuffle_rows = num_workers, seed, shuffle_rows
        self._num_documents = len(documents)
        self._identity = {
            "kind": "documents",
            "documents": len(documents),
            "seed": seed,
            "seq_len": seq_len,
            "shuffle_rows": shuffle_rows,
        }
        order = grain.MapDataset.source(documents).seed(seed).shuffle().repeat()
        self._encoded = order.map(_Encode(tokenizer))
        self._seek(0, 0, 0)

    def _seek(self, document, token, row):
        self._start = document, token  # of the window
        self._used = row  # rows of the window that were handed out
        self._window = None
        self._document, self._token = document, token  # of the next row that is read
        self._parts = collections.deque()  # tokens of document, document + 1, ...
        self._source = None

    def _read(self):
        """Tokens of the next document. The workers start when the first one is wanted, at the right document."""
        if self._source is None:
            self._source = _iterate(self._encoded[self._document :], self._num_workers)
        return np.frombuffer(next(self._source), np.int32)

    def _read_row(self):
        """The next seq_len + 1 tokens; the row after it begins with the last of them."""
        row = np.empty(self._seq_len + 1, np.int32)
        filled, offset, index = 0, self._token, 0
        while filled < len(row):
            if index == len(self._parts):
                self._parts.append(self._read())
            piece = self._parts[index][offset : offset + len(row) - filled]
            row[filled : filled + len(piece)] = piece
            filled, offset, index = filled + len(piece), 0, index + 1
        self._token += self._seq_len
        while self._token >= len(self._parts[0]):  # never empties: the stream goes on with the last token of `row`
            self._token -= len(self._parts.popleft())
            self._document += 1
        return row

    def _read_window(self):
        self._start = self._document, self._token
        epoch = self._document // self._num_documents
        rows = []
        while len(rows) < self._shuffle_rows and self._document // self._num_documents == epoch:
            rows.append(self._read_row())
        order = np.random.default_rng([self._seed, *self._start]).permutation(len(rows))
        self._window = np.stack(rows)[order]

    def __iter__(self):
        return self

    def __next__(self):
        rows = []
        while len(rows) < self._batch_size:
            if self._window is None:
                self._read_window()
            taken = self._window[self._used : self._used + self._batch_size - len(rows)]
            rows.extend(taken)
            self._used += len(taken)
            if self._used == len(self._window):
                self._window, self._used, self._start = None, 0, (self._document, self._token)
        return pack(np.stack(rows)[self._local], self._end_id)

    def get_state(self):
        document, token = self._start
        return json.dumps(self._identity | {"document": document, "token": token, "row": self._used}).encode()

    def set_state(self, state):
        state = _check_state(state, self._identity)
        self.close()
        self._seek(state["document"], state["token"], state["row"])

    def close(self):
        """Ends the worker processes and threads."""
        if self._source is not None:
            self._source.close()
            self._source = None


class PreparedBatches:
    """Endless training batches from a prepared token stream: its rows, shuffled anew each epoch.

    Each process reads its own rows only. The position is the number of rows used so far by all processes together, so
    a run may go on with another number of processes, or another batch size.
    """

    def __init__(self, stream, end_id, *, seq_len, batch_size, seed, process_index, process_count):
        self._local = local_rows(batch_size, process_index, process_count)
        self._stream, self._end_id, self._seq_len, self._batch_size = stream, end_id, seq_len, batch_size
        rows = count_rows(stream, seq_len)
        self._identity = {"kind": "prepared", "rows": rows, "seq_len": seq_len, "seed": seed}
        self._order = grain.MapDataset.range(rows).seed(seed).shuffle().repeat()
        self._row = 0

    def __iter__(self):
        return self

    def __next__(self):
        rows = [self._order[self._row + row] for row in self._local]
        self._row += self._batch_size
        return stream_rows(self._stream, rows, self._seq_len, self._end_id)

    def get_state(self):
        return json.dumps(self._identity | {"row": self._row}).encode()

    def set_state(self, state):
        self._row = _check_state(state, self._identity)["row"]

    def close(self):
        pass


class Prefetch:
    """Reads ahead in a thread. The position is always that of the batch handed out last, not of one read ahead.

    `get_state() -> bytes` and `set_state(bytes)` work with grain.checkpoint.CheckpointSave and CheckpointRestore; the
    state is JSON, and equal on all processes.
    """

    def __init__(self, batches, size=2):
        self._batches, self._size, self._reader = batches, size, None
        self._state = batches.get_state()
        _open_prefetches.add(self)

    def __iter__(self):
        return self

    def __next__(self):
        self.start_prefetch()
        batch, state, error = self._reader.queue.get()
        if error is not None:
            self.close()
            raise error
        self._state = state
        return batch

    def get_state(self):
        return self._state

    def set_state(self, state):
        self.close()
        self._batches.set_state(state)
        self._state = self._batches.get_state()

    @property
    def epoch(self):
        """How often the corpus has been read so far, a float."""
        state = json.loads(self._state)
        done, size = ("document", "documents") if state["kind"] == "documents" else ("row", "rows")
        return state[done] / state[size]

    def start_prefetch(self):
        """Begins to read ahead; CheckpointRestore calls this."""
        if self._reader is None:
            self._batches.set_state(self._state)
            self._reader = _Reader(self._batches, self._size)

    def close(self):
        """Stops reading ahead and ends the workers; the next `next` goes on after the batch handed out last."""
        if self._reader is not None:
            self._reader.stop()
            self._reader = None
        self._batches.close()

    def __del__(self):
        self.close()


class _Reader:
    """The thread of a Prefetch; it holds no reference to it, so that a forgotten Prefetch is collected."""

    def __init__(self, batches, size):
        self.queue = queue.Queue(size)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(batches,), name="read ahead", daemon=True)
        self._thread.start()

    def _run(self, batches):
        error = None
        while error is None and not self._stopping.is_set():
            try:
                item = next(batches), batches.get_state(), None
            except BaseException as caught:  # handed to the consumer, who raises it
                error = caught
                item = None, None, error
            while not self._stopping.is_set():
                try:
                    self.queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue

    def stop(self):
        self._stopping.set()
        self._thread.join()


class _Encode(grain.transforms.Map):
    """Document text -> tokens [n + 1] int32 with the end-of-text id in front.

    As bytes: workers send arrays through shared memory, a file and a descriptor each, which an exit can leave behind.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def map(self, text):
        return np.asarray([self._tokenizer.end_id, *self._tokenizer.encode(text)], np.int32).tobytes()


def _iterate(dataset, num_workers):
    """In-order iterator with `close()` over a MapDataset, computed by worker processes if there are any.

    Worker w of n computes the elements w, w + n, ... and the results are interleaved again, so that the number of
    workers shows nowhere. (What depends on all elements before, packing, happens after this.)
    """
    if num_workers == 0:
        return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)))
    if not flags.FLAGS.is_parsed():  # grain reads absl flags of its own, which only programs that use absl parse
        flags.FLAGS.mark_as_parsed()
    dataset = dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8))
    options = grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=8)
    return iter(dataset.mp_prefetch(options, worker_init_fn=_start_worker))


def _start_worker(index, count):
    """In a new worker: Ctrl-C is the parent's to handle, and a parent that was killed leaves no worker behind."""
    del index, count
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch():
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _check_state(state, identity):
    """The saved position as a dict; UserError if it was saved with another corpus, seed or kind of source."""
    state = json.loads(state)
    for name, value in identity.items():
        if state.get(name) != value:
            raise UserError(
                f"the saved data position does not fit this run's data: {name} was {state.get(name)!r}, "
                f"now it is {value!r}; go on with the same data, or start in a new workdir"
            )
    return state


_open_prefetches = weakref.WeakSet()


@atexit.register  # after grain's import, so before multiprocessing ends the workers under a reading thread
def _close_all():
    for prefetch in list(_open_prefetches):
        prefetch.close()
