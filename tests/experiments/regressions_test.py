"""The regressions of the figure: each against its definition, and the figure itself."""

import jax
import numpy as np
import pytest

from experiments import regressions


@pytest.fixture(scope="module")
def samples():
    x, y = regressions.draw(seed=0)
    return x[:6], y[:6], np.linspace(0, 1, 5)


def weights(a, b):
    dense = np.exp(-np.square(a[:, None] - b) / (2 * regressions.WIDTH**2))
    return dense / dense.sum(axis=1, keepdims=True)


def test_attention_is_the_kernel_mean(samples):
    x, y, queries = samples
    with jax.enable_x64(True):
        fit = regressions.nadaraya_watson(x, y, queries)
    np.testing.assert_allclose(fit, weights(queries, x) @ y, rtol=1e-2)  # an arc in the place of a line


def test_the_causal_solve_sees_the_samples_before(samples):
    x, y, queries = samples
    with jax.enable_x64(True):
        fit = regressions.kernel_ridge_causal(x, y, queries)
    u = np.zeros_like(y)
    for i in range(x.size):
        row = weights(x[i : i + 1], x[: i + 1])[0]
        u[i] = (y[i] - row[:i] @ u[:i]) / (row[i] + regressions.RIDGE)
    np.testing.assert_allclose(fit, weights(queries, x) @ u, rtol=2e-2)


def test_the_delta_rule_stores_a_share_of_what_is_unexplained(samples):
    x, y, queries = samples
    stored = []
    for i in range(x.size):
        known = regressions.delta_rule(x[:i], y[:i], x[i : i + 1])[0] if i else 0.0
        stored.append(regressions.SHARE * (y[i] - known))
    np.testing.assert_allclose(
        regressions.delta_rule(x, y, queries), regressions.kernel(queries, x) @ stored, atol=1e-12
    )


def test_lines_are_fitted_exactly_by_local_lines_and_not_by_the_mean(samples):
    x, _, queries = samples
    line = 2 * x - 1
    np.testing.assert_allclose(regressions.local_linear(x, line, queries), 2 * queries - 1, atol=1e-6)
    mean = regressions.normalized(regressions.kernel(queries, x)) @ line
    assert np.abs(mean - (2 * queries - 1)).max() > 0.05


def test_the_figure_is_drawn(tmp_path):
    regressions.plot(0, tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    assert text.count("error 0.") == 5 and "Nadaraya-Watson" in text
