"""One trainer in a folder at a time, on hosts that share it."""

import os
import pathlib
import subprocess
import sys
import threading

import pytest

from cubit_jax.runtime import lock as lock_module
from cubit_jax.runtime.errors import UserError
from cubit_jax.runtime.lock import lock


def test_second_trainer_is_refused_until_the_first_has_ended(tmp_path):
    folder = tmp_path / "new" / "run"
    with lock(folder):
        for _ in range(2):
            refused = pytest.raises(UserError, match=rf"another trainer is at work in .*\(process {os.getpid()} on ")
            with refused, lock(folder):
                pytest.fail("both have it")
    with lock(folder):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot use .*file"), lock(tmp_path / "file"):
        pass


def test_lock_of_a_killed_process_is_gone(tmp_path):
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from cubit_jax.runtime.lock import lock\n"
            f"import time\nwith lock({str(tmp_path)!r}):\n"
            "    print('held', flush=True)\n    time.sleep(300)",
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=pathlib.Path(__file__).parents[2],
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"process {holder.pid} on "), lock(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    with lock(tmp_path):
        pass


@pytest.mark.parametrize("shared", [True, False])
def test_process_looks_whether_it_shares_the_folder_with_process_0(tmp_path, monkeypatch, shared):
    monkeypatch.setattr(lock_module.distributed, "process_index", lambda: 3)
    monkeypatch.setattr(lock_module.distributed, "from_first", lambda value, name: "process 0's note")
    monkeypatch.setattr(lock_module, "_SEEN_WITHIN", 30 if shared else 0.3)
    writer = threading.Timer(0.2, (tmp_path / "lock").write_text, ["process 0's note" if shared else "another one"])
    writer.start()
    if shared:
        with lock(tmp_path):
            assert (tmp_path / "lock").exists()
    else:
        refused = pytest.raises(UserError, match=r"process 3 does not see .* a file system that all hosts share")
        with refused, lock(tmp_path):
            pytest.fail("not shared")
    writer.join()
