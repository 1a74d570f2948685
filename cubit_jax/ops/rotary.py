"""Rotary position embedding."""

import math

import jax
import jax.numpy as jnp


def rotary(x: jax.Array, positions: jax.Array, theta: float = 10000.0) -> jax.Array:
    """Rotates each pair (x_m, x_{m + K/2}) by the angle position * theta^(-2 m / K): the half-split form, as in Llama.

    Args:
      x: [B, L, H, K], K even.
      positions: int, [B, L] or [L].
      theta: base of the wavelengths.

    Returns:
      [B, L, H, K] in the dtype of x; computed in float32 (float64 for float64 x).

    Raises:
      ValueError: malformed shapes; theta is not a finite number above 0.
    """
    head_dim = x.shape[-1]
    if x.ndim != 4 or head_dim % 2:
        raise ValueError(f"{x.shape=} must be [B, L, H, K] with an even head_dim, got {head_dim=}")
    if positions.shape not in (x.shape[:2], x.shape[1:2]):
        raise ValueError(f"{positions.shape=} must be [B, L] or [L] of {x.shape=}")
    if not 0 < theta < math.inf:
        raise ValueError(f"{theta=} must be above 0 and finite")
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=dtype) / head_dim)
    angle = positions.astype(dtype)[..., None, None] * frequency  # [.., L, 1, K/2]: the same for every head
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
