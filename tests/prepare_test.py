"""The program `prepare`: whole or not at all, never over something else, and it says what it did."""

import gzip
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from cubit_jax.data.tokenizer import load_tokenizer
from cubit_jax.data.tokenizer_training import train_tokenizer
from cubit_jax.prepare import prepare
from cubit_jax.runtime.errors import UserError


@pytest.fixture
def texts(tmp_path):
    """A glob of compressed records."""
    for name in "ab":
        lines = [json.dumps({"body": f"file {name} line {i} é <|endoftext|>"}) for i in range(30)]
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return str(tmp_path / "*.jsonl.gz")


def _run(*flags):
    return subprocess.run(
        [sys.executable, "-m", "cubit_jax.prepare", *flags],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=100,
        check=False,
    )


def test_program_writes_streams_that_decode_to_the_documents(tmp_path, texts):
    out = tmp_path / "new" / "out"
    result = _run(
        f"--input={texts}", f"--output={out}", "--text_field=body", "--train_tokenizer=300", "--heldout_fraction=0.2"
    )
    assert result.returncode == 0, result.stderr
    assert {path.name for path in out.iterdir()} == {"heldout.bin", "metadata.json", "tokenizer.json", "train.bin"}
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    metadata = json.loads((out / "metadata.json").read_text())
    tokenizer = load_tokenizer(out / "tokenizer.json")
    assert metadata["vocab_size"] == tokenizer.vocab_size <= 300 and metadata["end_id"] == tokenizer.end_id
    found = []
    for name in ("train", "heldout"):
        stream = np.fromfile(out / f"{name}.bin", metadata["dtype"])
        ends = np.flatnonzero(stream == tokenizer.end_id)
        documents = [tokenizer.decode(stream[a + 1 : b]) for a, b in itertools.pairwise(ends)]
        assert metadata[name] == {
            "documents": len(documents),
            "tokens": len(stream),
            "bytes": sum(len(text.encode()) for text in documents),
        }
        assert ends[0] == 0 and ends[-1] == len(stream) - 1
        assert f"{name}: {len(documents)} document" in result.stderr
        found += documents
    assert sorted(found) == sorted(f"file {name} line {i} é <|endoftext|>" for name in "ab" for i in range(30))
    assert 2 < metadata["heldout"]["documents"] < 25


def test_a_given_tokenizer_and_a_large_vocabulary(tmp_path, texts):
    backend = train_tokenizer(["a"], 257)._backend
    backend.add_tokens([f"extra{i}" for i in range(70_000)])
    backend.save(str(tmp_path / "large.json"))
    metadata = prepare(tmp_path / "out", path=texts, text_field="body", tokenizer=str(tmp_path / "large.json"))
    assert (metadata["vocab_size"], metadata["dtype"]) == (70_257, "<u4")
    assert (tmp_path / "out" / "train.bin").stat().st_size == 4 * metadata["train"]["tokens"]


def test_nothing_is_overwritten_and_nothing_half_done_stays(tmp_path, texts):
    out = tmp_path / "out"
    for options, message in (
        ({"path": texts, "text_field": "text"}, "line 1: no field 'text'; its fields are 'body'"),
        ({"path": str(tmp_path / "*.txt")}, "no file matches"),
        ({}, "--input is missing"),
        ({"path": texts, "text_field": "body", "tokenizer": "no.json"}, "cannot read the tokenizer no.json"),
        ({"path": texts, "tokenizer": "t.json", "vocab_size": 300}, "not both"),
        ({"path": texts, "text_field": "body", "vocab_size": 3}, "too small"),
    ):
        with pytest.raises(UserError, match=message.replace("*", ".")):
            prepare(out, **options)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl.gz", "b.jsonl.gz"]
    out.mkdir()
    with pytest.raises(UserError, match="exists already"):
        prepare(out, path=texts, text_field="body")
    assert not list(out.iterdir())


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, texts):
    # A limit on the size of a file makes the writes fail as a full disk does.
    out = tmp_path / "out"
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200)); "
        "from cubit_jax import prepare; from cubit_jax.runtime import cli; "
        "prepare.define_flags(); cli.run(prepare.main)"
    )
    result = subprocess.run(
        [sys.executable, "-B", "-c", script, f"--input={texts}", f"--output={out}", "--text_field=body"],
        text=True,
        capture_output=True,
        check=False,
        timeout=100,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert result.returncode == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "File too large" in errors[0], result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl.gz", "b.jsonl.gz"]


def test_help_and_missing_flags():
    result = _run("--help")
    for flag in ("input", "output", "tokenizer", "train_tokenizer", "heldout_path", "text_field", "source"):
        assert f"--{flag}" in result.stdout.replace("[no]", "")
    result = _run()
    assert (result.returncode, result.stderr) == (1, "error: --output is missing: give --output=...; see --help\n")
