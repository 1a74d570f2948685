"""The Gaussian-process experiment: data, matched models, statistics, and that a short run writes results."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from cubit_jax.runtime.errors import UserError
from experiments import gp_regression


def test_a_token_holds_the_next_point_and_the_last_pair():
    tokens, y, _, _ = jax.jit(gp_regression.draw, static_argnums=1)(jax.random.key(0), 3)
    np.testing.assert_array_equal(tokens[:, 1:, 1], tokens[:, :-1, 0])
    np.testing.assert_array_equal(tokens[:, 1:, 2], y[:, :-1])
    np.testing.assert_array_equal(tokens[:, 0, 1:], 0)
    assert jnp.all(tokens[:, 1:, 3] == 1)


def test_the_exact_prediction_is_the_posterior_mean():
    tokens, y, _, exact = jax.device_get(jax.jit(gp_regression.draw, static_argnums=1)(jax.random.key(0), 2))
    x = tokens[..., 0].astype(np.float64)
    for row, i in ((0, 0), (0, 7), (1, 31)):
        kernel = np.exp(-np.square(x[row, :, None] - x[row]) / (2 * gp_regression.LENGTH_SCALE**2))
        noise = (gp_regression.NOISE**2 + 1e-4) * np.eye(i)
        expected = kernel[i, :i] @ np.linalg.solve(kernel[:i, :i] + noise, y[row, :i])
        np.testing.assert_allclose(exact[row, i], expected, atol=1e-3)


def test_models_have_equal_parameters():
    counts = [gp_regression.parameter_count(gp_regression.Regressor(t)) for t in (None, 1, 8)]
    assert counts[1] == counts[2]
    # The diagonal and the step sizes, a few numbers, are what tied weights do not share out evenly.
    assert 0 <= counts[1] - counts[0] <= 0.005 * counts[0]


def test_interval_is_students():
    values = np.array([1.0, 2.0, 4.0])
    mean, half = gp_regression.interval(values)
    assert mean == pytest.approx(7 / 3)
    assert half == pytest.approx(4.303 * np.sqrt(7 / 3) / np.sqrt(3))


def test_conclusion_says_what_the_intervals_allow():
    lines = list(gp_regression.conclusion({"a": (-0.2, 0.1), "b": (0.2, 0.1), "c": (-0.2, 0.3)}))
    assert [line.split(", ")[1] for line in lines] == ["lower RMSE", "higher RMSE", "undecided"]


@pytest.mark.parametrize(
    "given, recursions, changed",
    [
        ([], [1, 2, 4, 8], {}),
        (["--quick"], [1, 2], {"seeds": 2, "steps": 150, "test_functions": 200}),
        (["--quick", "--steps=20"], [1, 2], {"seeds": 2, "steps": 20, "test_functions": 200}),
        (["--recursions=1,4", "--seeds=4", "--quick"], [1, 4], {"seeds": 4, "steps": 150, "test_functions": 200}),
    ],
)
def test_a_given_flag_wins_over_quick(given, recursions, changed, monkeypatch):
    values = flags.FlagValues()  # the program's own are for the whole process
    for name in ("list", "integer", "float", "boolean", "string"):
        define = getattr(flags, f"DEFINE_{name}")
        monkeypatch.setattr(flags, f"DEFINE_{name}", functools.partial(define, flag_values=values))
    gp_regression.define_flags()
    values(["gp_regression", *given])
    settings = {"seeds": 4, "steps": 1500, "batch": 16, "test_functions": 2000, "learning_rate": 2e-3}
    assert gp_regression.chosen(values) == (recursions, settings | changed)


@pytest.fixture
def small(monkeypatch):
    for name, value in {
        "NUM_POINTS": 8,
        "NUM_LAYERS": 1,
        "MODEL_DIM": 8,
        "MLP_DIM": 12,
        "NUM_HEADS": 2,
        "HEAD_DIM": 4,
    }.items():
        monkeypatch.setattr(gp_regression, name, value)


@pytest.mark.full
def test_a_short_run_measures_plots_and_learns_and_goes_on(small, tmp_path, monkeypatch, capsys):
    settings = {"seeds": 2, "steps": 300, "batch": 16, "test_functions": 100, "learning_rate": 1e-2}
    path = tmp_path / "gp.json"

    # Stopped as the last model begins: the two before it are on disk and are not trained again.
    make = gp_regression.make_train
    made = []

    def make_or_stop(model, **options):
        if model.recursions == 2 and not made:
            made.append(model)
            raise KeyboardInterrupt
        return make(model, **options)

    monkeypatch.setattr(gp_regression, "make_train", make_or_stop)
    with pytest.raises(KeyboardInterrupt):
        gp_regression.experiment([1, 2], path, **settings)
    before = json.loads(path.read_text())["results"]
    assert set(before) == {"softmax attention", "CEM T=1"}
    capsys.readouterr()

    record = gp_regression.experiment([1, 2], path, **settings)
    printed = capsys.readouterr().out
    assert "kept softmax attention, CEM T=1" in printed and printed.count(" s left") == 10
    assert json.loads(path.read_text()) == json.loads(json.dumps(record))
    assert {name: record["results"][name] for name in before} == before
    assert set(record["results"]) == {*before, "CEM T=2"}
    assert set(record["differences"]) == {"T=1 to T=2"}
    for result in record["results"].values():
        # Predicting 0 gives 1.
        assert record["exact"] < result["rmse"] < 0.95
        assert len(result["rmse_by_position"]) == 8 and len(result["rmse_by_seed"]) == 2
    assert len(list(gp_regression.table(record))) == 2 + 4
    gp_regression.plot(record, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000

    with pytest.raises(UserError, match=r"results of other settings.*choose another --output"):
        gp_regression.experiment([1, 2], path, **settings | {"steps": 301})
    path.write_text("[]")
    with pytest.raises(UserError, match="is not a file of this program"):
        gp_regression.experiment([1, 2], path, **settings)
