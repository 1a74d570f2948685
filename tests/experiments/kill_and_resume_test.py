"""The script finds lost checkpoints, lost steps, failed processes and numbers that differ."""

import itertools
import json
import pathlib
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

from experiments import kill_and_resume


def write(folder, step, checkpoint):
    """Leaves what a run killed at `step` leaves: a metrics line cut off, and the checkpoint."""
    lines = "".join(json.dumps({"step": number}) + "\n" for number in range(1, step + 1))
    (folder / "metrics.jsonl").write_text(f'{lines}{{"step": {step + 1}')
    for name in ("params/_METADATA", "params/manifest.ocdbt", "training/_METADATA", "training/manifest.ocdbt"):
        (folder / "checkpoints" / str(checkpoint) / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "checkpoints" / str(checkpoint) / name).write_text("")
    (folder / "checkpoints" / str(checkpoint) / "data").mkdir()
    (folder / "checkpoints" / str(checkpoint) / "data/metadata").write_text("")


@pytest.mark.parametrize(
    "attempts, exit_code, faults",
    [
        ([(7, 5), (16, 15)], 0, []),
        ([(25, 15)], 0, []),
        ([(26, 15)], 0, ["steps 15 to 26 are lost"]),
        ([(17, 15), (7, 5)], 0, ["checkpoint 15 is gone, the newest is 5"]),
        ([(7, 5)], 1, ["ended with exit code 1: its log"]),
    ],
)
def test_faults_are_found(tmp_path, monkeypatch, attempts, exit_code, faults):
    left = iter(attempts)
    (tmp_path / "log").write_text("its log")

    def start(config, folder, log):
        process = types.SimpleNamespace(exitcode=None, attempt=next(left, None))
        if process.attempt is None:
            process.exitcode = exit_code

        def kill():
            process.exitcode = -signal.SIGKILL
            for path in (tmp_path / "checkpoints").glob("*"):
                path.rename(tmp_path / f"{path.name}.gone")
            write(tmp_path, *process.attempt)

        process.join, process.kill = lambda wait=None: None, kill
        return process

    monkeypatch.setattr(kill_and_resume, "start", start)
    result = kill_and_resume.kill_until_complete(
        None, tmp_path, tmp_path / "log", itertools.repeat(kill_and_resume.Wait(False, 0.1))
    )
    assert (result.kills, result.faults) == (len(attempts), faults)
    assert result.most_lost == max(step - checkpoint for step, checkpoint in attempts)


def test_one_bit_makes_outcomes_differ():
    outcome = ([np.arange(5.0), np.zeros(3)], b"{}", [{"step": 1, "train/loss": 5.0}])
    negative = ([np.arange(5.0), np.array([0.0, -0.0, 0.0])], *outcome[1:])
    assert kill_and_resume.same(outcome, ([*outcome[0]], *outcome[1:]))
    assert not kill_and_resume.same(outcome, negative)
    assert not kill_and_resume.same(outcome, (outcome[0], b"{ }", outcome[2]))
    assert not kill_and_resume.same(outcome, (*outcome[:2], [{"step": 1, "train/loss": 5.1}]))


@pytest.mark.slow
def test_a_run_killed_three_times_ends_as_the_undisturbed_one():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.kill_and_resume", "--kills=3", "--steps=40"],
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0 and "3 kills in " in done.stdout, done.stdout + done.stderr
