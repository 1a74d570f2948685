"""The files that a pattern names, each once, whatever links lead to it."""

import fnmatch
import glob
import os
import pathlib
from collections.abc import Iterator
from typing import NamedTuple


class Found(NamedTuple):
    """Files in the order of their names.

    Attributes:
      paths: the files.
      root: the folder in front of the first wildcard.
      links: number of links and loops that were left out because they lead to what was found elsewhere.
    """

    paths: list[str]
    root: pathlib.Path
    links: int


def find_files(pattern: str) -> Found:
    """The regular files that a glob names; ** crosses folders, and a wildcard matches no leading dot.

    A part of the pattern that exists as it is spelled is taken literally, so that folders may be called "run[1]". Two
    names are one file if device and inode are the same; the name without a link is kept, else the first. Every folder
    is searched once, so that links that lead back end the search.
    """
    parts = pathlib.Path(os.path.expanduser(pattern)).parts
    root, parts = pathlib.Path(parts[0] if os.path.isabs(parts[0]) else ""), parts[os.path.isabs(parts[0]) :]
    while len(parts) > 1 and (os.path.lexists(root / parts[0]) or not glob.has_magic(parts[0])):
        root, parts = root / parts[0], parts[1:]
    search = _Search()
    matched = search.expand("" if root == pathlib.Path() else str(root), parts)
    paths, seen = [], set()
    for path in sorted(matched, key=lambda path: (_is_linked(path, root), os.fsencode(path))):
        if (key := identity(path)) in seen:
            search.links += 1
        else:
            seen.add(key)
            paths.append(path)
    return Found(sorted(paths, key=os.fsencode), root, search.links)


def identity(path: str | os.PathLike) -> tuple[int, int]:
    """(device, inode) of the file that a path leads to. Equal ones are the same file."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


class _Search:
    """One search; remembers the folders that were searched for a rest of the pattern."""

    def __init__(self):
        self.links = 0
        self._searched = {}

    def expand(self, folder: str, parts: tuple[str, ...]) -> Iterator[str]:
        """The files in `folder` that `parts` name."""
        first, rest = parts[0], parts[1:]
        literal = os.path.join(folder, first)
        if os.path.lexists(literal) or not glob.has_magic(first):
            yield from self._matched(literal, rest)
        elif first == "**":
            key = *identity(folder or "."), len(parts)
            if key in self._searched:
                self.links += self._searched[key] != folder
                return
            self._searched[key] = folder
            if rest:
                yield from self.expand(folder, rest)
            for entry in _entries(folder):
                if not rest and entry.is_file():
                    yield os.path.join(folder, entry.name)
                elif entry.is_dir():
                    yield from self.expand(os.path.join(folder, entry.name), parts)
        else:
            for entry in _entries(folder):
                if fnmatch.fnmatchcase(entry.name, first):
                    yield from self._matched(os.path.join(folder, entry.name), rest)

    def _matched(self, path, rest):
        if not rest:
            if os.path.isfile(path):
                yield path
        elif os.path.isdir(path):
            yield from self.expand(path, rest)


def _entries(folder):
    """Entries without a leading dot, links last; none of a folder that cannot be read."""
    try:
        with os.scandir(folder or ".") as entries:
            found = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError:
        return []
    return sorted(found, key=lambda entry: (entry.is_symlink(), os.fsencode(entry.name)))


def _is_linked(path, root):
    """Whether a link stands between `root` and the file."""
    return os.path.realpath(path) != os.path.join(os.path.realpath(root), os.path.relpath(path, root))
