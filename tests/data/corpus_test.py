"""Corpora and tokenizers as a config names them, prepared data included; each mistake is one line."""

import ast
import dataclasses
import json
import pathlib
import types

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from cubit_jax.data import (
    check_restored,
    encode_documents,
    estimate_tokens,
    heldout_batches,
    open_corpus,
    open_text,
    open_tokenizer,
    pipeline,
    size_notes,
    token_stream,
    train_batches,
)
from cubit_jax.data.tokenizer_training import train_tokenizer
from cubit_jax.prepare import prepare
from cubit_jax.runtime.errors import UserError


def _data(**changes):
    fields = {
        "source": "files",
        "path": None,
        "heldout_path": None,
        "heldout_fraction": 0.2,
        "text_field": "text",
        "tokenizer": None,
    }
    return types.SimpleNamespace(**fields | changes)


@pytest.fixture
def texts(tmp_path):
    """A directory with a glob of 20 documents."""
    (tmp_path / "texts").mkdir()
    for i in range(20):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"document {i}, é\n" * (i + 1))
    return tmp_path / "texts" / "*.txt"


def _all(documents):
    return [documents[i] for i in range(len(documents))]


def _error(function, *args, **options):
    with pytest.raises(UserError) as caught:
        function(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_are_split_and_identified(tmp_path, texts):
    corpus = open_corpus(_data(path=str(texts)), tmp_path)
    assert sorted(_all(corpus.train) + _all(corpus.heldout)) == sorted(p.read_text() for p in texts.parent.iterdir())
    assert 1 <= len(corpus.heldout) < 10
    assert corpus.heldout_bytes == sum(len(text.encode()) for text in _all(corpus.heldout))
    assert open_corpus(_data(path=str(texts)), tmp_path / "other").fingerprint == corpus.fingerprint
    assert open_corpus(_data(path=str(texts), heldout_fraction=0.3), tmp_path).fingerprint != corpus.fingerprint
    (texts.parent / "3.txt").write_text("changed")
    assert open_corpus(_data(path=str(texts)), tmp_path).fingerprint != corpus.fingerprint


def test_given_heldout_files(tmp_path, texts):
    (tmp_path / "heldout.jsonl").write_text('{"text": "held out"}\n')
    corpus = open_corpus(_data(path=str(texts), heldout_path=str(tmp_path / "heldout.jsonl")), tmp_path)
    assert (len(corpus.train), _all(corpus.heldout), corpus.heldout_bytes) == (20, ["held out"], 8)
    both = _data(path=str(texts), heldout_path=str(texts.parent / "1*.txt"))
    assert "1.txt is matched by data.path and by data.heldout_path" in _error(open_corpus, both, tmp_path)


def test_the_end_of_a_single_text_file_is_held_out(tmp_path):
    path = tmp_path / "input.txt"
    path.write_text("".join(f"ligne {i}, é\n" for i in range(100)))
    corpus = open_corpus(_data(path=str(path), heldout_fraction=0.1), tmp_path)
    (train,), (heldout,) = _all(corpus.train), _all(corpus.heldout)
    assert train + heldout == path.read_text()
    assert train.endswith("\n") and heldout.startswith("ligne 9")
    assert 0.08 < corpus.heldout_bytes / path.stat().st_size < 0.1


def test_stdlib_needs_nothing(tmp_path):
    corpus = open_corpus(_data(source="stdlib", heldout_fraction=0.05), tmp_path)
    assert len(corpus.train) > 10 * len(corpus.heldout) > 100
    assert not list(tmp_path.iterdir())


def test_mistakes_in_the_config(tmp_path, texts):
    assert "unknown data.source 'web': choose one of stdlib" in _error(open_corpus, _data(source="web"), tmp_path)
    assert "data.source=files needs data.path" in _error(open_corpus, _data(), tmp_path)
    assert "between 0 and 1" in _error(open_corpus, _data(path=str(texts), heldout_fraction=1.0), tmp_path)
    assert "does not go with" in _error(open_corpus, _data(source="stdlib", heldout_path="x"), tmp_path)


def test_empty_corpora(tmp_path):
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).write_text("")
        assert "the corpus is empty" in _error(open_corpus, _data(path=str(tmp_path / name)), tmp_path)
    (tmp_path / "c.txt").write_text("x")
    assert "no text in" in (message := _error(open_corpus, _data(path=str(tmp_path / "c.txt")), tmp_path))
    assert "give some with heldout_path" in message
    empty = _data(path=str(tmp_path / "c.txt"), heldout_path=str(tmp_path / "a.txt"))
    assert "the held-out part is empty" in _error(open_corpus, empty, tmp_path)
    empty = _data(path=str(tmp_path / "a.txt"), heldout_path=str(tmp_path / "c.txt"))
    assert "no training documents" in _error(open_corpus, empty, tmp_path)


def test_tokenizer_is_trained_once_on_the_training_part(tmp_path, texts):
    corpus = open_corpus(_data(path=str(texts)), tmp_path)
    tokenizer = open_tokenizer(_data(), corpus, tmp_path, 300)
    path = tmp_path / "tokenizer.json"
    train_tokenizer(_all(corpus.train), 300).save(tmp_path / "expected.json")
    assert json.loads(path.read_text()) == json.loads((tmp_path / "expected.json").read_text())
    before = path.stat().st_mtime_ns
    assert open_tokenizer(_data(), corpus, tmp_path, 300, reuse=True).encode("document") == tokenizer.encode("document")
    assert path.stat().st_mtime_ns == before
    # One that a start on other documents left is not taken.
    (tmp_path / "failed").mkdir()
    train_tokenizer(["other text"], 300).save(tmp_path / "failed" / "tokenizer.json")
    assert open_tokenizer(_data(), corpus, tmp_path / "failed", 300).digest == tokenizer.digest
    # A given one is used as it is, and has to fit the model.
    given = _data(tokenizer=str(path))
    assert open_tokenizer(given, corpus, tmp_path / "new", 512).vocab_size == tokenizer.vocab_size
    assert not (tmp_path / "new").exists()
    assert "vocabulary mismatch" in _error(open_tokenizer, given, corpus, tmp_path / "new", 270)


def test_streams_are_documents_between_ends_of_text(monkeypatch):
    monkeypatch.setattr(pipeline, "_ENCODE_TEXT", 30)  # characters that are encoded together
    tokenizer = train_tokenizer(["a"], 257)
    texts = [f"{i} x " * (5 * (i % 3)) for i in range(20)]
    parts = list(encode_documents(texts, tokenizer))
    assert [part[0] for part in parts] == [tokenizer.end_id] * 20
    assert [tokenizer.decode(part[1:]) for part in parts] == texts
    np.testing.assert_array_equal(token_stream(texts, tokenizer), np.concatenate([*parts, [tokenizer.end_id]]))


def test_prepared_data_is_the_same_data(tmp_path, texts):
    metadata = prepare(tmp_path / "out", path=str(texts), heldout_fraction=0.2, vocab_size=300)
    corpus = open_corpus(_data(path=str(texts)), tmp_path)
    data = _data(source="prepared", path=str(tmp_path / "out"))
    prepared = open_corpus(data, tmp_path / "work")
    tokenizer = open_tokenizer(data, prepared, tmp_path / "work", 300)
    np.testing.assert_array_equal(prepared.train, token_stream(corpus.train, tokenizer))
    np.testing.assert_array_equal(prepared.heldout, token_stream(corpus.heldout, tokenizer))
    assert prepared.heldout_bytes == corpus.heldout_bytes == metadata["heldout"]["bytes"]
    options = {"seq_len": 16, "batch_size": 4}
    for a, b in zip(
        heldout_batches(prepared.heldout, tokenizer, **options),
        heldout_batches(corpus.heldout, tokenizer, **options),
        strict=True,
    ):
        assert all((a[name] == b[name]).all() for name in a)
    batch = next(train_batches(prepared.train, tokenizer, seed=0, **options))
    assert {name: array.dtype.name for name, array in batch.items()} == {
        "tokens": "int32",
        "targets": "int32",
        "segment_ids": "int32",
        "positions": "int32",
        "weights": "float32",
    }
    assert "document" in tokenizer.decode(batch["tokens"][0])
    assert not (tmp_path / "work").exists()


def test_damaged_prepared_data(tmp_path, texts):
    out = tmp_path / "out"
    data = _data(source="prepared", path=str(out))
    assert f"no prepared data at {out}" in _error(open_corpus, data, tmp_path)
    prepare(out, path=str(texts), vocab_size=300)
    corpus = open_corpus(data, tmp_path)
    assert "vocabulary mismatch" in _error(open_tokenizer, data, corpus, tmp_path, 270)
    given = _data(tokenizer="t.json")
    assert "data.tokenizer does not go with prepared data" in _error(open_tokenizer, given, corpus, tmp_path, 300)
    for name, content, message in (
        ("train.bin", b"\0" * 20, "holds 10 tokens, its metadata says"),
        ("heldout.bin", b"", "cannot read the prepared data"),
        ("tokenizer.json", b"{}", "is not the tokenizer that the data was prepared with"),
        ("metadata.json", b"{", "cannot read the prepared data"),
        ("metadata.json", b"{}", "cannot read the prepared data"),
    ):
        good = pathlib.Path(out, name).read_bytes()
        pathlib.Path(out, name).write_bytes(content)
        assert message in _error(open_corpus, data, tmp_path)
        pathlib.Path(out, name).write_bytes(good)
    (out / "train.bin").unlink()
    assert "train.bin is missing" in _error(open_corpus, data, tmp_path)


def test_data_never_imports_jax():  # a worker process imports this room
    for path in pathlib.Path(pipeline.__file__).parent.glob("*.py"):
        modules = [
            name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in [getattr(node, "module", None), *(alias.name for alias in node.names)]
        ]
        assert not [name for name in modules if name and name.split(".")[0] in ("jax", "flax", "orbax")], path


def test_a_link_does_not_hide_that_held_out_text_is_trained_on(tmp_path, texts):
    (tmp_path / "heldout.txt").symlink_to(texts.parent / "3.txt")
    (tmp_path / "folder").symlink_to(texts.parent)
    for path in (tmp_path / "heldout.txt", tmp_path / "folder" / "4.txt"):
        given = _data(path=str(texts), heldout_path=str(path))
        assert f"{path} is matched by data.path and by data.heldout_path" in _error(open_corpus, given, tmp_path)


def test_literal_paths_of_every_flag(tmp_path):
    folder = tmp_path / "runs[1]"
    for name in ("train", "heldout"):
        (folder / name).mkdir(parents=True)
        (folder / name / "a.txt").write_text(f"{name} text\n" * 9)
    given = _data(path=f"{folder}/train/*.txt", heldout_path=f"{folder}/heldout/*.txt")
    assert "heldout" in _all(open_corpus(given, tmp_path).heldout)[0]
    assert "heldout" in _all(open_text(f"{folder}/heldout/*.txt", "text", tmp_path).heldout)[0]
    prepare(tmp_path / "out", path=f"{folder}/train/*.txt", heldout_path=f"{folder}/heldout/*.txt", vocab_size=257)


def test_a_run_from_another_ones_parameters_takes_its_tokenizer(tmp_path, texts):
    corpus = open_corpus(_data(path=str(texts)), tmp_path)
    inherited = train_tokenizer(["quite other words " * 9], 290)
    tokenizer = open_tokenizer(_data(), corpus, tmp_path / "new", 300, inherited=inherited)
    assert tokenizer.digest == inherited.digest != open_tokenizer(_data(), corpus, tmp_path / "own", 300).digest
    inherited.save(tmp_path / "same.json")
    same = _data(tokenizer=str(tmp_path / "same.json"))
    assert open_tokenizer(same, corpus, tmp_path / "b", 300, inherited=inherited).digest == inherited.digest
    other = _data(tokenizer=str(tmp_path / "own" / "tokenizer.json"))
    message = _error(open_tokenizer, other, corpus, tmp_path / "b", 300, inherited=inherited)
    assert "is not that of the parameters in init_from" in message and "leave out data.tokenizer" in message
    # Prepared data has its own.
    prepare(tmp_path / "out", path=str(texts), vocab_size=300)
    prepared = _data(source="prepared", path=str(tmp_path / "out"))
    opened = open_corpus(prepared, tmp_path)
    message = _error(open_tokenizer, prepared, opened, tmp_path / "b", 300, inherited=inherited)
    assert "is not that of the parameters in init_from" in message and "prepare the data with that one" in message
    prepare(tmp_path / "out2", path=str(texts), tokenizer=str(tmp_path / "same.json"))
    prepared = _data(source="prepared", path=str(tmp_path / "out2"))
    opened = open_corpus(prepared, tmp_path)
    assert open_tokenizer(prepared, opened, tmp_path / "b", 300, inherited=inherited).digest == inherited.digest


def test_a_run_goes_on_with_its_own_copy_where_the_given_tokenizer_is_gone(tmp_path, texts):
    corpus = open_corpus(_data(path=str(texts)), tmp_path)
    train_tokenizer(["words"], 258).save(tmp_path / "given.json")
    given = _data(tokenizer=str(tmp_path / "given.json"))
    (tmp_path / "run").mkdir()
    tokenizer = open_tokenizer(given, corpus, tmp_path / "run", 300)
    tokenizer.save(tmp_path / "run" / "tokenizer.json")  # as train does
    (tmp_path / "given.json").unlink()
    assert "cannot read the tokenizer" in _error(open_tokenizer, given, corpus, tmp_path / "run", 300)
    assert open_tokenizer(given, corpus, tmp_path / "run", 300, reuse=True).digest == tokenizer.digest


def test_prepared_data_knows_whether_its_tokenizer_loses_text(tmp_path, texts):
    backend = tokenizers.Tokenizer(models.WordLevel({"document": 0, "</s>": 1, "?": 2}, unk_token="?"))
    backend.save(str(tmp_path / "lossy.json"))
    for name, expected in (("lossy.json", False), (None, True)):
        options = {"tokenizer": str(tmp_path / name)} if name else {"vocab_size": 300}
        prepare(tmp_path / f"{expected}", path=str(texts), **options)
        corpus = open_corpus(_data(source="prepared", path=str(tmp_path / f"{expected}")), tmp_path)
        assert check_restored(corpus, None).restored == expected == (corpus.scored_bytes is not None)


def test_estimates_of_the_number_of_tokens(tmp_path, texts, monkeypatch):
    tokenizer = train_tokenizer(["a"], 257)
    corpus = open_corpus(_data(path=str(texts)), tmp_path)
    exact = len(token_stream(corpus.train, tokenizer)) - 1
    assert estimate_tokens(corpus.train, tokenizer) == exact
    assert estimate_tokens(np.zeros(7, np.uint16), tokenizer) == 7
    monkeypatch.setattr(pipeline, "_ENCODE_TEXT", 1000)
    assert estimate_tokens(corpus.train, tokenizer) == pytest.approx(exact, rel=0.05)
    assert estimate_tokens(["some text"] * 1000, tokenizer) == 10_000


def test_notes_on_a_corpus_that_is_too_small(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("one line\nand a second\n" * 5)
    with caplog.at_level("INFO", "absl"):
        corpus = open_corpus(_data(path=str(tmp_path / "a.txt")), tmp_path)
    assert "1 document in 1 file" in caplog.text and "1 training document;" in caplog.text
    short, few = size_notes(corpus, 10, 64)
    assert "10 tokens, less than a row of 64" in short and f"has {corpus.heldout_bytes} bytes" in few
    large = dataclasses.replace(corpus, heldout_bytes=5000)
    assert size_notes(large, 64, 64) == []
