"""A run of CEM layers: energies are logged when asked for, and a run that is stopped goes on as if it never was."""

import json
import shutil

import jax
import numpy as np
import pytest

from cubit_jax import train

LAST = {"energy_before", "energy_after", "step_size", "preconditioner_margin"}


@pytest.fixture(scope="module")
def config(corpus, micro_config):
    return micro_config(
        "cem",
        **{
            "num_steps": 20,
            "log_every": 1,
            "eval_every": 0,
            "checkpoint_every": 10,
            "diagnostics_every": 5,
            "model.options.num_recursions": 2,
            "model.options.step_size": 0.5,
            "model.options.preconditioner": "diagonal_lowrank",
            "model.options.precondition_rank": 2,
            "data.source": "files",
            "data.path": f"{corpus}/*.txt",
            "data.heldout_fraction": 0.2,
            "model.implementation": "reference",
        },
    )  # compiles fastest


@pytest.fixture(scope="module")
def straight(config, tmp_path_factory):
    """The workdir of a run that nothing interrupted."""
    workdir = tmp_path_factory.mktemp("runs") / "straight"
    train.train(config, workdir)
    return workdir


def records(workdir):
    written = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in written if record["step"]]


def test_energies_are_logged_when_asked_for(straight):
    written = {record["step"]: record for record in records(straight)}
    assert list(written) == list(range(1, 21))
    for step, record in written.items():
        names = {name for name in record if name.startswith("diagnostics/")}
        expected = {
            f"diagnostics/layer_{layer}/{part}/{name}" for layer in (0, 1) for part in ("mixer", "mlp") for name in LAST
        }
        assert names == (expected if step % 5 == 0 else set())
    for part in ("mixer", "mlp"):
        for layer in (0, 1):
            at = f"diagnostics/layer_{layer}/{part}"
            assert written[20][f"{at}/energy_after"] < written[20][f"{at}/energy_before"]
            # Near its start the preconditioner is positive definite.
            assert 0 < written[20][f"{at}/preconditioner_margin"] <= 1


def test_a_run_that_goes_on_is_the_run_that_was_not_stopped(straight, config, last_state, tmp_path):
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "20")
    silent = config.copy_and_resolve_references()
    silent.diagnostics_every = 0  # how often it reports may change, what it learns may not
    train.train(silent, tmp_path)
    expected, actual = records(straight), records(tmp_path)
    assert [record["step"] for record in actual] == list(range(1, 21))
    assert [record["train/loss"] for record in actual] == [record["train/loss"] for record in expected]
    assert not any(name.startswith("diagnostics/") for record in actual[10:] for name in record)
    states = [last_state(config, workdir) for workdir in (straight, tmp_path)]
    assert int(states[0]["step"]) == 20
    assert all(map(np.array_equal, *map(jax.tree.leaves, states)))
