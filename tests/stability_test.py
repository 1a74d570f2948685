"""The tiny run of every family at three times its learning rate: minutes each, so not part of the usual suite."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from configs import base

ROOT = pathlib.Path(__file__).parents[1]


# Causal Energy Minimization in its three settings: both layers, with an ordinary MLP, with ordinary attention.
SETTINGS = ("", ",mlp=gated", ",attention=attention")
CEM = [f"cem.py:tiny{setting},steps={steps}" for setting in SETTINGS for steps in (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("config", ["transformer.py:tiny", "deltaformer.py:tiny", "cubit.py:tiny", *CEM])
def test_three_times_the_learning_rate_is_stable_for_200_steps(config, tmp_path):
    rate = base.get_config("tiny").optimizer.learning_rate  # of every family
    subprocess.run(
        [
            sys.executable,
            "-m",
            "cubit_jax.train",
            f"--config=configs/{config}",
            f"--workdir={tmp_path}",
            f"--config.optimizer.learning_rate={3 * rate}",
            "--config.num_steps=200",
            "--config.log_every=1",
            "--config.checkpoint_every=200",
            "--config.eval_every=0",
        ],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": ""},
        check=True,
        timeout=3000,
    )
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][1:]
    assert [record["step"] for record in records] == list(range(1, 201))
    assert records[-1]["skipped_updates"] == 0
    for name, value in records[-1].items():
        if name.endswith("energy_after"):  # descent goes down
            assert value < records[-1][name.replace("after", "before")], name
    losses = [record["train/loss"] for record in records]
    assert sum(losses[-20:]) / 20 < 0.8 * losses[0]
    # No spike: once it has learned something, it never falls back to where it began.
    assert max(losses[60:]) < losses[0]
