"""What a running program shows and listens to: a progress bar or lines, tokens a second, and requests to stop."""

import contextlib
import os
import pathlib
import signal
import sys
import time

import jax
import tqdm
from jax.experimental import multihost_utils

from cubit_jax.cli import named_errors


class Progress:
    """A bar with rate and time left on a terminal, else a line now and then.

    Args:
      total: number of steps. start: how many are done. tokens: number of tokens a step.
      show: False prints nothing (processes other than the first).
    """

    def __init__(self, total, start, show=True):
        self._total, self._start, self._show = total, start, show
        self._bar = None
        if show and sys.stderr.isatty():
            self._bar = tqdm.tqdm(total=total, initial=start, unit="step", dynamic_ncols=True)

    def update(self, step, seconds_left=None, **numbers):
        """Moves to `step`. With numbers (name=text) they are shown: beside the bar, or as a line."""
        if self._bar is not None:
            if numbers:
                self._bar.set_postfix(numbers, refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._show and numbers:
            left = "" if seconds_left is None else f"  {format_seconds(seconds_left)} left"
            text = "  ".join(f"{name} {value}" for name, value in numbers.items())
            print(f"step {step}/{self._total}  {text}{left}", flush=True)

    def close(self):
        if self._bar is not None:
            self._bar.close()


class Clock:
    """Time spent on training steps alone, and the tokens seen in it."""

    def __init__(self):
        self._begin = time.monotonic()
        self.seconds = self.tokens = self.steps = 0  # in total
        self._mark = (0, 0)

    def add(self, tokens):
        """One more step has ended."""
        now = time.monotonic()
        self.seconds += now - self._begin
        self._begin = now
        self.tokens += tokens
        self.steps += 1

    @contextlib.contextmanager
    def paused(self):
        """What happens inside (evaluation) is not counted."""
        start = time.monotonic()
        yield
        self._begin += time.monotonic() - start

    def rate(self):
        """Tokens a second since the last call."""
        seconds, tokens = self.seconds - self._mark[0], self.tokens - self._mark[1]
        self._mark = (self.seconds, self.tokens)
        return tokens / max(seconds, 1e-9)

    def seconds_left(self, steps):
        """Expected time of that many more steps; None before the first."""
        return self.seconds / self.steps * steps if self.steps else None


class StopRequest:
    """Remembers the first SIGTERM or SIGINT (Ctrl-C), so that the step at hand can end; a second one ends at once.

    A signal to one process of several stops them all, at a step that jax.distributed has them agree on; it listens to
    SIGTERM by itself, so a second one has no effect there.

    Use as a context manager; `name` is the signal's name once there was one, else None.
    """

    def __init__(self):
        self.name = None
        self._together = jax.process_count() > 1
        self._numbers = (signal.SIGINT,) if self._together else (signal.SIGTERM, signal.SIGINT)

    def __enter__(self):
        self._previous = {number: signal.signal(number, self._remember) for number in self._numbers}
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def at(self, step):
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


class Trace:
    """A profile of some steps of the run, written by jax.profiler to `folder`.

    Args:
      first_step: the first step in it, counted from 1; 0 is never. num_steps: how many.
      show: False traces nothing (processes other than the first).
    """

    def __init__(self, folder, first_step, num_steps, show=True):
        self._folder = pathlib.Path(folder)
        self._steps = range(first_step, first_step + num_steps) if first_step and show else range(0)
        self._running = False

    def before(self, step):
        """To be called before each step."""
        if self._steps and step == self._steps[0]:
            with named_errors(f"cannot write a profile to {self._folder}", RuntimeError):
                jax.profiler.start_trace(self._folder)
            self._running = True

    def after(self, step, results):
        """To be called after each step, with arrays that it computes."""
        if self._running and step == self._steps[-1]:
            jax.block_until_ready(results)
            self.close()
            print(f"profile     of steps {self._steps[0]} to {step} in {self._folder}", flush=True)

    def close(self):
        """Ends and writes a trace that is not complete."""
        if self._running:
            self._running = False
            with named_errors(f"cannot write a profile to {self._folder}", RuntimeError):
                jax.profiler.stop_trace()


def format_seconds(seconds):
    """"1:02:03" or "2:03"."""
    return tqdm.tqdm.format_interval(int(seconds))
