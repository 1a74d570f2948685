"""Document sources: what is a document, the split, and one-line errors that name the place."""

import functools
import gzip
import json
import os
import pathlib
import pickle
import re
import socket
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from cubit_jax.data import sources, train_batches
from cubit_jax.data.sources import open_files
from cubit_jax.data.tokenizer_training import train_tokenizer
from cubit_jax.runtime.errors import UserError

TEXTS = ["first", "zwei\r\nLinien\n", "日本 😀", "a<|endoftext|>b", "\ttab \x00"]


def _texts(documents):
    return [documents[i] for i in range(len(documents))]


def _names(documents):
    return [documents.name(i) for i in range(len(documents))]


def _json_lines(texts, **more):
    return "".join(json.dumps({"id": 1, "text": text} | more) + "\n" for text in texts)


def _write(path, texts):
    """One file of records, in the format that its name asks for."""
    name = str(path)
    if name.endswith(".jsonl"):
        path.write_text(_json_lines(texts))
    elif name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(_json_lines(texts).encode()))
    elif name.endswith(".parquet"):
        table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
        pyarrow.parquet.write_table(table, name, row_group_size=2)


def _open(directory, pattern, field="text"):
    return sources.open_files(str(directory / pattern), field, str(directory / "unpacked"))


def _error(function, *args):
    with pytest.raises(UserError) as caught:
        function(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_stdlib_is_sorted_source_without_tests():
    documents, fingerprint = sources.open_stdlib()
    names = _names(documents)
    assert len(names) > 300
    assert names == sorted(names)
    assert {"json/decoder.py", "os.py", "asyncio/base_events.py"} <= set(names)
    assert not [n for n in names if {"test", "tests", "idle_test", "site-packages"} & set(n.split("/"))]
    assert documents[names.index("os.py")].encode() == pathlib.Path(os.__file__).read_bytes()
    assert sources.open_stdlib()[1] == fingerprint


def test_text_files_are_documents(tmp_path):
    (tmp_path / "b").mkdir()
    for name, content in (("a.txt", "one\r\n"), ("b/z.txt", "two"), ("b/y.md", "three"), ("empty.txt", "")):
        (tmp_path / name).write_bytes(content.encode())
    documents, _ = _open(tmp_path, "**/*.txt")
    assert list(zip(_names(documents), _texts(documents))) == [("a.txt", "one\r\n"), ("b/z.txt", "two")]
    assert _texts(_open(tmp_path, "b/*")[0]) == ["three", "two"]
    assert _names(_open(tmp_path, "b/z.txt")[0]) == ["z.txt"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_records_are_documents(tmp_path, name):
    _write(tmp_path / name, [*TEXTS, "", "last"])
    documents, _ = _open(tmp_path, "*.*")
    assert _texts(documents) == [*TEXTS, "last"]
    assert _names(documents) == [f"{name}:{i}" for i in (1, 2, 3, 4, 5, 7)]
    assert _texts(pickle.loads(pickle.dumps(documents))) == [*TEXTS, "last"]
    assert _texts(documents.subset(np.array([0, 1, 0, 0, 0, 1], bool))) == [TEXTS[1], "last"]
    before = sorted(os.stat(path).st_mtime_ns for path in (tmp_path / "unpacked").rglob("*"))
    assert _texts(_open(tmp_path, "*.*")[0]) == [*TEXTS, "last"]  # unpacked text is found again
    assert before == sorted(os.stat(path).st_mtime_ns for path in (tmp_path / "unpacked").rglob("*"))


def test_unpacked_text_follows_a_changed_file(tmp_path):
    _write(tmp_path / "a.parquet", ["old"])
    first = _open(tmp_path, "*.parquet")[1]
    _write(tmp_path / "a.parquet", ["new", "newer"])
    documents, second = _open(tmp_path, "*.parquet")
    assert _texts(documents) == ["new", "newer"] and first != second


def test_blank_lines_are_no_documents_but_count(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n" + _json_lines(["x"]) + "  \n" + _json_lines(["y"]).rstrip("\n"))
    documents, _ = _open(tmp_path, "a.jsonl")
    assert list(zip(_names(documents), _texts(documents))) == [("a.jsonl:2", "x"), ("a.jsonl:4", "y")]


def test_fingerprint_follows_content_and_field_only(tmp_path):
    for directory, texts in (("a", ["x", "y"]), ("b", ["x", "y"]), ("c", ["x", "z"])):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "d.jsonl").write_text(_json_lines(texts, other="o"))
    a, b, c = (_open(tmp_path / directory, "*.jsonl")[1] for directory in "abc")
    assert a == b != c
    assert _open(tmp_path / "a", "*.jsonl", "other")[1] != a


def test_split_depends_on_the_name_alone(tmp_path):
    _write(tmp_path / "a.jsonl", [str(i) for i in range(2000)])
    documents, _ = _open(tmp_path, "*.jsonl")
    train, heldout = sources.split_documents(documents, 0.1)
    assert sorted(_texts(train) + _texts(heldout), key=int) == _texts(documents)
    assert 140 < len(heldout) < 260
    part = documents.subset(np.arange(2000) % 3 == 0)
    assert set(_texts(sources.split_documents(part, 0.1)[1])) == set(_texts(part)) & set(_texts(heldout))
    # The share grows by documents being added to it, and the rule is pinned: a saved run must find its split again.
    assert set(_names(heldout)) <= set(_names(sources.split_documents(documents, 0.2)[1]))
    assert _names(heldout)[:4] == [f"a.jsonl:{line}" for line in (6, 7, 8, 13)]


def test_a_small_corpus_still_holds_one_document_out(tmp_path):
    _write(tmp_path / "a.jsonl", ["x", "y", "z"])
    train, heldout = sources.split_documents(_open(tmp_path, "*.jsonl")[0], 1e-9)
    assert (len(train), len(heldout)) == (2, 1)


BAD_LINES = {
    "truncated": (b'{"text": "x', "not valid JSON"),
    "not an object": (b'["text"]', "expected a JSON object"),
    "no field": (b'{"id": 1, "body": "x"}', "no field 'text'; its fields are 'id', 'body'"),
    "null": (b'{"text": null}', "is null, expected a string"),
    "not UTF-8": (b'{"text": "\xff"}', "not UTF-8 at byte 10 (0xff)"),
    "half a character": (b'{"text": "a\\ud83d"}', "unpaired surrogate at character 1"),
}


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("kind", BAD_LINES)
def test_bad_json_lines_are_named(tmp_path, kind, ending):
    line, expected = BAD_LINES[kind]
    content = _json_lines(["x"]).encode() + b"\n" + line + b"\n" + _json_lines(["y"]).encode()
    path = tmp_path / f"a{ending}"
    path.write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    message = _error(_open, tmp_path, "a*")
    assert f"{path} line 3" in message and expected in message
    assert not list(tmp_path.glob("unpacked/*"))


def test_bad_files_are_named(tmp_path):
    assert "no file matches" in _error(_open, tmp_path, "*.txt") and str(tmp_path) in _error(_open, tmp_path, "*.txt")
    assert "it is a directory; give" in _error(_open, tmp_path, "")
    (tmp_path / "a.txt").write_bytes(b"good\xc3\x28bad")
    assert f"{tmp_path}/a.txt: not UTF-8 at byte 4 (0xc3)" in _error(_open, tmp_path, "*.txt")
    (tmp_path / "a.csv").write_text("x")
    assert "a.csv: expected a file ending in" in _error(_open, tmp_path, "*.csv")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(_json_lines(TEXTS * 9).encode())[:-20])
    assert "a.jsonl.gz: the gzip data is damaged or incomplete" in _error(_open, tmp_path, "*.gz")
    (tmp_path / "a.jsonl.gz").write_bytes(b"plain text")
    assert "a.jsonl.gz: the gzip data is damaged" in _error(_open, tmp_path, "*.gz")


def test_bad_parquet_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 no")
    assert f"{path}: not a readable parquet file" in _error(_open, tmp_path, "*.parquet")
    _write(path, ["x", "y", None])
    assert f"{path} row 3: column 'text' is null" in _error(_open, tmp_path, "*.parquet")
    assert "no column 'body'; its columns are 'id', 'text'" in _error(_open, tmp_path, "*.parquet", "body")
    assert "column 'id' holds int64, expected strings" in _error(_open, tmp_path, "*.parquet", "id")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "not a readable parquet file" in _error(_open, tmp_path, "*.parquet")


def test_what_is_no_tfds_directory_is_named_without_a_network(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    directory = tmp_path / "1.0.0"
    message = _error(sources.open_tfds, tmp_path / "no", "text")
    assert f"looked for {tmp_path / 'no' / 'dataset_info.json'}; the directory does not exist" in message
    directory.mkdir()
    (directory / "dataset_info.json").write_text("{")
    assert f"did you mean {directory}?" in _error(sources.open_tfds, tmp_path, "text")
    assert f"cannot read the TFDS data set {directory}" in _error(sources.open_tfds, directory, "text")


TFDS_WRITER = """
import pathlib, sys
import numpy
import tensorflow_datasets as tfds

class Texts(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.0.0")
    def __init__(self, name, splits, features, **options):
        self.name, self._splits, self._features = name, splits, features
        super().__init__(file_format="array_record", **options)
    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=self._features)
    def _split_generators(self, dl_manager):
        return {name: self._generate_examples(texts) for name, texts in self._splits.items()}
    def _generate_examples(self, texts):
        yield from enumerate({"text": text, "label": 1} for text in texts)

features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "label": tfds.features.Scalar(numpy.int64)})
train, heldout = [f"train {i} \\u65e5" for i in range(60)], [f"test {i}" for i in range(7)]
both = {"train": train, "test": heldout}
for name, splits in (("both", both), ("one", {"train": train}), ("none", {"test": heldout}), ("old", both)):
    Texts(name, splits, features, data_dir=sys.argv[1]).download_and_prepare()
info = pathlib.Path(sys.argv[1], "old", "1.0.0", "dataset_info.json")
info.write_text(info.read_text().replace('"array_record"', '"tfrecord"'))
assert "tensorflow" not in sys.modules
"""

TFDS_READER = """
import socket, sys, types
sys.modules["tensorflow"] = None  # importing it raises ImportError
def refuse(*_):
    raise AssertionError("network")
socket.socket.connect = refuse
from cubit_jax.runtime.errors import UserError
from cubit_jax.data import open_corpus, train_batches
from cubit_jax.data.tokenizer_training import train_tokenizer

folder = sys.argv[1]
train, heldout = [f"train {i} \\u65e5" for i in range(60)], [f"test {i}" for i in range(7)]
def corpus(name, field="text", heldout_path=None):
    return open_corpus(types.SimpleNamespace(source="tfds", path=f"{folder}/{name}/1.0.0", heldout_path=heldout_path,
                                             heldout_fraction=0.2, text_field=field), folder)
def texts(documents):
    return [documents[i] for i in range(len(documents))]

if __name__ == "__main__":
    both = corpus("both")
    assert sorted(texts(both.train)) == sorted(train) and sorted(texts(both.heldout)) == sorted(heldout)
    assert both.heldout_bytes == sum(map(len, heldout)) and both.fingerprint == corpus("both").fingerprint
    one = corpus("one")
    assert sorted(texts(one.train) + texts(one.heldout)) == sorted(train) and 4 < len(one.heldout) < 20
    assert texts(corpus("one", heldout_path=f"{folder}/both/1.0.0").heldout) == texts(both.heldout)
    same = f"{folder}/both/../one/1.0.0"
    for name, field, message in (("one", "text", "is data.path too"),
                                 ("none", "text", "no split called train"), ("one", "body", "no feature 'body'"),
                                 ("one", "label", "expected text"), ("old", "text", "stored as array_record")):
        try:
            corpus(name, field, same if "data.path" in message else None)
        except UserError as error:
            assert message in str(error) and "\\n" not in str(error), error
        else:
            raise AssertionError(message)

    def batches(num_workers):
        return train_batches(one.train, train_tokenizer(train, 300), seq_len=16, batch_size=4, seed=0,
                             num_workers=num_workers)
    straight, resumed = batches(0), batches(1)
    for _ in range(4):
        next(straight)
    resumed.set_state(straight.get_state())
    for _ in range(6):
        expected, got = next(straight), next(resumed)
        assert all((got[name] == expected[name]).all() for name in expected)
    straight.close()
    resumed.close()
    assert sys.modules.get("tensorflow") is None
    print("read and resumed")
"""


def test_tfds_directory_is_written_read_and_resumed_without_tensorflow(tmp_path):
    for name, script in (("write.py", TFDS_WRITER), ("read.py", TFDS_READER)):
        (tmp_path / name).write_text(script)
        result = subprocess.run(
            [sys.executable, tmp_path / name, tmp_path / "data"],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            timeout=120,
            check=False,
        )
        assert result.returncode == 0, result.stderr
    assert "read and resumed" in result.stdout


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_files_that_change_while_they_are_read_are_named(tmp_path, num_workers):
    tokenizer = train_tokenizer(["a"], 257)
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("some text\n" * 50)
        (tmp_path / f"{number}.jsonl").write_text('{"text": "some text"}\n')

    def read(ending):
        documents, _ = open_files(str(tmp_path / f"*.{ending}"), "text", tmp_path)
        batches = train_batches(documents, tokenizer, seq_len=16, batch_size=4, seed=0, num_workers=num_workers)
        for number in range(3):
            damage(tmp_path / f"{number}.{ending}")
        with pytest.raises(UserError) as caught:
            next(batches)
        return str(caught.value)

    damage = pathlib.Path.unlink
    assert re.search(r"cannot read .*\d\.txt, which was there when this program began: No such file", read("txt"))
    contents = ("", '{"text": 3}'.ljust(22), '{"txt": "some text"} '.ljust(22), "x" * 22)
    for content in contents[: 1 if num_workers else None]:  # starting workers takes seconds
        damage = functools.partial(pathlib.Path.write_text, data=content)
        for number in range(3):
            (tmp_path / f"{number}.jsonl").write_text('{"text": "some text"}\n')
        assert re.search(r"\d\.jsonl has changed since this program began", read("jsonl"))


def test_each_file_is_one_document_whatever_links_lead_to_it(tmp_path, caplog):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(name)
    expected = _open(tmp_path, "**/*.txt")[1]
    (tmp_path / "latest").symlink_to(".")
    (tmp_path / "e.txt").hardlink_to(tmp_path / "d.txt")
    with caplog.at_level("INFO", "absl"):
        documents, fingerprint = _open(tmp_path, "**/*.txt")
    assert _names(documents) == ["a.txt", "b.txt", "c.txt", "d.txt"] and fingerprint == expected
    assert "2 links lead to what is there already" in caplog.text
    assert "4 documents in 4 files" in caplog.text


def test_columns_that_share_a_name_are_one_line(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["x"]), pyarrow.array(["y"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert "2 columns are called 'text'" in _error(_open, tmp_path, "*.parquet")


@pytest.mark.parametrize("kind", ["dictionary", "string_view", "binary_view", "large_string"])
def test_every_column_of_strings_is_read_without_loss(tmp_path, kind):
    column = pyarrow.array([*TEXTS, *TEXTS, "x" * 5000])
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(pyarrow, kind)())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert _texts(_open(tmp_path, "*.parquet")[0]) == [*TEXTS, *TEXTS, "x" * 5000]


def test_integers_of_any_length_stand_beside_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "n": %s, "m": -1}\n' % ("9" * 5000))
    documents, _ = _open(tmp_path, "*.jsonl")
    assert _texts(documents) == ["a"]
    assert "is 999" in _error(_open, tmp_path, "*.jsonl", "n")


def test_a_literal_path_with_glob_characters(tmp_path, monkeypatch):
    for folder in ("runs[1]", "runs1"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(folder)
    assert _texts(_open(tmp_path, "runs[1]/*.txt")[0]) == ["runs[1]"]
    assert _texts(_open(tmp_path, "runs[1]/a.txt")[0]) == ["runs[1]"]
    monkeypatch.chdir(tmp_path / "runs[1]")
    assert _names(sources.open_files("*.txt", "text", tmp_path)[0]) == ["a.txt"]
    hint = re.search(r"give '(.*)'", _error(sources.open_files, str(tmp_path / "runs[1]"), "text", tmp_path))[1]
    assert _texts(sources.open_files(hint, "text", tmp_path)[0]) == ["runs[1]"]


LOCALES = """
import sys
from cubit_jax.data import sources
from cubit_jax.data.tokenizer import load_tokenizer
documents, fingerprint = sources.open_files(sys.argv[1] + "/*.txt", "text", sys.argv[1])
heldout = sources.split_documents(documents, 0.5)[1]
tokenizer = load_tokenizer(sys.argv[1] + "/tokenizer.json")
print(fingerprint, [ascii(heldout.name(i)) for i in range(len(heldout))], tokenizer.digest)
"""


def test_no_locale_changes_names_split_or_hashes(tmp_path):
    for name in ("\u00e9", "\u65e5", "a", "\U0001f600", "z"):
        (tmp_path / f"{name}.txt").write_text(name, encoding="utf-8")
    train_tokenizer(["\u00e9\u65e5 " * 9], 300).save(tmp_path / "tokenizer.json")
    printed = {
        subprocess.run(
            # Without the UTF-8 mode the C locale's file names are ASCII, as the other old locales are not installed.
            [sys.executable, "-X", "utf8=0", "-c", LOCALES, tmp_path],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONCOERCECLOCALE": "0", "LC_ALL": locale},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        for locale in ("C.UTF-8", "C")
    }
    assert len(printed) == 1 and len(printed.pop()) > 60
