"""Globs: the same files as Python's own where there are no links; each file once where there are; literal names."""

import glob
import os
import pathlib
import time

import pytest

from cubit_jax.runtime.globs import find_files


def _found(pattern, root=None):
    found = find_files(str(pattern))
    return [os.path.relpath(path, root or found.root) for path in found.paths]


@pytest.fixture
def tree(tmp_path):
    for name in ("a.txt", "b.md", "x/a.txt", "x/y/a.txt", "x/y/.hidden.txt", ".h/a.txt", "z1/a.txt", "z2/b.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


PATTERNS = "*.txt **/*.txt ** **/* x/** x/**/a.txt */*.txt z[12]/* z?/a.* **/y/* x/../*.md .h/* none/*.txt a.txt x"
PATTERNS += " **/**/a.txt **/x/**/*.txt"


@pytest.mark.parametrize("pattern", PATTERNS.split(" "))
def test_the_same_files_as_glob(tree, pattern, monkeypatch):
    expected = sorted({path for path in glob.glob(str(tree / pattern), recursive=True) if os.path.isfile(path)})
    assert find_files(str(tree / pattern)).paths == expected
    assert find_files(str(tree / pattern)).links == 0
    monkeypatch.chdir(tree)
    relative = {os.path.realpath(path) for path in find_files(pattern).paths}
    assert relative == {os.path.realpath(path) for path in expected}


def test_loops_of_links_end_and_each_file_is_found_once(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(name)
    for link in ("latest", "again", "0"):  # with two such links Python's glob does not end
        (tmp_path / link).symlink_to(".")
    start = time.monotonic()
    found = find_files(str(tmp_path / "**/*.txt"))
    assert [pathlib.Path(path).name for path in found.paths] == ["a.txt", "b.txt", "c.txt", "d.txt"]
    assert found.links == 3 and time.monotonic() - start < 2
    assert len(find_files(str(tmp_path / "*/*.txt")).paths) == 4


def test_a_link_to_a_folder_or_a_file_is_the_same_file(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "a.txt").write_text("a")
    (tmp_path / "current").symlink_to("v1")
    (tmp_path / "hard.txt").hardlink_to(tmp_path / "v1" / "a.txt")
    assert _found(tmp_path / "*/*.txt", tmp_path) == ["v1/a.txt"]  # not the link, though its name comes first
    assert _found(tmp_path / "**/*.txt", tmp_path) == ["hard.txt"]
    assert _found(tmp_path / "current/*.txt", tmp_path) == ["current/a.txt"]


def test_what_exists_is_taken_literally(tmp_path, monkeypatch):
    for folder in ("runs[1]", "runs1", "a*b", "axb"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "[x].txt").write_text(folder)
        (tmp_path / folder / "x.txt").write_text(folder)
    for folder in ("runs[1]", "a*b"):
        assert find_files(str(tmp_path / folder / "*.txt")).root == tmp_path / folder
        assert _found(tmp_path / folder / "*.txt") == ["[x].txt", "x.txt"]
        assert _found(tmp_path / folder / "[x].txt", tmp_path) == [f"{folder}/[x].txt"]
        monkeypatch.chdir(tmp_path / folder)
        assert find_files("*.txt").paths == ["[x].txt", "x.txt"]
        assert find_files(os.path.abspath("*.txt")).paths == [str(tmp_path / folder / n) for n in ("[x].txt", "x.txt")]
    assert _found(tmp_path / "runs[12]" / "x.txt", tmp_path) == ["runs1/x.txt"]
