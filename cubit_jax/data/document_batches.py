"""Training batches from documents, tokenized and packed while the run reads them, with an exact position.

grain shuffles the documents, repeats them and tokenizes them in threads or worker processes. Cutting rows and shuffling
them is done here, not by grain's ConcatThenSplitIterDataset and WindowShuffleIterDataset (0.2.18). Those gave the same
rows in fewer lines, but their position is wrong after a JSON round trip where a document ends with a row, depends on
the number of workers, and their windows cross epochs; and positions that runs have saved could not be read.
"""

import collections
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Sequence

import grain
import numpy as np
from absl import flags

from cubit_jax.data.packing import Batch, local_rows, pack
from cubit_jax.data.read_ahead import check_state
from cubit_jax.data.tokenizer import Tokenizer


class DocumentBatches:
    """Endless training batches from documents, reshuffled each epoch.

    Consecutive rows are mostly parts of one long document. Windows of `shuffle_rows` rows are therefore shuffled once
    more; a window does not reach into the next epoch.

    The rows depend on (documents, tokenizer, seed, seq_len, shuffle_rows) only. Every process tokenizes the whole
    stream and keeps its rows of each batch, so that the global batches and the position are those of a single process.
    The position is the document and the token at which the window begins, and the number of its rows that are used.
    """

    def __init__(
        self,
        documents: Sequence[str],
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        batch_size: int,
        seed: int,
        num_workers: int,
        process_index: int,
        process_count: int,
        shuffle_rows: int,
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
        """Tokens of the next document. The workers start at the first call, with the document of the position."""
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

    def __next__(self) -> Batch:
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

    def get_state(self) -> bytes:
        document, token = self._start
        return json.dumps(self._identity | {"document": document, "token": token, "row": self._used}).encode()

    def set_state(self, state: bytes) -> None:
        state = check_state(state, self._identity)
        self.close()
        self._seek(state["document"], state["token"], state["row"])

    def close(self) -> None:
        """Ends the worker processes and threads."""
        if self._source is not None:
            self._source.close()
            self._source = None


class _Encode(grain.transforms.Map):
    """Document text -> bytes of its tokens [n + 1] int32, the end-of-text id first.

    Bytes, because workers send each array through a file in shared memory, which a killed worker leaves behind.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def map(self, text):
        return np.asarray([self._tokenizer.end_id, *self._tokenizer.encode(text)], np.int32).tobytes()


def _iterate(dataset, num_workers):
    """In-order iterator with `close()` over a MapDataset, computed by worker processes if num_workers > 0.

    Worker w of n computes the elements w, w + n, ... and grain interleaves the results, so that the elements do not
    depend on the number of workers. Packing, which depends on all elements before, happens after this.
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
