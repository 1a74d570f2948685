"""The train program from outside: one command that can be stopped anywhere, and mistakes that change nothing."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from cubit_jax import evaluate, train
from cubit_jax.data.tokenizer_training import train_tokenizer
from cubit_jax.runtime.errors import UserError
from cubit_jax.training.checkpoint import Checkpoints
from cubit_jax.training.trained import load_run
from cubit_jax.training.workdir import read_config, read_preempted, write_config

ROOT = pathlib.Path(__file__).parents[1]
FIELDS = {
    "model.vocab_size": 300,
    "model.num_layers": 2,
    "model.model_dim": 16,
    "model.num_heads": 2,
    "model.head_dim": 8,
    "model.mlp_dim": 32,
    "model.dropout": 0.1,
    "seq_len": 32,
    "batch_size": 8,
    "num_steps": 250,
    "log_every": 1,
    "eval_every": 100,
    "checkpoint_every": 40,
    "diagnostics_every": 50,
    "optimizer.warmup_steps": 10,
    "optimizer.learning_rate": 1e-2,
    "data.source": "files",
    "data.heldout_fraction": 0.2,
}


@pytest.fixture(scope="module")
def start(corpus, quick_programs):
    """start(workdir, **{"num_steps": 3}) -> the running program. Compiled programs are shared between the processes."""

    def run(workdir, **fields):
        fields = FIELDS | {"data.path": f"{corpus}/*.txt"} | fields
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "cubit_jax.train",
                "--config=configs/cubit.py:tiny",
                f"--workdir={workdir}",
                *(f"--config.{name}={value}" for name, value in fields.items()),
            ],
            cwd=ROOT,
            env=quick_programs
            | {"XLA_FLAGS": re.sub(r"device_count=\d+", "device_count=1", quick_programs["XLA_FLAGS"])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run


def finish(process, code=0):
    output = process.communicate(timeout=300)[0]
    assert process.returncode == code, output
    return output


def wait_for_step(workdir, step, process):
    """Returns once metrics.jsonl has reached a step."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if (workdir / "metrics.jsonl").exists() and f'{{"step": {step},' in (workdir / "metrics.jsonl").read_text():
            return
        time.sleep(0.01)
    pytest.fail(f"step {step} was not reached: {process.communicate()[0] if process.poll() is not None else 'slow'}")


def records(workdir):
    """The lines of metrics.jsonl of training steps: the one of step 0 is an evaluation alone."""
    written = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in written if record["step"]]


@pytest.fixture(scope="module")
def config(corpus, micro_config):
    return micro_config("cubit", **FIELDS, **{"data.path": f"{corpus}/*.txt"})


@pytest.fixture(scope="module")
def straight(start, tmp_path_factory):
    """The workdir and the output of a run that nothing interrupted."""
    workdir = tmp_path_factory.mktemp("runs") / "straight"
    return workdir, finish(start(workdir))


def test_run_says_what_it_does_and_what_came_of_it(straight):
    workdir, output = straight
    for words in (
        "2 layers of cubit",
        "parameters",
        "250 steps of 8 x 32",
        "6 documents",
        "held-out    loss",
        "a bigram model of the same tokens",
        "tokens/s",
        "sample",
        "cubit_jax.generate --workdir=",
    ):
        assert words in output
    written = records(workdir)
    assert [record["step"] for record in written] == list(range(1, 251))
    assert {
        "train/loss",
        "learning_rate",
        "gradient_norm",
        "parameter_norm",
        "tokens_per_second",
        "skipped_updates",
    } <= written[0].keys()
    assert [record["step"] for record in written if "eval/loss" in record] == [100, 200, 250]
    assert [record["step"] for record in written if "diagnostics/layer_1/mixer/diagonal_min" in record] == [
        50,
        100,
        150,
        200,
        250,
    ]
    losses = [record["eval/loss"] for record in written if "eval/loss" in record]
    assert losses[0] < 0.7 * written[0]["train/loss"]
    assert written[-1]["train/loss"] < 0.5 * written[0]["train/loss"]
    assert f"{written[-1]['eval/bits_per_byte']:.4f}" in output
    assert json.loads((workdir / "config.json").read_text())["model"]["mixers"] == ["cubit"]


@pytest.mark.full
def test_stopped_three_times_and_never_stopped_are_the_same_run(last_state, straight, start, config, tmp_path):
    """SIGTERM, Ctrl-C, kill -9, each while steps run: bit-equal losses and parameters, over many epochs, dropout on."""
    for number, step in ((signal.SIGTERM, 20), (signal.SIGINT, 70), (signal.SIGKILL, 130)):
        process = start(tmp_path)
        wait_for_step(tmp_path, step, process)
        process.send_signal(number)
        output = finish(process, code=-9 if number == signal.SIGKILL else 0)
        if number != signal.SIGKILL:
            reached = records(tmp_path)[-1]["step"]
            name = signal.Signals(number).name
            assert f"saved at step {reached} of 250 after {name}; the same command goes on from there" in output
            assert Checkpoints(tmp_path).latest_step == reached
            marker = read_preempted(tmp_path)
            assert (marker["step"], marker["signal"]) == (reached, name)
        else:
            assert f"resumed     at step {reached} after SIGINT at {marker['time']}" in output
            assert read_preempted(tmp_path) is None
    assert Checkpoints(tmp_path).latest_step >= 80  # no more is lost than the work since the last checkpoint but one
    assert "resumed     at step" in finish(start(tmp_path))
    actual, expected = records(tmp_path), records(straight[0])
    assert [record["step"] for record in actual] == list(range(1, 251))
    for ours, theirs in zip(actual, expected):
        for name in theirs.keys() - {"tokens_per_second", "time"}:
            assert ours[name] == theirs[name], (ours["step"], name)
    states = [last_state(config, workdir) for workdir in (tmp_path, straight[0])]
    assert all(map(np.array_equal, *map(jax.tree.leaves, states)))
    assert int(states[0]["opt_state"][1].count) == int(states[0]["step"]) == 250


def test_complete_run_started_again_reports_and_changes_nothing(straight, start):
    workdir, first = straight
    before = snapshot(workdir)
    output = finish(start(workdir))
    assert "the run is complete" in output
    assert [line for line in output.splitlines() if line.startswith("held-out")] == [
        line for line in first.splitlines() if line.startswith("held-out")
    ]
    assert snapshot(workdir) == before


@pytest.mark.full
def test_checkpoint_folder_lost_while_training_is_one_line_and_exit_code_1(start, tmp_path):
    process = start(tmp_path, num_steps=2000)
    wait_for_step(tmp_path, 45, process)
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoints").write_text("in the way")
    output = finish(process, code=1)
    assert output.splitlines()[-1].startswith("error: cannot write a checkpoint to ")
    assert "Traceback" not in output


def test_help_explains_every_flag_of_the_program():
    output = subprocess.run(
        [sys.executable, "-m", "cubit_jax.train", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert output.returncode == 0 and output.stderr == ""
    assert "--config:" in output.stdout and "--workdir:" in output.stdout and "goes on" in output.stdout


def snapshot(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"model.num_layers": 4}, ["another config", "model.num_layers", "2 there, 4 here"]),
        ({"optimizer.learning_rate": 0.5}, ["another config", "optimizer.learning_rate"]),
    ],
)
def test_workdir_of_another_config_is_refused_and_kept(straight, start, fields, words):
    before = snapshot(straight[0])
    output = finish(start(straight[0], **fields), code=1)
    errors = [line for line in output.splitlines() if not line.startswith("I")]
    assert len(errors) == 1 and errors[0].startswith("error: ")
    assert all(word in errors[0] for word in words)
    assert snapshot(straight[0]) == before


def test_changed_documents_are_refused(straight, config, tmp_path):
    for path in pathlib.Path(config.data.path).parent.iterdir():
        (tmp_path / path.name).write_text(path.read_text().upper())
    changed = config.copy_and_resolve_references()
    changed.data.path = f"{tmp_path}/*.txt"
    workdir = tmp_path / "run"
    workdir.mkdir()
    for name in ("checkpoints", "tokenizer.json", "config.json", "corpus.json"):
        os.symlink(straight[0] / name, workdir / name)
    with pytest.raises(UserError, match="the documents changed since the run"):
        train.train(changed, workdir)
    with pytest.raises(UserError, match="the documents changed since the run"):
        (workdir / "config.json").unlink()
        write_config(workdir, changed)
        evaluate.evaluate(workdir)
    # The same documents elsewhere are the same run; another tokenizer is not.
    for path in pathlib.Path(config.data.path).parent.iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    (workdir / "tokenizer.json").unlink()
    train_tokenizer(["a text"], 300).save(workdir / "tokenizer.json")
    with pytest.raises(UserError, match="the tokenizer changed since the run"):
        train.train(changed, workdir)
    with pytest.raises(UserError, match="the tokenizer changed since the run"):
        load_run(workdir)


@pytest.mark.parametrize(
    "fields, words",
    [  # eight devices here
        ({"batch_size": 12}, "batch_size=12 must be a multiple of 8"),
        ({"accumulation_steps": 3}, "accumulation_steps=3 x 8"),
        ({"mesh.tensor": 4, "mesh.data": 2}, "num_heads=2 must be a multiple of mesh.tensor=4"),
        ({"mesh.data": 3}, "3, but there are 8 devices"),
        ({"num_steps": 0}, "num_steps=0 must be at least 1"),
        ({"eval_every": -1}, "eval_every=-1 must be at least 1, or 0"),
        ({"optimizer.schedule": "linear"}, "optimizer.schedule='linear' must be one of cosine, wsd"),
        ({"model.mixers": ("cubitt",)}, "did you mean 'cubit'"),
        ({"data.path": "/nowhere/*.txt"}, "/nowhere"),
        ({"data.tokenizer": "/nowhere/tokenizer.json"}, "/nowhere/tokenizer.json"),
        ({"init_from": "/nowhere"}, "no run in /nowhere"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_run(config, tmp_path, fields, words):
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(fields)
    with pytest.raises(UserError) as caught:
        train.train(config, tmp_path / "run")
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "config.json").exists()


def test_vocabulary_mismatch(straight, config, tmp_path):
    config = config.copy_and_resolve_references()
    config.data.tokenizer = str(straight[0] / "tokenizer.json")
    config.model.vocab_size = 280
    with pytest.raises(UserError, match="280"):
        train.train(config, tmp_path)


@pytest.mark.full
def test_start_from_the_parameters_of_another_run(last_state, straight, start, tmp_path):
    finish(
        start(
            tmp_path,
            **{
                "init_from": straight[0],
                "num_steps": 1,
                "model.dropout": 0.0,
                "optimizer.learning_rate": 1e-6,
                "optimizer.warmup_steps": 0,
            },
        )
    )
    (record,) = records(tmp_path)
    assert record["step"] == 1 and record["learning_rate"] == pytest.approx(1e-7)
    assert record["eval/loss"] == pytest.approx(records(straight[0])[-1]["eval/loss"], rel=1e-3)
    assert int(last_state(read_config(tmp_path), tmp_path)["opt_state"][1].count) == 1
