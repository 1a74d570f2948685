"""Files of metrics that hold each step once, and the arithmetic of utilisation."""

import json
import time
import types

import pytest

from cubit_jax.flops import flops_per_token, utilization
from cubit_jax.model import ModelConfig
from cubit_jax.runtime.errors import UserError
from cubit_jax.training import metrics


def records(folder):
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(abs(record.pop("time") - time.time()) < 60 for record in written)
    return written


def test_one_object_a_step_with_null_for_what_is_not_finite(tmp_path):
    writers = metrics.open_writers(tmp_path, 0)
    writers.write(1, {"train/loss": 2.5})
    writers.write(2, {"train/loss": float("nan"), "eval/loss": 1.5})
    writers.close()
    assert records(tmp_path) == [{"step": 1, "train/loss": 2.5}, {"step": 2, "train/loss": None, "eval/loss": 1.5}]
    assert list((tmp_path / "tensorboard").glob("events.out.*"))


def test_lines_beyond_the_restored_step_and_half_lines_go(tmp_path):
    writers = metrics.open_writers(tmp_path, 0)
    for step in range(1, 6):
        writers.write(step, {"train/loss": 10.0 + step})
    writers.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('\0\0\0\n{"step": 6, "train/lo')  # killed while writing, after a power failure
    writers = metrics.open_writers(tmp_path, 3)
    for step in range(4, 7):
        writers.write(step, {"train/loss": 20.0 + step})
    writers.close()
    assert [(record["step"], record["train/loss"]) for record in records(tmp_path)] == [
        (1, 11.0),
        (2, 12.0),
        (3, 13.0),
        (4, 24.0),
        (5, 25.0),
        (6, 26.0),
    ]


def test_other_processes_write_nothing(tmp_path):
    writers = metrics.open_writers(tmp_path / "run", 0, process_index=1)
    writers.write(1, {"train/loss": 1.0})
    writers.close()
    assert not (tmp_path / "run").exists()


def test_full_disk_is_one_line(tmp_path, monkeypatch):
    writer = metrics.JsonLines(tmp_path / "metrics.jsonl", 0)
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(writer, "_file", full)
        with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
            writer.write(1, {"train/loss": 1.0})
        writer.close()


def test_full_disk_is_one_line_for_tensorboard_too(tmp_path):
    writer = metrics.TensorBoard(tmp_path / "tensorboard", 0)
    with open("/dev/full", "wb", buffering=0) as full:
        writer._events._py_recordio_writer._writer = full
        with pytest.raises(UserError, match=r"cannot write .*tensorboard: No space left on device"):
            writer.write(1, {"train/loss": 1.0})


def test_tensorboard_hides_what_is_beyond_the_restored_step(tmp_path):
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    writer = metrics.TensorBoard(tmp_path, 3)
    writer.write(4, {"train/loss": 2.5})
    writer.close()
    (path,) = tmp_path.glob("events.out.*")
    data, events = path.read_bytes(), []
    while data:  # records: length in 8 bytes, its checksum in 4, the event, its checksum in 4
        size = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    assert [(e.step, e.session_log.status == SessionLog.START) for e in events] == [(0, False), (4, True), (4, False)]
    assert events[2].summary.value[0].tag == "train/loss" and events[2].summary.value[0].simple_value == 2.5


def test_flops_of_a_token_by_hand():
    shape = {
        "vocab_size": 10,
        "num_layers": 2,
        "model_dim": 8,
        "num_heads": 2,
        "head_dim": 4,
        "mlp_dim": 16,
        "seq_len": 32,
    }
    matrices = 2 * (4 * 8 * 8 + 3 * 8 * 16) + 8 * 10  # what is multiplied with: four or three a layer, and the head
    attention = flops_per_token(ModelConfig(**shape), matrices + 80)
    assert attention == 6 * matrices + 2 * (3 * 2 * 2 * 16 * 8)  # 3 passes, 2 products, 2 FLOP, 16 columns, H K = 8
    cubit = flops_per_token(ModelConfig(**shape, mixers=("cubit",)), matrices + 80)
    assert cubit - attention == 2 * (3 * 2 * 2 * 16 * 8)
    window = flops_per_token(ModelConfig(**shape, window=4), matrices + 80)
    assert attention - window == 2 * (3 * 2 * 2 * 12 * 8)
    tied = flops_per_token(ModelConfig(**shape, tie_embeddings=True), matrices)
    assert tied == attention


def test_utilization_is_known_for_known_devices_only():
    assert utilization(1e9, 1e3, [types.SimpleNamespace(device_kind="cpu")]) is None
    devices = [types.SimpleNamespace(device_kind="TPU v4")] * 2
    assert utilization(275e9, 1e3, devices) == pytest.approx(0.5)


def test_the_first_line_of_a_run_that_begins_again_stands_once(tmp_path):
    for _ in range(2):  # the first process was killed before its first checkpoint
        writers = metrics.open_writers(tmp_path, -1)
        writers.write(0, {"eval/loss": 5.0})
        writers.close()
    assert records(tmp_path) == [{"step": 0, "eval/loss": 5.0}]


def test_a_number_that_is_not_finite_is_written_without_a_warning(tmp_path, caplog):
    writers = metrics.open_writers(tmp_path, -1)
    writers.write(1, {"train/loss": float("nan"), "gradient_norm": float("inf")})
    writers.close()
    assert records(tmp_path) == [{"step": 1, "train/loss": None, "gradient_norm": None}]
    assert not caplog.records
