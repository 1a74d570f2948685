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
from cubit_jax.runtime.errors import UserError
from experiments import benchmark, gpu_check, measure

TINY = measure.Shape(1, 24, 2, 8, "float32")


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
        assert measure.visible_pairs(length, window) == pairs
    shape = measure.Shape(2, 10, 3, 8, "float32")
    # Scores and weighted sum, a multiplication and an addition each, over 2 rows, 3 heads, 55 pairs, 8 features.
    assert measure.count_flops("attention", shape, "forward") == 2 * 2 * 2 * 3 * 55 * 8
    assert measure.count_flops("kernel_solve", shape, "forward+backward") == 7 * 2 * 2 * 3 * 55 * 8
    # Four projections of 20 positions by 24 x 24 matrices.
    assert measure.count_flops("attention_mixer", shape, "forward") == 2 * 2 * 2 * 3 * 55 * 8 + 4 * 2 * 20 * 24 * 24
    assert set(measure.MIXER_NAMES) == {f"{name}_mixer" for name in layers.MIXERS}


@pytest.mark.parametrize("op", ["kernel_solve", "cubit_mixer"])
def test_group(op):
    cases = measure.run_group(
        (op, "attention"), ("xla",), measure.PASSES, TINY, rounds=3, check_rows=16, matrix_size=32, seconds=0.0
    )
    records = measure.finish(cases)
    assert [record["op"] for record in records] == [op] * 2 + ["attention"] * 2 + ["matrix product"]
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
    problem = measure.Problem(op, TINY)
    expected = problem.reference(16)
    assert measure.prepare(problem, "xla", direction, expected).failure is None
    implementations = importlib.import_module("cubit_jax.ops.kernel_solve").IMPLEMENTATIONS  # not the function
    right = implementations["xla"]

    def wrong(query, key, rhs, **options):
        u = right(query, key, rhs, **options)
        if direction == "forward":
            return 1.001 * u
        return u + 0.01 * (rhs - jax.lax.stop_gradient(rhs))  # right value, wrong gradient

    monkeypatch.setitem(implementations, "xla", wrong)
    case = measure.prepare(problem, "xla", direction, expected)
    assert case.failure.startswith("wrong: error is")
    measure.time_cases([case], rounds=2)
    assert case.median is None
    assert measure.relative_error([np.nan], np.ones(1)) == np.inf


def test_unsupported_is_named():
    problem = measure.Problem("kernel_solve", TINY)
    case = measure.prepare(problem, "pallas", "forward", problem.reference(16))
    assert "pallas needs a TPU or a GPU" in case.failure
    records = measure.finish([case, *measure.run_group((), (), (), TINY, rounds=2, check_rows=1, matrix_size=8)])
    assert "pallas needs a TPU or a GPU" in measure.table(records).splitlines()[1]


def test_half_precision_reference_sees_rounded_inputs():
    problem = measure.Problem("attention", measure.Shape(1, 24, 2, 8, "bfloat16"))
    assert problem.inputs["q"].dtype == jax.numpy.bfloat16
    out, _ = problem.reference(16)
    q, k, v = (np.asarray(problem.inputs[name][0, :16, 0], np.float64) for name in "qkv")
    scores = np.where(np.tri(16, dtype=bool), q @ k.T / np.sqrt(8), -np.inf)
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out[0, :, 0], weights @ v, atol=1e-12)


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
        benchmark.known("ops", ["attention", "kernel_sovle"], benchmark.NAMES)
    with pytest.raises(UserError, match="--lengths=128,-1: give integers from 1"):
        benchmark.integers("lengths", ["128", "-1"])
    with pytest.raises(UserError, match="--output=/nowhere/out: there is no folder /nowhere"):
        benchmark.output_path("/nowhere/out")
    done = run("experiments.benchmark", "--dtypes=float8")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: unknown --dtypes=float8")


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
