"""What a program prints never ends it, whatever the terminal's encoding."""

import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "locale", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_characters_that_the_encoding_has_not_are_replaced(locale):
    code = (
        "from absl import logging; from cubit_jax.runtime import cli\n"
        "def main():\n"
        "    print('a \\u8a9e \\udcff'); logging.warning('b \\u8a9e'); cli.fail('c \\u8a9e')\n"
        "cli.run(main)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        timeout=60,
        env=os.environ | locale,
    )
    assert (done.returncode, done.stdout) == (1, b"a ? ?\n")
    assert done.stderr.splitlines()[-1] == b"error: c ?" and b"Traceback" not in done.stderr
