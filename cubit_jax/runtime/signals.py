"""Requests to stop: the first SIGTERM or Ctrl-C lets the step at hand end, whichever process receives it."""

import os
import signal
import sys

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Remembers the first SIGTERM or SIGINT (Ctrl-C), so that the step at hand can end; a second one ends at once.

    A signal to one process of several stops them all, at a step that jax.distributed has them agree on; it listens to
    SIGTERM by itself, so a second one has no effect there.

    Use as a context manager; `name` is the signal's name once there was one, else None.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._together = jax.process_count() > 1
        self._numbers = (signal.SIGINT,) if self._together else (signal.SIGTERM, signal.SIGINT)

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._remember) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def at(self, step: int) -> str | None:
        """The name of the signal after which the run is to stop now, after `step` steps, else None.

        To be asked once a step, by all processes; they get the same answer.
        """
        if self._together and multihost_utils.reached_preemption_sync_point(step):
            self.name = "SIGTERM"
        return self.name

    def _remember(self, number, _):
        name = signal.Signals(number).name
        for each, handler in self._previous.items():
            signal.signal(each, handler)
        print(f"\n{name}: saving after this step; once more ends at once", file=sys.stderr, flush=True)
        if self._together:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.name = name
