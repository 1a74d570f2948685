"""Timing of programs in turns, and where it was done."""

import os
import pathlib
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Hashable

import jax


def spread(times: list[float]) -> float:
    """Distance of the quartiles as a share of the median."""
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle


def environment() -> dict:
    """Where the numbers come from."""
    device = jax.devices()[0]
    versions = {
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "runtime": device.client.platform_version,
        "python": platform.python_version(),
    }
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "processor": _processor(),
        "processor_cores": os.cpu_count(),
        "versions": versions,
    }


def _processor() -> str:
    """The name of the host's processor."""
    info = pathlib.Path("/proc/cpuinfo")  # Linux; elsewhere what Python knows
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor()


def time_in_turns(
    runs: dict[Hashable, Callable], rounds: int, seconds: float = 0.02, seed: int = 0
) -> dict[Hashable, list[float]]:
    """{name: seconds per run, one number per round}. After warm-up every run has its turn in each round.

    The order within a round is random. A measurement repeats its program until it lasts about `seconds`, queued on the
    device and waited for once.

    Args:
      runs: {name: () -> arrays}.
    """
    repeats = {}
    for name, run in runs.items():
        jax.block_until_ready(run())
        start = time.perf_counter()
        jax.block_until_ready(run())
        repeats[name] = max(1, min(200, round(seconds / (time.perf_counter() - start))))
    order = list(runs)
    times = {name: [] for name in runs}
    shuffle = random.Random(seed).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            for _ in range(repeats[name]):
                out = runs[name]()
            jax.block_until_ready(out)
            times[name].append((time.perf_counter() - start) / repeats[name])
    return times
