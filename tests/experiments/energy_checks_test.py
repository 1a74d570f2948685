"""check_energies accepts what is right and catches what is wrong: a step, an energy, what is called an energy."""

import functools

import jax
import jax.numpy as jnp
import pytest

from cubit_jax import ops
from cubit_jax.runtime.errors import UserError
from experiments import check_energies
from experiments.support import energy_checks


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def cases_named(*wanted):
    return [case for case in energy_checks.built_in_cases() if case.name[1:] in wanted]


def test_every_option_is_a_case():
    names = [case.name for case in energy_checks.built_in_cases()]
    assert len(names) == len(set(names)) == 2 * 3 * 3 * 3


def test_layers_pass(capsys):
    cases = cases_named(("shared_diagonal", "diagonal_lowrank", "2"), ("relu", "none", "4"))
    assert len(cases) == 2
    assert check_energies.report(cases, seed=0) == 0
    printed = capsys.readouterr().out
    assert printed.count(" ok\n") == 2 and "2 of 2 as they should be" in printed


# Energies as a user would write them.


def quadratic(x, h):
    """Pulls each position to the mean of its past."""
    mean = jnp.cumsum(h, axis=1) / jnp.arange(1, h.shape[1] + 1)[:, None]
    return jnp.sum(jnp.square(x - mean), axis=-1) / 2


def weighted(x, h, w):
    return -jnp.sum(jnp.tanh(x @ w) * (h @ w), axis=-1)


def weighted_step(x, h, w):
    return ((h @ w) * (1 - jnp.tanh(x @ w) ** 2)) @ w.T


def wrong_step(x, h, w):
    return weighted_step(x, h, w) * (1 + 1e-6)


def reads_the_future(x, h):
    return quadratic(x, h) + 1e-3 * jnp.sum(h, axis=(1, 2))[:, None]


def reads_other_states(x, h):
    own = jnp.sum(jnp.square(x), axis=-1)
    return own + 1e-3 * jnp.sum(own, axis=1, keepdims=True)


def steep(x, h):
    return 5000 * quadratic(x, h)


def undefined(x, h):
    return quadratic(x, h) + jnp.sum(jnp.log(-1 - jnp.square(x)), axis=-1)


@jax.custom_jvp
def misdeclared(z):
    return jnp.sin(z)


misdeclared.defjvp(lambda primals, tangents: (misdeclared(*primals), 0.9 * jnp.cos(primals[0]) * tangents[0]))


def with_a_wrong_derivative(x, h):
    return quadratic(x, h) + jnp.sum(misdeclared(h) * x, axis=-1)


def weights(key, model_dim):
    return (jax.random.normal(key, (model_dim, 5)) / 4,)


def measured(energy, step=None, params=()):
    case = next(iter(energy_checks.user_cases("mine", energy, step, params)))
    return energy_checks.measure(case)


def test_energies_of_a_user_pass():
    params = weights(jax.random.key(0), energy_checks.MODEL_DIM)
    assert not measured(quadratic).failures
    assert not measured(weighted, weighted_step, params).failures


@pytest.mark.parametrize(
    "energy, step, what",
    (
        (weighted, wrong_step, ["update"]),
        (reads_the_future, None, ["leak"]),
        (reads_other_states, None, ["leak"]),
        (steep, None, ["small_step"]),
        (with_a_wrong_derivative, None, ["gradient"]),
    ),
)
def test_what_is_wrong_is_named(energy, step, what):
    params = weights(jax.random.key(0), energy_checks.MODEL_DIM) if step else ()
    assert measured(energy, step, params).failures == what


def test_numbers_that_are_not_finite_are_off():
    # Its derivative 2 x / (1 + x^2) is finite where its logarithm is not: update and gradient are right.
    assert measured(undefined).failures == ["small_step", "before", "after"]


def test_flags_name_functions(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_energies.py").write_text(
        "import jax.numpy as jnp\nconstant = 3\ndef energy(x, h):\n    return -jnp.sum(x * jnp.cumsum(h, 1), -1)\n"
        "def step(x, h):\n    return jnp.cumsum(h, 1)\ndef flat(x, h):\n    return jnp.sum(x)\n"
    )
    (tmp_path / "broken.py").write_text("def energy(x, h):\n    return (\n")
    monkeypatch.chdir(tmp_path)
    cases = list(check_energies.user_cases("my_energies:energy", "my_energies:step", None, 0))
    assert [case.name[3] for case in cases] == ["1", "2", "4"]
    assert check_energies.report(cases[:1], seed=0) == 0
    for path, message in {
        "my_energies": "give MODULE:FUNCTION",
        "my_energies:nothing": "has no attribute 'nothing'",
        "no_such:energy": "No module named 'no_such'",
        "broken:energy": r"was never closed \(broken.py, line 2\)",
        "my_energies:constant": "not a function",
        "my_energies:flat": r"gives shape \(\)",
    }.items():
        with pytest.raises(UserError, match=message):
            check_energies.user_cases(path, None, None, 0)
    with pytest.raises(UserError, match="fails for x, h and 1 parameters"):
        check_energies.user_cases("my_energies:energy", None, f"{__name__}:weights", 0)


def test_parameters_of_tied_layers():
    shares = {name: (size, ordinary) for name, size, ordinary, _ in energy_checks.parameter_shares()}
    assert shares["attention"] == (2 * 768**2, 4 * 768**2)
    assert shares["mlp"] == (2 * 768 * 2048, 3 * 768 * 2048)


def test_the_papers_preconditioner_need_not_be_positive_definite():
    shares = energy_checks.indefinite_share(draws=50)
    assert shares[0.03] == 0 and shares[0.1] > 0.9


def test_the_gradient_of_an_energy_is_a_layer():
    """What the README shows: write an energy, and descent on it is a layer."""
    h = jax.random.normal(jax.random.key(0), (2, 5, 4))
    layer = functools.partial(ops.minimize, lambda x: ops.descent_direction(quadratic)(x, h), h, step_size=1.0)
    mean = jnp.cumsum(h, axis=1) / jnp.arange(1, 6)[:, None]
    assert jnp.allclose(layer(num_steps=1), mean)
