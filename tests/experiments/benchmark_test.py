"""The benchmark's arithmetic, its check of what it times, its files and messages, and the GPU script on a CPU."""

import importlib
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from cubit_jax import layers
from cubit_jax.model_config import ModelConfig, expected_parameters
from cubit_jax.runtime.errors import UserError
from experiments import gpu_check
from experiments.support import cases, options, plots, problems, train_steps

TINY = problems.Shape(1, 24, 2, 8, "float32")


def run(module, *arguments):
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"XLA_FLAGS": ""},
    )


def test_flops():
    for length, window in ((1, None), (7, None), (7, 3), (7, 20)):
        i, j = np.indices((length, length))
        pairs = np.sum((j <= i) & (i - j < (window or length)))
        assert problems.visible_pairs(length, window) == pairs
    shape = problems.Shape(2, 10, 3, 8, "float32")
    # Scores and weighted sum, a multiplication and an addition each, over 2 rows, 3 heads, 55 pairs, 8 features.
    assert problems.count_flops("attention", shape, "forward") == 2 * 2 * 2 * 3 * 55 * 8
    assert problems.count_flops("kernel_solve", shape, "forward+backward") == 7 * 2 * 2 * 3 * 55 * 8
    # Four projections of 20 positions by 24 x 24 matrices.
    assert problems.count_flops("attention_mixer", shape, "forward") == 2 * 2 * 2 * 3 * 55 * 8 + 4 * 2 * 20 * 24 * 24
    assert set(problems.MIXER_NAMES) == {f"{name}_mixer" for name in layers.MIXERS}


@pytest.mark.parametrize("op, attention", [("kernel_solve", "attention"), ("cubit_mixer", "attention_mixer")])
def test_group(op, attention):
    group = cases.run_group(
        (op, attention), ("xla",), problems.PASSES, TINY, rounds=3, check_rows=16, matrix_size=32, seconds=0.0
    )
    records = cases.finish(group)
    assert [record["op"] for record in records] == [op] * 2 + [attention] * 2 + ["matrix product"]
    for record in records:
        assert record["failure"] is None
        assert len(record["times"]) == 3
        assert record["median_seconds"] == np.median(record["times"])
        assert record["compile_seconds"] > 0
        assert record["memory_bytes"] >= 4 * 24 * 2 * 8 or record["op"] == "matrix product"
        assert record["flops_per_second"] == record["flops"] / record["median_seconds"]
    assert 0 < records[0]["error_over_limit"] <= 1
    assert records[-1]["share_of_matrix_product"] == 1
    assert [record["ratio_to_attention"] for record in records[2:]] == [1, 1, None]
    assert records[1]["ratio_to_attention"] == records[1]["median_seconds"] / records[3]["median_seconds"]
    json.dumps(records)


@pytest.mark.parametrize("op, direction", [("kernel_solve", "forward"), ("delta_solve", "forward+backward")])
def test_wrong_kernel_gets_no_time(op, direction, monkeypatch):
    problem = problems.Problem(op, TINY)
    expected = problem.reference(16)
    assert cases.prepare(problem, "xla", direction, expected).failure is None
    implementations = importlib.import_module("cubit_jax.ops.kernel_solve").IMPLEMENTATIONS  # not the function
    right = implementations["xla"]

    def wrong(query, key, rhs, **options):
        u = right(query, key, rhs, **options)
        if direction == "forward":
            return 1.001 * u
        return u + 0.01 * (rhs - jax.lax.stop_gradient(rhs))  # right value, wrong gradient

    monkeypatch.setitem(implementations, "xla", wrong)
    case = cases.prepare(problem, "xla", direction, expected)
    assert case.failure.startswith("wrong: error is")
    cases.time_cases([case], rounds=2)
    assert case.median is None
    assert problems.relative_error([np.nan], np.ones(1)) == np.inf


def test_unsupported_is_named():
    problem = problems.Problem("kernel_solve", TINY)
    case = cases.prepare(problem, "pallas", "forward", problem.reference(16))
    assert "pallas needs a TPU or a GPU" in case.failure
    records = cases.finish([case, *cases.run_group((), (), (), TINY, rounds=2, check_rows=1, matrix_size=8)])
    assert "pallas needs a TPU or a GPU" in cases.table(records).splitlines()[1]


def test_half_precision_reference_sees_rounded_inputs():
    problem = problems.Problem("attention", problems.Shape(1, 24, 2, 8, "bfloat16"))
    assert problem.inputs["q"].dtype == jax.numpy.bfloat16
    out, _ = problem.reference(16)
    q, k, v = (np.asarray(problem.inputs[name][0, :16, 0], np.float64) for name in "qkv")
    scores = np.where(np.tri(16, dtype=bool), q @ k.T / np.sqrt(8), -np.inf)
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out[0, :, 0], weights @ v, atol=1e-12)


@pytest.mark.full
def test_program_writes_its_files(tmp_path):
    done = run(
        "experiments.benchmark",
        "--ops=attention",
        "--lengths=16,32",
        "--passes=forward",
        "--num_heads=1",
        "--head_dim=8",
        "--rounds=2",
        "--matrix_size=16",
        f"--output={tmp_path}/out",
    )
    assert done.returncode == 0, done.stderr
    assert "attention" in done.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    assert [record["length"] for record in report["results"]] == [16, 16, 32, 32]
    assert report["environment"]["versions"]["jax"] == jax.__version__
    assert report["environment"]["processor_cores"] == os.cpu_count()
    assert report["settings"]["head_dim"] == 8
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_messages():
    with pytest.raises(UserError, match="unknown --ops=kernel_sovle: did you mean kernel_solve"):
        options.known("ops", ["attention", "kernel_sovle"], problems.OPS)
    with pytest.raises(UserError, match="--lengths=128,-1: give integers from 1"):
        options.integers("lengths", ["128", "-1"])
    with pytest.raises(UserError, match="--output=/nowhere/out: there is no folder /nowhere"):
        options.output_path("/nowhere/out")


def test_output_files_share_a_stem(tmp_path):
    for value in ("out", "out.json", "out.png"):
        assert [path.name for path in options.output_files(f"{tmp_path}/{value}")] == ["out.json", "out.png"]
    assert options.output_files(f"{tmp_path}/run.v2")[0].name == "run.v2.json"


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"needs matplotlib: pip install -e '\.\[experiments\]'"):
        plots.pyplot()


def test_settings_of_cem_are_cases_with_their_own_ratios():
    names = problems.cem_names(["lowrank", "shared_diagonal"], [1, 2])
    assert names == ["cem_lowrank_T1", "cem_lowrank_T2", "cem_shared_diagonal_T1", "cem_shared_diagonal_T2"]
    assert problems.mixer_options(names[3]) == ("cem", {"interaction": "shared_diagonal", "num_recursions": 2})
    assert problems.mixer_options("cubit_mixer") == ("cubit", {})
    seconds = (
        {"attention": 9.0, "attention_mixer": 2.0} | dict(zip(names, (1.0, 3.0, 8.0, 4.0))) | {"matrix product": 1.0}
    )
    group = [cases.Case(name, "xla", "forward", TINY, flops=1.0, times=[value] * 3) for name, value in seconds.items()]
    records = {record["op"]: record for record in cases.finish(group)}
    assert [records[name]["ratio_to_attention"] for name in ("attention_mixer", *names)] == [1, 0.5, 1.5, 4, 2]
    assert [records[name]["ratio_to_first"] for name in ("attention_mixer", *names)] == [None, 1, 3, 1, 0.5]
    assert "/first T" in cases.table(list(records.values()))


def test_a_setting_of_cem_is_checked_and_timed():
    group = cases.run_group(
        ("cem_lowrank_T2",), ("xla",), problems.PASSES[1:], TINY, rounds=2, check_rows=8, matrix_size=8, seconds=0.0
    )
    (record, _) = cases.finish(group)
    assert record["failure"] is None and record["error_over_limit"] <= 1
    assert record["temporary_bytes"] <= record["memory_bytes"] and record["flops_per_second"] is None


@pytest.mark.full
def test_training_steps_of_a_config_are_timed(micro_config):
    config = micro_config("cem", **{"model.implementation": "reference"})
    (record,) = train_steps.measure({"cem": config}, rounds=2)
    assert record["parameters"] == expected_parameters(ModelConfig.from_config(config))
    assert record["tokens_per_second"] > 0 and record["of_first"] == 1
    assert "cem" in train_steps.table([record])


def test_training_speeds_are_relative_to_the_first():
    rows = list(train_steps.records({"a": (7, 100, [2.0, 2.0, 2.0]), "b": (8, 100, [1.0, 4.0, 9.0])}))
    assert [(row["tokens_per_second"], row["of_first"]) for row in rows] == [(50, 1), (25, 0.5)]
    assert [row["spread"] for row in rows] == [0, 2]


def test_configs_of_training_steps_are_named():
    assert train_steps.load("cem.py:tiny,steps=2").model.options.num_recursions == 2
    for name, words in {"cemm.py:tiny": "No module named 'configs.cemm'", "cem.py:huge": "unknown size 'huge'"}.items():
        with pytest.raises(UserError, match=words):
            train_steps.load(name)


@pytest.mark.full
def test_gpu_script_runs_on_a_cpu(tmp_path):
    done = run("experiments.gpu_check", "--smoke", "--only=first,fla", f"--output={tmp_path}/check.json")
    report = json.loads((tmp_path / "check.json").read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["stages"]["first"]["results"][0]["error_over_limit"] <= 1
    assert set(report["stages"]) == {"first", "fla"}
    # Without torch nothing is compared, and the script says so.
    assert ("fla: " in done.stdout and "not run: No module named" in done.stdout) == bool(
        report["stages"]["fla"]["results"]
    )


def test_gpu_script_stops_a_stage():
    """What a hanging kernel costs: its stage, with the reason."""
    stage = gpu_check.start_stage("correct", 0.5, smoke=True)
    assert stage["failure"] == "stopped after 0 seconds"
    assert stage["results"] == []


@pytest.mark.slow
def test_gpu_script_all_stages(tmp_path):
    done = run("experiments.gpu_check", "--smoke", f"--output={tmp_path}/check.json")
    assert done.returncode == 0, done.stdout + done.stderr
    stages = json.loads((tmp_path / "check.json").read_text())["stages"]
    assert list(stages) == list(gpu_check.STAGES)
    assert all(stage["failure"] is None and stage["results"] for stage in stages.values())
