"""Reading batches ahead in a thread, with the position of the batch that was handed out last."""

import atexit
import json
import multiprocessing.util  # noqa: F401 (registers its exit function, which must run after ours)
import queue
import threading
import weakref
from typing import Any

from cubit_jax.data.packing import Batch
from cubit_jax.runtime.errors import UserError


def check_state(state: bytes, identity: dict[str, Any]) -> dict[str, Any]:
    """A saved position as a dict. UserError if it was saved with another corpus, seed or kind of source.

    Args:
      state: JSON of `identity` and of the position.
      identity: what the position depends on in this run.
    """
    state = json.loads(state)
    for name, value in identity.items():
        if state.get(name) != value:
            raise UserError(
                f"the saved data position does not fit this run's data: {name} was {state.get(name)!r}, "
                f"now it is {value!r}; go on with the same data, or start in a new workdir"
            )
    return state


class Prefetch:
    """Iterator that reads batches ahead in a thread.

    `get_state() -> bytes` and `set_state(bytes)` work with grain.checkpoint.CheckpointSave and CheckpointRestore. The
    state is JSON, the same on all processes, and always the position of the batch handed out last.

    Args:
      batches: iterator with get_state, set_state and close; used by the thread alone while one runs.
      size: number of batches read ahead.
    """

    def __init__(self, batches, size: int = 2):
        self._batches, self._size, self._reader = batches, size, None
        self._state = batches.get_state()
        _open_prefetches.add(self)

    def __iter__(self):
        return self

    def __next__(self) -> Batch:
        self.start_prefetch()
        batch, state, error = self._reader.queue.get()
        if error is not None:
            self.close()
            raise error
        self._state = state
        return batch

    def get_state(self) -> bytes:
        return self._state

    def set_state(self, state: bytes) -> None:
        self.close()
        self._batches.set_state(state)
        self._state = self._batches.get_state()

    @property
    def epoch(self) -> float:
        """Number of passes over the corpus so far."""
        state = json.loads(self._state)
        done, size = ("document", "documents") if state["kind"] == "documents" else ("row", "rows")
        return state[done] / state[size]

    def start_prefetch(self) -> None:
        """Begins to read ahead. CheckpointRestore calls this."""
        if self._reader is None:
            self._batches.set_state(self._state)
            self._reader = _Reader(self._batches, self._size)

    def close(self) -> None:
        """Stops reading ahead and ends the workers. The next `next` continues after the batch handed out last."""
        if self._reader is not None:
            self._reader.stop()
            self._reader = None
        self._batches.close()

    def __del__(self):
        self.close()


class _Reader:
    """The thread of a Prefetch. It holds no reference to the Prefetch, so that an unused one is collected."""

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


_open_prefetches = weakref.WeakSet()


@atexit.register  # before multiprocessing ends the workers that a thread reads from
def _close_all():
    for prefetch in list(_open_prefetches):
        prefetch.close()
