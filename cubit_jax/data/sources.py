"""Random-access documents of this Python's own source, of local text files and of TFDS directories.

TensorFlow is not needed. Mistakes in the data are found while a source is opened, before training; each is a one-line
UserError that names the file and the place.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import sys
import sysconfig
from typing import Any

import numpy as np
from absl import logging

from cubit_jax.data import text_files
from cubit_jax.runtime.errors import UserError
from cubit_jax.runtime.globs import find_files

_NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
_TFDS_HELDOUT = ("validation", "valid", "test")


@dataclasses.dataclass(frozen=True)
class FileDocuments:
    """Documents as byte ranges of files: random access (`len`, `[i] -> str`), picklable, holds no text.

    Attributes:
      files: the corpus's files.
      paths: where to read their text: the files themselves, or unpacked text.
      names: their names relative to the corpus, which change neither when it is moved nor with the locale.
      file: [n] int32, index into these three.
      start, length: [n] int64, in bytes.
      number: [n] int64, line or row from 1; 0: the whole file.
      field: the text field of JSON lines.
    """

    files: tuple[str, ...]
    paths: tuple[str, ...]
    names: tuple[str, ...]
    file: np.ndarray
    start: np.ndarray
    length: np.ndarray
    number: np.ndarray
    field: str = ""

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, index: int) -> str:
        path = self.paths[self.file[index]]
        try:
            with open(path, "rb") as file:
                file.seek(self.start[index])
                content = file.read(self.length[index])
        except OSError as error:
            raise UserError(f"cannot read {path}, which was there when this program began: {error.strerror}") from error
        try:
            if len(content) != self.length[index]:
                raise ValueError
            if path.endswith(".jsonl"):
                return text_files.json_text(content, path, self.field)
            return content.decode("utf-8")
        except (ValueError, UserError) as error:
            raise UserError(f"{path} has changed since this program began to read it") from error

    def name(self, index: int) -> str:
        number = self.number[index]
        return self.names[self.file[index]] + (f":{number}" if number else "")

    def subset(self, mask: np.ndarray) -> "FileDocuments":
        """The documents where `mask` [n] is true."""
        return dataclasses.replace(
            self, **{field: getattr(self, field)[mask] for field in ("file", "start", "length", "number")}
        )

    def cut(self, share: float) -> tuple["FileDocuments", "FileDocuments"]:
        """(head, rest) of a single text file, cut at the first line that begins beyond `share` of it."""
        content = self[0].encode()
        place = content.find(b"\n", int(share * len(content))) + 1
        if not place or place == len(content):  # no line begins there
            return self, self.subset(np.zeros(1, bool))
        head, rest = np.array([place]), np.array([len(content) - place])
        return dataclasses.replace(self, length=head), dataclasses.replace(self, start=self.start + place, length=rest)


class TfdsDocuments:
    """A text feature of one split of a TFDS directory. It is opened at first use, so that it is cheap to pickle."""

    def __init__(self, directory: str | pathlib.Path, split: str, field: str, indices: np.ndarray | None = None):
        self._directory, self._split, self._field, self._indices = str(directory), split, field, indices

    @functools.cached_property
    def _records(self):
        return _import_tfds().builder_from_directory(self._directory).as_data_source(self._split)

    def __len__(self) -> int:
        return len(self._records if self._indices is None else self._indices)

    def __getitem__(self, index: int) -> str:
        number = self._number(index)
        text = self._records[number][self._field]
        place = f"{self._directory}, {self._split} record {number}"
        if not isinstance(text, (str, bytes)):
            raise UserError(f"{place}: feature {self._field!r} is {type(text).__name__}, expected text: set text_field")
        return text if isinstance(text, str) else text_files.decode(text, place)

    def name(self, index: int) -> str:
        return f"{self._split}:{self._number(index)}"

    def subset(self, mask: np.ndarray) -> "TfdsDocuments":
        """The documents where `mask` [n] is true."""
        indices = np.arange(len(self)) if self._indices is None else self._indices
        return TfdsDocuments(self._directory, self._split, self._field, indices[mask])

    def _number(self, index):
        return int(index if self._indices is None else self._indices[index])

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "_records"}


def _import_tfds():
    """TFDS, imported at first use because that takes a second."""
    # Programs that must not load TensorFlow block it with a None here, which TFDS' helpers mistake for TensorFlow.
    if sys.modules.get("tensorflow", sys) is None:
        del sys.modules["tensorflow"]
    import tensorflow_datasets

    return tensorflow_datasets


Documents = FileDocuments | TfdsDocuments


def open_stdlib() -> tuple[FileDocuments, str]:
    """This Python's own .py files, without tests and installed packages -> (FileDocuments, fingerprint).

    Sorted by name; the few files that are not UTF-8 are left out.
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    names = []
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _NOT_STDLIB]
        paths = [pathlib.Path(directory, name) for name in files if name.endswith(".py")]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file() and _is_utf8(path)]
    names.sort(key=os.fsencode)
    if not names:
        raise UserError(f"no source of the Python standard library in {root}: give text files with data.source=files")
    return _index([str(root / name) for name in names], names, field="", spool=None)


def open_files(pattern: str, field: str, spool: str | pathlib.Path) -> tuple[FileDocuments, str]:
    """The files that match a glob, in the order of their names -> (FileDocuments, fingerprint).

    Args:
      pattern: a glob; ** crosses directories. `text_files` says what the endings mean.
      field: name of the text field or column of records.
      spool: directory for the text of files that cannot be read at random places.
    """
    found = find_files(pattern)
    if not found.paths:
        hint = f": it is a directory; give '{pattern.rstrip('/')}/**/*.txt'" if os.path.isdir(pattern) else ""
        raise UserError(f"no file matches {pattern!r}{hint}")
    if found.links:
        logging.info("note: %s: %d links lead to what is there already; each file is read once", pattern, found.links)
    names = [pathlib.Path(path).relative_to(found.root).as_posix() for path in found.paths]
    return _index([os.path.abspath(path) for path in found.paths], names, field, spool)


def open_tfds(directory: str, field: str) -> tuple[TfdsDocuments, TfdsDocuments | None, str]:
    """A TFDS directory -> (train, held-out, fingerprint); no network.

    Held-out is the split called validation, valid or test, whichever comes first in this order, or None. The
    fingerprint is one of names, counts and sizes: the records are not read.
    """
    directory = pathlib.Path(os.path.expanduser(directory))
    if not (directory / "dataset_info.json").is_file():
        inside = sorted(path.parent for depth in ("*", "*/*") for path in directory.glob(f"{depth}/dataset_info.json"))
        hint = f"did you mean {inside[0]}?" if inside else "" if directory.exists() else "the directory does not exist"
        raise UserError(f"no TFDS data set at {directory}: looked for {directory / 'dataset_info.json'}; {hint}")
    try:
        info = _import_tfds().builder_from_directory(directory).info
        splits, features = dict(info.splits), list(info.features)
    except Exception as error:  # several libraries read this directory; whatever they raise means the same to a user
        raise UserError(f"cannot read the TFDS data set {directory}: {_first_line(error)}") from error
    if "train" not in splits:
        raise UserError(f"{directory} has no split called train: its splits are {', '.join(splits) or 'missing'}")
    if field not in features:
        raise UserError(f"{directory} has no feature {field!r}: its features are {', '.join(features)}; set text_field")
    names = ["train", *[name for name in _TFDS_HELDOUT if name in splits][:1]]
    sources = [TfdsDocuments(directory, name, field) for name in names]
    try:
        for source in sources:
            if len(source):
                source[0]
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"cannot read {directory} at random places: {_first_line(error)} (it has to be stored as "
            "array_record; `tfds convert_format` converts)"
        ) from error
    identity = [[name, list(map(int, split.shard_lengths)), int(split.num_bytes)] for name, split in splits.items()]
    return sources[0], sources[1] if len(sources) > 1 else None, digest([info.full_name, field, sorted(identity)])


def split_documents(documents: Documents, fraction: float) -> tuple[Documents, Documents]:
    """-> (train, held-out) by a hash of each document's name, independently of the other documents.

    If that holds out nothing, the document with the smallest hash is held out; of a single text file its end is.
    """
    count = len(documents)
    if count == 1 and isinstance(documents, FileDocuments) and documents.number[0] == 0:
        return documents.cut(1 - fraction)
    shares = np.fromiter((_share(documents.name(index)) for index in range(count)), np.float64, count)
    held_out = shares < fraction
    if not held_out.any() and count:
        held_out = shares == shares.min()
    return documents.subset(~held_out), documents.subset(held_out)


def counted(number: int, noun: str) -> str:
    """The number and its noun, in the plural where it is not 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def digest(value: Any) -> str:
    """Hexadecimal hash of a JSON value."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _share(name):
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()) / 2**64


def _first_line(error):
    return next(iter(str(error).splitlines()), repr(error))


def _is_utf8(path):
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _index(paths, names, field, spool):
    # The bytes of a name are UTF-8 in whatever locale it was read.
    names = [os.fsencode(name).decode("utf-8", "surrogateescape") for name in names]
    indexed = [text_files.index_file(path, field, spool) for path in paths]
    file = np.repeat(np.arange(len(paths), dtype=np.int32), [len(places) for _, places, _ in indexed])
    start, length, number = np.concatenate([places for _, places, _ in indexed]).T
    texts = tuple(path for path, _, _ in indexed)
    source = FileDocuments(tuple(paths), texts, tuple(names), file, start, length, number, field)
    logging.info("%s in %s", counted(len(source), "document"), counted(len(paths), "file"))
    return source, digest([field, names, [content for _, _, content in indexed]])
