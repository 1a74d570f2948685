"""What a program prints while it works: lines of process 0, a bar with rate and time left on a terminal."""

import sys

import jax
import tqdm


def say(text: str) -> None:
    """Prints on process 0 of a run."""
    if jax.process_index() == 0:
        print(text, flush=True)


# tqdm's, without its own time left, which knows of no evaluations and saves.
_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"


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
            self._bar = tqdm.tqdm(total=total, initial=start, unit="step", dynamic_ncols=True, bar_format=_BAR)

    def update(self, step, seconds_left=None, **numbers):
        """Moves to `step`. With numbers (name=text) they are shown: beside the bar, or as a line."""
        if self._bar is not None:
            if numbers:
                left = {} if seconds_left is None else {"left": format_seconds(seconds_left)}
                self._bar.set_postfix(left | numbers, refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._show and numbers:
            left = "" if seconds_left is None else f"  {format_seconds(seconds_left)} left"
            text = "  ".join(f"{name} {value}" for name, value in numbers.items())
            print(f"step {step}/{self._total}  {text}{left}", flush=True)

    def close(self):
        if self._bar is not None:
            self._bar.close()


def format_seconds(seconds):
    """ "1:02:03" or "2:03"."""
    return tqdm.tqdm.format_interval(int(seconds))
