"""The tiny run of every family at three times its learning rate: minutes each, so not part of the usual suite."""

import importlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["transformer", "deltaformer", "cubit"])
def test_three_times_the_learning_rate_is_stable_for_200_steps(family, tmp_path):
    rate = importlib.import_module(f"configs.{family}").get_config("tiny").optimizer.learning_rate
    subprocess.run(
        [sys.executable, "-m", "cubit_jax.train", f"--config=configs/{family}.py:tiny", f"--workdir={tmp_path}",
         f"--config.optimizer.learning_rate={3 * rate}", "--config.num_steps=200", "--config.log_every=1",
         "--config.checkpoint_every=200", "--config.eval_every=0"],
        cwd=ROOT, env=os.environ | {"XLA_FLAGS": ""}, check=True, timeout=3000)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 201))
    assert records[-1]["skipped_updates"] == 0
    losses = [record["train/loss"] for record in records]
    assert sum(losses[-20:]) / 20 < 0.8 * losses[0]
    # No spike: once it has learned something, it never falls back to where it began.
    assert max(losses[60:]) < losses[0]
