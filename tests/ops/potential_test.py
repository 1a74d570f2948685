"""The potentials against numerical integration of their activations, in both precisions and at extreme arguments."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cubit_jax.ops.potential import ACTIVATIONS, POTENTIALS, dilogarithm, lookup, silu_potential

POINTS = np.array(
    [-60, -30, -10, -3, -1, -0.51, -0.49, -0.1, -1e-3, -1e-8, 0, 1e-8, 1e-3, 0.1, 0.49, 0.51, 1, 3, 10, 30]
)


def integral(activation, z):
    """By Gauss-Legendre quadrature on intervals of length at most 1."""
    nodes, weights = np.polynomial.legendre.leggauss(40)
    edges = np.linspace(0, z, max(math.ceil(abs(z)), 1) + 1)
    half = np.diff(edges)[:, None] / 2
    values = np.asarray(activation(jnp.asarray((edges[:-1, None] + half) + half * nodes)))
    return math.fsum((half * weights * values).ravel())


@pytest.mark.parametrize("activation", POTENTIALS)
def test_potential_is_the_integral_of_the_activation(activation):
    with jax.enable_x64(True):
        expected = np.array([integral(ACTIVATIONS[activation], z) for z in POINTS])
        at_zero = -0.25 if activation == "gelu" else 0
        potential = np.asarray(POTENTIALS[activation](jnp.asarray(POINTS))) - at_zero
        # relu has a kink at 0, where a quadrature interval ends too.
        np.testing.assert_allclose(potential, expected, rtol=1e-13, atol=1e-15)
        derivative = jax.vmap(jax.grad(POTENTIALS[activation]))(jnp.asarray(POINTS))
        np.testing.assert_allclose(derivative, ACTIVATIONS[activation](jnp.asarray(POINTS)), rtol=1e-12, atol=1e-15)


def test_silu_potential_keeps_its_relative_accuracy_near_zero_in_float32():
    with jax.enable_x64(True):
        expected = np.asarray(silu_potential(jnp.asarray(POINTS)))
    actual = np.asarray(silu_potential(jnp.asarray(POINTS, jnp.float32)))
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_silu_potential_at_extreme_arguments():
    z = jnp.array([-1e30, -1e4, 1e4, 1e18], jnp.float32)
    value, slope, curvature = (
        jax.vmap(f)(z) for f in (silu_potential, jax.grad(silu_potential), jax.grad(jax.grad(silu_potential)))
    )
    np.testing.assert_allclose(value, [math.pi**2 / 12, math.pi**2 / 12, 5e7, 5e35], rtol=1e-6)
    np.testing.assert_allclose(slope, [0, 0, 1e4, 1e18], atol=1e-30)
    np.testing.assert_allclose(curvature, [0, 0, 1, 1], atol=1e-30)


def test_silu_potential_has_every_derivative():
    with jax.enable_x64(True):
        for z in (-20.0, -0.7, 0.0, 0.3, 5.0):
            assert jax.grad(jax.grad(silu_potential))(z) == jax.grad(jax.nn.silu)(z)
            assert jax.jvp(jax.grad(silu_potential), (z,), (1.0,))[1] == jax.grad(jax.nn.silu)(z)


def test_dilogarithm_at_known_points():
    with jax.enable_x64(True):
        y = jnp.array([0.0, 1e-12, 0.5, 1.0])
        terms = np.arange(1, 60)
        half = math.fsum((-0.5) ** terms / terms**2)
        np.testing.assert_allclose(dilogarithm(y), [0, -1e-12 + 0.25e-24, half, -(math.pi**2) / 12], rtol=1e-15)


def test_unknown_activation_names_the_nearest():
    with pytest.raises(ValueError, match=r"one of silu, gelu, relu; did you mean 'gelu'\?"):
        lookup(POTENTIALS, "gellu")
