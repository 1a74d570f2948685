"""A jax.profiler trace of some steps of a run."""

import os
import pathlib
from typing import Any

import jax

from cubit_jax.runtime.errors import named_errors


class Trace:
    """A profile of some steps of the run, written by jax.profiler to `folder`.

    Args:
      first_step: the first step in it, counted from 1; 0 is never. num_steps: how many.
      show: False traces nothing (processes other than the first).
    """

    def __init__(self, folder: str | os.PathLike, first_step: int, num_steps: int, show: bool = True) -> None:
        self._folder = pathlib.Path(folder)
        self._steps = range(first_step, first_step + num_steps) if first_step and show else range(0)
        self._running = False

    def before(self, step: int) -> None:
        """To be called before each step."""
        if self._steps and step == self._steps[0]:
            with named_errors(f"cannot write a profile to {self._folder}", RuntimeError):
                jax.profiler.start_trace(self._folder)
            self._running = True

    def after(self, step: int, results: Any) -> None:
        """To be called after each step, with arrays that it computes."""
        if self._running and step == self._steps[-1]:
            jax.block_until_ready(results)
            self.close()
            print(f"profile     of steps {self._steps[0]} to {step} in {self._folder}", flush=True)

    def close(self) -> None:
        """Ends and writes a trace that is not complete."""
        if self._running:
            self._running = False
            with named_errors(f"cannot write a profile to {self._folder}", RuntimeError):
                jax.profiler.stop_trace()
