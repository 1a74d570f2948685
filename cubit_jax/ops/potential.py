"""Potentials of the element-wise energy (arXiv 2605.07588, section 2.2): Phi with Phi' = phi, for a gated MLP's phi."""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from cubit_jax.runtime.names import did_you_mean

_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510, 43867 / 798, -174611 / 330)
# Both series below have the coefficients B_2n / (2n + 1)!, n = 1 .. 10, up to a factor.
_SERIES = tuple(b / math.factorial(2 * n + 1) for n, b in enumerate(_BERNOULLI, start=1))
_NEAR_ZERO = 0.5


def dilogarithm(y: jax.Array) -> jax.Array:
    """Li2(-y) = sum_k (-y)^k / k^2 for 0 <= y <= 1, to the last digits of y's own precision.

    The series is in w = log(1 + y): its terms shrink like (w / 2 pi)^2 < 0.013 on the interval, where the defining
    series needs millions of terms at y = 1.
    """
    w = jnp.log1p(y)
    return -w - w * w / 4 - w**3 * jnp.polyval(jnp.asarray(_SERIES[::-1], w.dtype), w * w)


@jax.custom_jvp
def silu_potential(z: jax.Array) -> jax.Array:
    """Phi(z) = z softplus(z) + Li2(-e^z) + pi^2 / 12, the integral of silu from 0 to z; any z.

    Never evaluates e^z for z > 0: Phi(z) = z^2 / 4 + sign(z) odd(|z|), where by the dilogarithm's inversion formula
    odd(a) = a^2 / 4 + a log(1 + e^-a) - Li2(-e^-a) - pi^2 / 12. These terms cancel near 0, where its Taylor series
    keeps the relative accuracy: a sum over many small z, which is how training starts, needs it in float32.
    """
    a = jnp.abs(z)
    y = jnp.exp(-a)
    small = jnp.minimum(a, _NEAR_ZERO)
    taylor = [(4.0**n - 1) * c for n, c in enumerate(_SERIES, start=1)]
    near = small**3 * jnp.polyval(jnp.asarray(taylor[::-1], a.dtype), small * small)
    # odd(a) - a^2 / 4: the quadratic parts are joined below, so that their sum is exactly 0 for z << 0.
    far = a * jnp.log1p(y) - dilogarithm(y) - math.pi**2 / 12
    return jnp.where(a < _NEAR_ZERO, z * z / 4 + jnp.sign(z) * near, jnp.where(z > 0, z * z / 2, 0) + jnp.sign(z) * far)


@silu_potential.defjvp
def _silu_potential_jvp(primals, tangents):
    (z,), (dz,) = primals, tangents
    return silu_potential(z), jax.nn.silu(z) * dz


def gelu_potential(z: jax.Array) -> jax.Array:
    """Phi(z) = ((z^2 - 1) CDF(z) + z PDF(z)) / 2 of the standard normal, an integral of exact gelu; Phi(0) = -1/4."""
    return ((z * z - 1) * jax.scipy.stats.norm.cdf(z) + z * jax.scipy.stats.norm.pdf(z)) / 2


def relu_potential(z: jax.Array) -> jax.Array:
    """Phi(z) = max(z, 0)^2 / 2."""
    return jnp.square(jax.nn.relu(z)) / 2


def _gelu(z):
    return jax.nn.gelu(z, approximate=False)


POTENTIALS = {"silu": silu_potential, "gelu": gelu_potential, "relu": relu_potential}
ACTIVATIONS = {"silu": jax.nn.silu, "gelu": _gelu, "relu": jax.nn.relu}


def lookup(table: Mapping[str, Callable], activation: str) -> Callable:
    """The entry of POTENTIALS or ACTIVATIONS; an unknown name is a ValueError with the known ones and the nearest."""
    if activation not in table:
        raise ValueError(f"{activation=} must be one of {', '.join(table)}{did_you_mean(activation, table)}")
    return table[activation]
