"""How long a run will take, before anything long begins: the model's FLOPs over the measured speed of a product."""

import time

import jax
import jax.numpy as jnp

# Of a large product's FLOP/s, what training steps of the sizes here reach: 0.2 to 0.4 on CPUs and, as others report,
# on accelerators. An estimate, good to a factor of about two.
_EFFICIENCY = 0.3
_SIZE = {"cpu": 1024}  # rows and columns of the product: tens of milliseconds on a laptop
_OTHER_SIZE = 8192
_REPEATS = 3


def product_flops(dtype: str, device: jax.Device | None = None) -> float:
    """FLOP/s of a square matrix product on one device of this process: the best of a few tries."""
    device = device or jax.local_devices()[0]
    size = _SIZE.get(device.platform, _OTHER_SIZE)
    with jax.default_device(device):
        x = jnp.ones((size, size), dtype)
        product = jax.jit(lambda x: x @ x)
        product(x).block_until_ready()
        seconds = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            product(x).block_until_ready()
            seconds.append(time.perf_counter() - start)
    return 2 * size**3 / max(min(seconds), 1e-9)


def step_seconds(flops_per_token: float, tokens: int, flops_per_second: float, num_devices: int) -> float:
    """About how many seconds a training step takes.

    Args:
      flops_per_token: of the model, forward and backward.
      tokens: of a step. flops_per_second: of a product, on one device.
      num_devices: that share the step; on CPUs 1, as they share the processor.
    """
    return flops_per_token * tokens / (flops_per_second * _EFFICIENCY * num_devices)


def describe_time(seconds: float, steps: int) -> list[str]:
    """Lines for the user: the estimate and, for more than a day, what to do."""
    total = seconds * steps
    lines = [f"estimate    about {_duration(seconds)} per step, {_duration(total)} in all"]
    if total > 24 * 3600:
        lines.append(
            f"note        {_duration(total)} is long for this machine; a smaller size is chosen after the colon of "
            "--config, as configs/cubit.py:tiny (sizes: tiny, 125m, 350m, 1p3b; cem.py also 86m, 162m), fewer steps by "
            "--config.num_steps"
        )
    return lines


def _duration(seconds):
    """In the largest unit that leaves at least 1: "0.25 s", "12 min", "3.4 days"."""
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}" if seconds >= 10 * size else f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
