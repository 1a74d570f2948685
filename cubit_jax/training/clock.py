"""How long training steps take: tokens per second, and the time left with evaluations and saves."""

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """Time spent on training steps alone, and the tokens seen in it.

    Attributes:
      seconds, tokens, steps: in total.
    """

    def __init__(self):
        self._begin = time.monotonic()
        self.seconds = self.tokens = self.steps = 0
        self._mark = (0, 0)
        self._last = {}  # kind of pause -> seconds of the last one; the first may have compiled

    def add(self, tokens: float) -> None:
        """One more step has ended."""
        now = time.monotonic()
        self.seconds += now - self._begin
        self._begin = now
        self.tokens += tokens
        self.steps += 1

    @contextlib.contextmanager
    def paused(self, kind: str) -> Iterator[None]:
        """What happens inside (an evaluation, a save) is not counted as training."""
        start = time.monotonic()
        yield
        self._last[kind] = time.monotonic() - start
        self._begin += self._last[kind]

    def rate(self) -> float:
        """Tokens per second since the last call."""
        seconds, tokens = self.seconds - self._mark[0], self.tokens - self._mark[1]
        self._mark = (self.seconds, self.tokens)
        return tokens / max(seconds, 1e-9)

    def seconds_left(self, steps: int, **pauses: int) -> float | None:
        """Expected time of that many more steps, and of {kind: number} pauses; None before the first step."""
        if not self.steps:
            return None
        return self.seconds / self.steps * steps + sum(self._last.get(kind, 0) * n for kind, n in pauses.items())
