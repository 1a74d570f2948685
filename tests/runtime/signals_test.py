"""Signals: remembered until the step at hand has ended, and passed on where several processes have to stop together."""

import os
import signal

import pytest

from cubit_jax.runtime import signals
from cubit_jax.runtime.signals import StopRequest


@pytest.fixture
def received():
    """Signals that reach what was there before, a launcher or JAX."""
    names = []
    previous = {
        number: signal.signal(number, lambda number, _: names.append(signal.Signals(number).name))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    yield names
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_is_remembered_and_the_second_is_not_held_back(received, number):
    with StopRequest() as stop:
        assert stop.at(1) is None
        os.kill(os.getpid(), number)
        assert stop.at(2) == stop.name == number.name
        assert received == []
        os.kill(os.getpid(), number)
        assert received == [number.name]
    assert StopRequest().at(1) is None


def test_of_several_processes_each_stops_where_all_agree(received, monkeypatch):
    monkeypatch.setattr(signals.jax, "process_count", lambda: 2)
    monkeypatch.setattr(signals.multihost_utils, "reached_preemption_sync_point", lambda step: step == 7)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert received == ["SIGTERM"]  # for JAX, which tells the others
        assert stop.at(6) is None
        assert stop.at(7) == stop.name == "SIGTERM"
        os.kill(os.getpid(), signal.SIGINT)
        assert received == ["SIGTERM", "SIGINT"]
