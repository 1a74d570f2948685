"""The program that tries wrong inputs: its judgement, its page, and some of its cases."""

import subprocess
import sys

import pytest

from experiments import mistakes
from experiments.support.mistake_inputs import Case

WRONG = Case("Flags", "train", ("--config.num_steps=0",), micro=True)
UNUSUAL = Case("Data", "train", ("--config.data.path={dir}/a.txt",), "links", micro=True, code=0, says="read once")


@pytest.mark.parametrize(
    "case, code, output, problem",
    [
        (WRONG, 1, "log\nerror: num_steps=0 must be positive\n", None),
        (WRONG, 0, "done\n", "exit code 0 where 1 is right"),
        (WRONG, 1, "error: a\nerror: b\n", "2 error lines"),
        (WRONG, 1, "killed\n", "0 error lines"),
        (WRONG, 1, "Traceback (most recent call last):\n  x\nKeyError: 'a'\n", "a traceback"),
        (WRONG, None, "", "it does not end"),
        (WRONG, -6, "error: a\n", "exit code -6 where 1 is right"),
        (UNUSUAL, 0, "note: each file is read once\ndone\n", None),
        (UNUSUAL, 0, "done\n", "no line with 'read once'"),
        (UNUSUAL, 1, "error: no file\n", "exit code 1 where 0 is right"),
    ],
)
def test_judgement(case, code, output, problem):
    line, found = mistakes.judge(case, code, output)
    assert found == problem
    if not problem:
        assert line == [text for text in output.splitlines() if text != "done"][-1]


def test_page_has_a_row_per_case():
    text = mistakes.page([(WRONG, 1, "error: a | b <c>"), (UNUSUAL, 0, "note: x")], 61)
    assert "| `train --config.num_steps=0` | 1 | error: a \\| b \\<c\\> |" in text
    assert "| `train --config.data.path=DIR/a.txt`: links | 0 | note: x |" in text
    assert text.count("\n## ") == 2 and "2 wrong or unusual inputs" in text


def test_every_case_is_another_one():
    rows = [(case.kind, mistakes.describe(case)) for case in mistakes.CASES]
    assert len(rows) == len(set(rows)) >= 100


@pytest.mark.full
def test_some_cases_have_the_right_outcome():
    command = [sys.executable, "-m", "experiments.mistakes", "--only=^Flags .evaluate|closed|Ctrl-C"]
    done = subprocess.run(command, cwd=mistakes.ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nok: ") + done.stdout.startswith("ok: ") >= 7


@pytest.mark.slow
def test_all_cases_have_the_right_outcome(tmp_path):
    command = [sys.executable, "-m", "experiments.mistakes", f"--output={tmp_path}/page.md"]
    done = subprocess.run(command, cwd=mistakes.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, "\n".join(line for line in done.stdout.splitlines() if line.startswith("WRONG"))
