"""How long a run will take, said before anything long begins."""

import pytest

from cubit_jax.planning import step_time


def test_a_product_is_timed():
    assert 1e8 < step_time.product_flops("float32") < 1e15


def test_time_of_a_step():
    assert step_time.step_seconds(6e6, 1000, 2e10, 1) == pytest.approx(6e9 / 6e9)
    assert step_time.step_seconds(6e6, 1000, 2e10, 4) == pytest.approx(0.25)


@pytest.mark.parametrize(
    "seconds, steps, words",
    [
        (0.25, 100, ["about 0.25 s per step, 25 s in all"]),
        (95, 20_000, ["95 s per step, 22 days", "sizes: tiny, 125m"]),
    ],
)
def test_a_run_of_more_than_a_day_gets_the_sizes(seconds, steps, words):
    lines = step_time.describe_time(seconds, steps)
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines))
