"""What every program does with a wrong platform, with --help, and with advice that has to work when followed."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={name: value for name, value in (os.environ | environment).items() if value is not None},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("platform", ["cuda", "tpu", "nonsense"])
def test_a_platform_that_is_not_there_is_one_line(tmp_path, platform):
    code, _, errors = run(
        "cubit_jax.train", "--config=configs/cubit.py:tiny", f"--workdir={tmp_path}", JAX_PLATFORMS=platform
    )
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert code == 1 and len(lines) == 1 and "Traceback" not in errors
    assert lines[0].startswith(f"error: JAX_PLATFORMS={platform} asks for a device that JAX does not find here")
    assert "unset JAX_PLATFORMS" in lines[0]


def test_help_has_every_flag_and_size_that_a_user_may_need():
    code, output, _ = run("cubit_jax.train", "--help")
    assert code == 0
    for words in (
        "--config:",
        "--workdir:",
        "--coordinator_address:",
        "--num_processes:",
        "--process_id:",
        "--heartbeat_timeout_seconds:",
    ):
        assert words in output
    for size in ("tiny", "125m", "350m", "1p3b", "86m", "162m"):
        assert size in output
