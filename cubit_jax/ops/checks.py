"""Checks of arguments. Each raises ValueError in one line that names the value and what it must be."""

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_rows(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, window: int | None, layout: Any = None
) -> int | None:
    """Checks what attention and kernel_solve share. Returns the window, or None where it hides nothing."""
    if q.ndim != 4 or k.shape != q.shape:
        raise ValueError(f"{k.shape=} must equal {q.shape=}, both [B, L, H, K]")
    if 0 in q.shape:
        raise ValueError(f"{q.shape=} must have no dimension of size 0")
    if v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(f"{v.shape=} must be [B, L, H, V] beside {q.shape=}")
    for array in (q, k, v):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{array.dtype=} must be floating")
    check_masks(q.shape, segment_ids, window)
    if window is None:
        return None
    return int(window) if window < (q.shape[1] if layout is None else layout.length) else None


def check_system(
    query_shape: tuple[int, ...], ridge: jax.Array | None, beta: jax.Array | None
) -> tuple[jax.Array | None, jax.Array | None]:
    """Checks that exactly one of ridge [H] and beta [B, L, H] is given, and its values where they are concrete.

    Args:
      query_shape: (B, L, H, K).

    Returns:
      (ridge, beta) as arrays or None.
    """
    batch, length, num_heads, _ = query_shape
    if (ridge is None) == (beta is None):
        raise ValueError(f"exactly one of ridge and beta must be given, got {ridge=} and {beta=}")
    if ridge is not None:
        ridge = jnp.asarray(ridge)
        if ridge.shape != (num_heads,):
            raise ValueError(f"{ridge.shape=} must be [H] with {num_heads=}")
        _check_values("ridge", ridge, "finite and at least 0", lambda values: np.isfinite(values) & (values >= 0))
    if beta is not None:
        beta = jnp.asarray(beta)
        if beta.shape != (batch, length, num_heads):
            raise ValueError(f"{beta.shape=} must be [B, L, H] = {(batch, length, num_heads)}")
    return ridge, beta


def _check_values(name, array, must, valid):
    """Checks the values of a small array. Traced ones have none yet; a caller inside jit answers for them."""
    if isinstance(array, jax.core.Tracer):
        return
    values = np.asarray(array, np.float64)
    if not (good := valid(values)).all():
        raise ValueError(f"{name}={values[~good].flat[0]:g} must be {must}")


def check_scale(scale: float) -> float:
    """The factor of the scores as a finite float."""
    scale = float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"{scale=} must be finite")
    return scale


def check_block_size(block_size: int | None) -> None:
    if block_size is not None and not (_is_integer(block_size) and block_size >= 1):
        raise ValueError(f"{block_size=} must be a positive integer")


def check_num_steps(num_steps: int) -> None:
    if not (_is_integer(num_steps) and num_steps >= 0):
        raise ValueError(f"{num_steps=} must be an integer, at least 0")


def check_step_size(step_size: float | jax.Array) -> None:
    if jnp.shape(step_size) != ():
        raise ValueError(f"step_size.shape={jnp.shape(step_size)} must be (), one number")
    _check_values("step_size", step_size, "finite", np.isfinite)


def check_masks(shape: tuple[int, ...], segment_ids: jax.Array | None, window: int | None) -> None:
    """Checks that segment_ids fit arrays of shape [B, L, ...], and that window is None or at least 1."""
    if segment_ids is not None and np.shape(segment_ids) != shape[:2]:
        raise ValueError(f"segment_ids.shape={np.shape(segment_ids)} must be [B, L] = {shape[:2]}")
    if segment_ids is not None and not jnp.issubdtype(jnp.result_type(segment_ids), jnp.integer):
        raise ValueError(f"segment_ids.dtype={jnp.result_type(segment_ids)} must be an integer type")
    if window is not None and not (_is_integer(window) and window >= 1):
        raise ValueError(f"{window=} must be a positive integer")


def check_interaction(
    state: jax.Array,
    context: jax.Array,
    w_q: jax.Array,
    w_k: jax.Array,
    diag: jax.Array | None,
    tau: float | None,
    positions: jax.Array | None,
    segment_ids: jax.Array | None,
    window: int | None,
) -> float:
    """Checks the arguments of the interaction energy; returns tau as a float."""
    _check_state(state, context)
    model_dim = state.shape[-1]
    if w_q.ndim != 3 or w_q.shape[0] != model_dim or w_k.shape != w_q.shape:
        raise ValueError(f"{w_q.shape=} and {w_k.shape=} must both be [D, H, K] with D={model_dim}")
    if diag is not None and diag.shape not in ((model_dim,), (w_q.shape[1], model_dim)):
        raise ValueError(f"{diag.shape=} must be [D] or [H, D] with H={w_q.shape[1]}, D={model_dim}")
    if positions is not None and positions.shape not in (state.shape[:2], state.shape[1:2]):
        raise ValueError(f"{positions.shape=} must be [B, L] or [L] of {state.shape=}")
    check_masks(state.shape, segment_ids, window)
    tau = w_q.shape[-1] ** 0.5 if tau is None else float(tau)
    if not 0 < tau < math.inf:
        raise ValueError(f"{tau=} must be above 0 and finite")
    return tau


def check_elementwise(state: jax.Array, context: jax.Array, w_up: jax.Array, w_gate: jax.Array) -> None:
    """Checks the arguments of the element-wise energy."""
    _check_state(state, context)
    if w_up.ndim != 2 or w_up.shape[0] != state.shape[-1] or w_gate.shape != w_up.shape:
        raise ValueError(f"{w_up.shape=} and {w_gate.shape=} must both be [D, F] with D={state.shape[-1]}")


def _check_state(state, context):
    if state.ndim != 3 or context.shape != state.shape:
        raise ValueError(f"{context.shape=} must equal {state.shape=}, both [B, L, D]")
    if 0 in state.shape:
        raise ValueError(f"{state.shape=} must have no dimension of size 0")
    for array in (state, context):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{array.dtype=} must be floating")


def _is_integer(value):
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True
