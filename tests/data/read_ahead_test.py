"""Reading ahead: positions through Orbax, errors reach the consumer, nothing is lost, no worker is left."""

import os
import signal
import subprocess
import sys
import time

import grain
import orbax.checkpoint as ocp
import pytest

from cubit_jax.runtime.errors import UserError
from tests.data.streams import assert_equal, make_batches, take


def test_checkpoints_through_orbax(tmp_path):
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        batches, expected = make_batches(), []
        for step in range(6):
            expected.append(next(batches))
            manager.save(step, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(batches)))
        expected += take(batches, 3)
        for step in range(6):
            resumed = make_batches()
            manager.restore(step, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(resumed)))
            for batch in expected[step + 1 : step + 4]:
                assert_equal(next(resumed), batch)


class _Failing:
    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 3:
            raise UserError("document 3 is damaged")
        return str(index)


def test_an_error_while_reading_ahead_reaches_the_consumer():
    batches = make_batches(_Failing(), seq_len=4, batch_size=1)
    with pytest.raises(UserError, match="document 3 is damaged"):
        take(batches, 20)
    with pytest.raises(UserError, match="document 3 is damaged"):
        take(batches, 20)


def test_closing_in_between_loses_nothing():
    expected, batches = take(make_batches(), 6), make_batches(prefetch=3)
    for batch in expected:
        assert_equal(next(batches), batch)
        batches.close()
        batches.close()


KILLED = """
import multiprocessing, sys
from cubit_jax.data import train_batches
from cubit_jax.data.tokenizer_training import train_tokenizer
if __name__ == "__main__":
    batches = train_batches(["a b"] * 9, train_tokenizer(["a b"], 257), seq_len=4, batch_size=1, seed=0, num_workers=1)
    next(batches)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_no_worker_outlives_its_parent(tmp_path, end):
    (tmp_path / "script.py").write_text(KILLED)
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        text=True,
    )
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 1 and _alive(workers[0])
    if end == "kill":
        parent.send_signal(signal.SIGKILL)
    _, errors = parent.communicate(timeout=60)
    assert end == "kill" or (parent.returncode, errors) == (0, "")
    deadline = time.time() + 20
    while _alive(workers[0]) and time.time() < deadline:
        time.sleep(0.1)
    assert not _alive(workers[0])


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")")[-1].split()[0] != "Z"  # dead, but nobody has asked yet how it ended
    except FileNotFoundError:
        return False
