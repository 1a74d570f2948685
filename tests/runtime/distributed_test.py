"""Real processes on one machine are one run: same losses, stopped and ended together, gone on with by other meshes.

Each has four devices of its own. The model is as small as it can be: what takes time is starting the programs.
"""

import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import types

import pytest

from cubit_jax import train
from cubit_jax.runtime import distributed
from cubit_jax.runtime.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT = 10  # of the heartbeat, seconds
FIELDS = {
    "model.vocab_size": 300,
    "model.num_layers": 1,
    "model.model_dim": 8,
    "model.num_heads": 2,
    "model.head_dim": 4,
    "model.mlp_dim": 8,
    "model.remat": "none",
    "seq_len": 32,
    "batch_size": 8,
    "log_every": 1,
    "eval_every": 0,
    "diagnostics_every": 0,
    "checkpoint_every": 4,
    "data.source": "files",
    "data.heldout_fraction": 0.2,
    "num_steps": 100_000,
    # a learning rate that does not depend on num_steps, and does not magnify rounding
    "optimizer.schedule": "wsd",
    "optimizer.end_fraction": 1.0,
    "optimizer.warmup_steps": 2,
    "optimizer.learning_rate": 1e-3,
}


@pytest.fixture(scope="module")
def start(quick_programs, corpus):
    """start(workdir, processes, devices, fields) -> the running processes; the last of them gets `last` as well."""

    def run(workdir, processes=2, devices=4, fields=None, *, program="train", last=()):
        flags = [f"--workdir={workdir}"]
        if program == "train":
            fields = FIELDS | {"data.path": f"{corpus}/*.txt"} | (fields or {})
            flags += [
                "--config=configs/transformer.py:tiny",
                *(f"--config.{name}={value}" for name, value in fields.items()),
            ]
        if processes > 1:
            flags += [
                f"--coordinator_address=localhost:{free_port()}",
                f"--num_processes={processes}",
                f"--heartbeat_timeout_seconds={TIMEOUT}",
            ]
        xla_flags = re.sub(r"device_count=\d+", f"device_count={devices}", quick_programs["XLA_FLAGS"])
        environment = quick_programs | {"XLA_FLAGS": xla_flags, "PYTHONUNBUFFERED": "1"}
        return [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    f"cubit_jax.{program}",
                    *flags,
                    *([f"--process_id={index}"] if processes > 1 else []),
                    *(last if index == processes - 1 else ()),
                ],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for index in range(processes)
        ]

    return run


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def finish(processes, codes=None):
    """The outputs of processes that end by themselves, with these exit codes."""
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == (codes or [0] * len(processes)), "\n\n".join(outputs)
    return outputs


def wait_for_step(workdir, step, processes):
    """Returns once metrics.jsonl has reached a step."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        if (workdir / "metrics.jsonl").exists() and records(workdir) and records(workdir)[-1]["step"] >= step:
            return
        time.sleep(0.02)
    for process in processes:
        process.kill()
    pytest.fail(f"step {step} was not reached: {[process.communicate()[0] for process in processes]}")


def records(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    written = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in written if record["step"]]  # at step 0 stands an evaluation alone


def saved_steps(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


@pytest.mark.full
def test_two_processes_preempted_killed_and_gone_on_with_by_one_are_one_run(start, corpus, micro_config, tmp_path):
    """Every step stands in the metrics once, with the loss of a run that one process made without a stop."""
    workdir = tmp_path / "run"
    processes = start(workdir)
    wait_for_step(workdir, 3, processes)
    processes[1].send_signal(signal.SIGTERM)
    first, second = finish(processes)
    stopped = records(workdir)[-1]["step"]
    assert f"saved at step {stopped} of 100000 after SIGTERM" in first and "saved at step" not in second
    assert saved_steps(workdir)[-1] == stopped
    marker = json.loads((workdir / "preempted.json").read_text())
    assert (marker["step"], marker["signal"]) == (stopped, "SIGTERM") and re.match(r"\d{4}-\d\d-\d\d ", marker["time"])

    processes = start(workdir)
    wait_for_step(workdir, stopped + 6, processes)
    assert not (workdir / "preempted.json").exists()
    processes[1].kill()
    lost = time.monotonic()
    output = processes[0].communicate(timeout=TIMEOUT + 20)[0]
    # Checked between two signs of life; the rest is for a busy machine.
    assert time.monotonic() - lost < TIMEOUT + 10
    assert f"resumed     at step {stopped} after SIGTERM at {marker['time']}" in output
    assert processes[0].returncode not in (0, None)
    assert re.search(r"^error: .*lost another process|another task died", output, re.MULTILINE), output
    processes[1].communicate()

    going_on, end = saved_steps(workdir)[-1], records(workdir)[-1]["step"] + 5
    (output,) = finish(start(workdir, processes=1, fields={"num_steps": end, "mesh.fsdp": 2}))
    assert f"resumed     at step {going_on}\n" in output
    train.train(
        micro_config("transformer", **FIELDS | {"num_steps": end, "data.path": f"{corpus}/*.txt"}),
        tmp_path / "straight",
    )
    actual, expected = records(workdir), records(tmp_path / "straight")
    assert [record["step"] for record in actual] == list(range(1, end + 1))
    for ours, theirs in zip(actual, expected):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-5), ours["step"]
    assert actual[-1]["eval/loss"] == pytest.approx(expected[-1]["eval/loss"], rel=1e-5)
    spread = {round(record["train/loss"], 3) for record in expected[-8:]}
    assert len(spread) > 4, "batches are told apart by their losses"

    first, second = finish(start(workdir, program="evaluate"))
    assert f"held-out part at step {end}" in first and "held-out" not in second
    assert f"loss {expected[-1]['eval/loss']:.3f}" in first


@pytest.mark.full
def test_two_processes_finish_a_run_and_report_once(start, tmp_path):
    """Sharded over both; the sample at the end is computed by both; a second start says that the run is complete."""
    fields = {"num_steps": 5, "mesh.fsdp": 4, "mesh.tensor": 2, "batch_size": 4, "profile.first_step": 2}
    first, second = finish(start(tmp_path, fields=fields))
    for words in (
        "2 processes; one that is lost",
        "mesh: fsdp=4 tensor=2",
        "5 steps of 4 x 32",
        "held-out    loss",
        "sample",
        "profile     of steps 2 to 4",
    ):
        assert words in first and words not in second
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4, 5]
    assert saved_steps(tmp_path) == [4, 5]
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1


def test_config_of_one_process_differs(start, tmp_path):
    flags = ["--config.optimizer.learning_rate=0.5", "--config.mesh.fsdp=4"]
    first, second = finish(start(tmp_path / "run", last=flags), [1, 1])
    message = (
        "the processes were given different configs; process 0 there: mesh.fsdp (1 there, 4 here), "
        "optimizer.learning_rate (0.001 there, 0.5 here)"
    )
    assert f"error: process 1: {message}" in first and f"error: {message}" in second
    assert "Traceback" not in first + second
    assert not (tmp_path / "run").exists()


def test_error_of_one_process_ends_the_other_in_the_middle_of_a_step(start, tmp_path):
    """Process 0 cannot write its numbers, while process 1 waits for it to take part in the first step."""
    (tmp_path / "metrics.jsonl").mkdir()
    first, second = finish(start(tmp_path, fields={"num_steps": 5}), [1, 1])
    message = f"cannot write {tmp_path}/metrics.jsonl: Is a directory"
    assert f"error: {message}" in first and f"error: process 0: {message}" in second
    assert "Traceback" not in first + second


@pytest.mark.full
def test_batch_that_four_processes_cannot_share(start, tmp_path):
    processes = start(tmp_path / "run", processes=4, devices=1, fields={"batch_size": 10})
    for output in finish(processes, [1] * 4):
        assert "batch_size=10 must be a multiple of 4 = accumulation_steps=1 x 4 devices sharing the batch" in output
    assert not (tmp_path / "run").exists()


def flag_values(coordinator_address=None, num_processes=None, process_id=None):
    return types.SimpleNamespace(
        coordinator_address=coordinator_address,
        num_processes=num_processes,
        process_id=process_id,
        heartbeat_timeout_seconds=100,
    )


@pytest.mark.parametrize(
    "given, words",
    [
        ({"num_processes": 2}, "--coordinator_address and --process_id missing: give --coordinator_address, "),
        (
            {"coordinator_address": "host", "num_processes": 2, "process_id": 0},
            "--coordinator_address=host must be HOST:P",
        ),
        ({"coordinator_address": "no.host.invalid:1", "num_processes": 2, "process_id": 0}, "=no.host.invalid:1: "),
        (
            {"coordinator_address": "localhost:1", "num_processes": 2, "process_id": 2},
            "--process_id=2 must be from 0 to ",
        ),
    ],
)
def test_flags_that_do_not_fit_each_other(monkeypatch, given, words):
    monkeypatch.setattr(distributed.flags, "FLAGS", flag_values(**given))
    monkeypatch.setattr(distributed.jax.distributed, "initialize", lambda **_: pytest.fail("must not connect"))
    with pytest.raises(UserError) as caught:
        distributed.run(lambda: pytest.fail("must not run"))
    assert words in str(caught.value)


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "a[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
GKE = {"TPU_WORKER_HOSTNAMES": "a,b,c,d"}


def set_environment(monkeypatch, variables, platforms):
    names = {
        *SLURM,
        *GKE,
        "OMPI_MCA_orte_hnp_uri",
        "OMPI_COMM_WORLD_SIZE",
        "MEGASCALE_NUM_SLICES",
        "TPU_PROCESS_ADDRESSES",
        "TPU_SKIP_MDS_QUERY",
        "KUBERNETES_SERVICE_HOST",
        "JOB_COMPLETION_INDEX",
    }
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = types.SimpleNamespace(jax_platforms=platforms, update=lambda name, value: None)
    monkeypatch.setattr(distributed.jax, "config", config)


@pytest.mark.parametrize(
    "variables, platforms, cluster",
    [
        ({}, "cpu", None),
        ({}, None, None),
        (SLURM, None, ("SLURM", 2)),
        ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}, None, None),  # without srun
        ({"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1", "OMPI_COMM_WORLD_SIZE": "4"}, None, ("Open MPI", 4)),
        (GKE, "tpu,cpu", ("Cloud TPU", 4)),
        (GKE | {"MEGASCALE_NUM_SLICES": "2"}, "tpu,cpu", ("Cloud TPU", 8)),
        (GKE, "cpu", None),
        ({}, "tpu,cpu", ("Cloud TPU", None)),
        ({"TPU_SKIP_MDS_QUERY": "1"}, "tpu,cpu", None),  # TPU chips outside Google's clouds
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, None, ("Kubernetes", None)),
    ],
    ids=str,
)
def test_cluster_is_recognized_by_its_environment(monkeypatch, variables, platforms, cluster):
    set_environment(monkeypatch, variables, platforms)
    assert distributed._cluster() == cluster
    if cluster and (cluster[1] or 1) > 1:
        with pytest.raises(UserError, match=f"generate runs in one process, but {cluster[0]} has started several"):
            distributed.require_one_process("generate")
    else:
        distributed.require_one_process("generate")


@pytest.mark.parametrize(
    "platforms, variables, error, words",
    [
        ("tpu,cpu", {}, ValueError("coordinator_address should be defined."), None),
        (
            "tpu,cpu",
            {},
            RuntimeError("metadata"),
            "cannot join the other processes of Cloud TPU: metadata; --num_proces",
        ),
        (
            None,
            {"KUBERNETES_SERVICE_HOST": "a", "JOB_COMPLETION_INDEX": "0"},
            ValueError("not defined"),
            "cannot join the other processes of Kubernetes: not defined; ",
        ),
        (None, SLURM | {"SLURM_NTASKS": "1"}, AssertionError("must not connect"), None),
    ],
)
def test_alone_or_refused_where_jax_finds_nobody(monkeypatch, platforms, variables, error, words):
    def initialize(**_):
        raise error

    set_environment(monkeypatch, variables, platforms)
    monkeypatch.setattr(distributed.flags, "FLAGS", flag_values())
    monkeypatch.setattr(distributed.jax.distributed, "initialize", initialize)
    monkeypatch.setattr(distributed.signal, "signal", lambda *_: None)
    called = []
    if words is None:
        distributed.run(lambda: called.append(1))
        assert called
    else:
        with pytest.raises(UserError, match=words):
            distributed.run(lambda: called.append(1))
        assert not called
