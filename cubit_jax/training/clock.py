"""How long training steps take: tokens per second and time left."""

import contextlib
import time


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
