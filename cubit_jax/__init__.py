"""Kernel ridge regression token mixers (Cubit) and Causal Energy Minimization in JAX."""

from typing import Any


def load_run(workdir: str, step: int | str = "latest", **options: Any) -> Any:
    """A trained run, to sample from or to compute with: see `cubit_jax.training.trained.load_run`."""
    from cubit_jax.training import trained  # here, so that `import cubit_jax` does not import JAX

    return trained.load_run(workdir, step, **options)
