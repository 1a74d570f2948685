"""Choice of an op's implementation, the same for every op.

An implementation is `reference` (dense, for tests), `xla` (any device) or `pallas` (device code). It raises
NotImplementedError, with the reason, for a valid input that it cannot do, and ValueError for a malformed one.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from absl import logging

# (op, platform) whose kernel implementation=None does not take, and why; "pallas" by name takes it. The GPU kernel
# waits across thread blocks. Its entry goes when `python -m experiments.gpu_check` has passed on a GPU.
UNPROVEN = {("kernel_solve", "gpu"): "it has never run on a GPU (experiments.gpu_check)"}

_backend = contextvars.ContextVar("backend", default=None)
_interpret = contextvars.ContextVar("interpret", default=None)
_choices = contextvars.ContextVar("choices", default=None)


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Within it, ops are traced for this backend ("cpu", "tpu", "gpu"): for ahead-of-time compilation.

    Like every setting that is read while tracing, it does not reach a function that `jax.jit` has already traced.
    """
    token = _backend.set(name)
    try:
        yield
    finally:
        _backend.reset(token)


@contextlib.contextmanager
def interpret(platform: str = "tpu") -> Iterator[None]:
    """Within it, implementation="pallas" runs this platform's kernels in Pallas' interpreter: for tests."""
    token = _interpret.set(platform)
    try:
        yield
    finally:
        _interpret.reset(token)


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, set[str]]]:
    """Gives a dict that holds, for every op traced within it, the set of implementations that were taken.

    Like `backend`, it does not see what `jax.jit` has already traced.
    """
    choices = {}
    token = _choices.set(choices)
    try:
        yield choices
    finally:
        _choices.reset(token)


def current_backend() -> str:
    """The backend the computation is traced for: "cpu", "tpu" or "gpu"."""
    return _backend.get() or jax.default_backend()


def kernel_platform() -> tuple[str, bool]:
    """("tpu" or "gpu", whether to interpret): whose Pallas kernels implementation="pallas" runs.

    Raises:
      NotImplementedError: neither is the backend.
    """
    if _interpret.get() is not None:
        return _interpret.get(), True
    if current_backend() not in ("tpu", "gpu"):
        raise NotImplementedError(f"pallas needs a TPU or a GPU, and the backend is {current_backend()}")
    return current_backend(), False


def _record(op, implementation):
    if _choices.get() is not None:
        _choices.get().setdefault(op, set()).add(implementation)


@functools.cache
def _log_once(message):
    logging.info(message)


def run(op: str, implementations: Mapping[str, Callable], implementation: str | None, *args, **kwargs) -> Any:
    """Calls the implementation named, or for None the first that can do this input on this backend.

    Args:
      op: name of the op, for messages.
      implementations: dict from name to function.
      implementation: one of the names, used as it is; None tries `pallas` (on TPU and GPU, unless it is UNPROVEN)
        and then `xla`, and says once in the log which was taken and why. `reference` is taken only by name.
      *args, **kwargs: passed on.

    Raises:
      ValueError: unknown name.
      NotImplementedError: no implementation can do this input.
    """
    if implementation is not None:
        if implementation not in implementations:
            raise ValueError(f"{implementation=} of {op} must be None or one of {sorted(implementations)}")
        out = implementations[implementation](*args, **kwargs)
        _record(op, implementation)
        return out
    platform = current_backend()
    reasons = []
    for name in ("pallas", "xla") if platform in ("tpu", "gpu") else ("xla",):
        if name not in implementations:
            continue
        if name == "pallas" and (op, platform) in UNPROVEN:
            reasons.append(f"{name}: {UNPROVEN[op, platform]}")
            continue
        try:
            out = implementations[name](*args, **kwargs)
        except NotImplementedError as error:
            reasons.append(f"{name}: {error}")
            continue
        _record(op, name)
        if platform != "cpu":  # where there is a choice
            _log_once(f"{op}: implementation {name} on {platform}" + "".join(f"; not {reason}" for reason in reasons))
        return out
    raise NotImplementedError(f"{op} on {platform}: " + "; ".join(reasons))
