"""Rates of training steps alone, and the time left, with a clock that is moved by hand."""

import pytest

from cubit_jax.training import clock as clock_module
from cubit_jax.training.clock import Clock
from cubit_jax.training.loop import Loop


@pytest.fixture
def now(monkeypatch):
    """now[0]: the seconds that time.monotonic tells."""
    now = [0.0]
    monkeypatch.setattr(clock_module.time, "monotonic", lambda: now[0])
    return now


def test_saves_and_evaluations_are_no_part_of_the_rate(now):
    clock = Clock()
    for _ in range(10):
        now[0] += 0.5
        clock.add(100)
        with clock.paused("save"):
            now[0] += 3
    assert clock.rate() == pytest.approx(200)
    assert (clock.steps, clock.tokens, clock.seconds) == (10, 1000, pytest.approx(5))


@pytest.mark.parametrize("eval_every, checkpoint_every", [(10, 7), (30, 1), (0, 1000)])
def test_time_left_holds_in_the_second_half(now, micro_config, eval_every, checkpoint_every):
    config = micro_config(num_steps=100, eval_every=eval_every, checkpoint_every=checkpoint_every)
    loop = Loop(config, *[None] * 12)
    clock, left, at = Clock(), {}, {}
    for step in range(1, 101):
        now[0] += 1
        clock.add(1)
        for kind, field, seconds in (("evaluation", "eval_every", 20), ("save", "checkpoint_every", 5)):
            if loop._due(field, step) or step == 100:
                with clock.paused(kind):
                    now[0] += seconds
        at[step] = now[0]
        left[step] = clock.seconds_left(
            100 - step, evaluation=loop._number_due("eval_every", step), save=loop._number_due("checkpoint_every", step)
        )
    # What has never happened before the end has no known length.
    known = 0 if eval_every and checkpoint_every <= 50 else 25
    for step in range(50, 100):
        assert left[step] + known == pytest.approx(at[100] - at[step], rel=0.2), step
