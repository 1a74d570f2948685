"""Checks a text file in one pass and finds its documents.

A .txt, .md or .py file is one document. Each line of a .jsonl file is one, by its text field. Files .jsonl.gz and
.parquet cannot be read at random places; their text is unpacked once into a spool directory, where later runs find it.
Empty documents are left out. Every mistake in a file is a one-line UserError with the file and the line or row.
"""

import array
import gzip
import hashlib
import json
import os
import pathlib
import tempfile
import zlib

import numpy as np
import pyarrow
import pyarrow.parquet
from absl import logging

from cubit_jax.runtime.errors import UserError

# Python refuses to convert integers of more than 4,300 digits. What follows a number's first digits is never used.
_JSON = json.JSONDecoder(parse_int=lambda digits: int(digits[:40]))
_TEXT_TYPES = (
    pyarrow.types.is_string,
    pyarrow.types.is_large_string,
    pyarrow.types.is_string_view,
    pyarrow.types.is_binary,
    pyarrow.types.is_large_binary,
    pyarrow.types.is_binary_view,
)
TEXT_SUFFIXES = (".txt", ".md", ".py")


def index_file(path: str, field: str, spool: str | pathlib.Path) -> tuple[str, np.ndarray, str]:
    """-> (path to read from, places, digest).

    Args:
      path: the file; its ending says what it holds.
      field: name of the text field or column.
      spool: directory for unpacked text.

    Returns:
      path: the file itself, or the unpacked text.
      places: [n, 3] int64: first byte, length in bytes, line or row from 1 (0: the whole file).
      digest: hexadecimal hash of the content.
    """
    digest = _hash()
    try:
        if path.endswith(TEXT_SUFFIXES):
            content = pathlib.Path(path).read_bytes()
            digest.update(content)
            decode(content, path)
            return path, _places([0, len(content), 0] if content else []), digest.hexdigest()
        if path.endswith(".jsonl"):
            places = array.array("q")
            with open(path, "rb") as file:
                for number, start, length, text in _json_lines(file, path, field, digest):
                    if text:
                        places.extend((start, length, number))
            return path, _places(places), digest.hexdigest()
        if path.endswith(".jsonl.gz"):
            return _unpack(path, field, spool, _gzip_texts)
        if path.endswith(".parquet"):
            return _unpack(path, field, spool, _parquet_texts)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    raise UserError(f"{path}: expected a file ending in {', '.join(TEXT_SUFFIXES)}, .jsonl, .jsonl.gz or .parquet")


def decode(content: bytes, place: str) -> str:
    """bytes -> str; UserError naming `place` and the position if they are not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 at byte {error.start} ({content[error.start]:#04x})") from error


def _hash():
    return hashlib.blake2b(digest_size=16)


def _places(flat):
    return np.asarray(flat, np.int64).reshape(-1, 3)


def _json_lines(file, path, field, digest):
    """Yields (line number, first byte, length, text) of every line that is not blank."""
    start = 0
    for number, line in enumerate(file, 1):
        digest.update(line)
        if line.strip():
            yield number, start, len(line), json_text(line, f"{path} line {number}", field)
        start += len(line)


def json_text(line: bytes, place: str, field: str) -> str:
    """The text in a line of JSON; UserError naming `place` if there is none."""
    try:
        record = _JSON.decode(decode(line, place))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{place}: expected a JSON object, found {type(record).__name__}")
    if field not in record:
        raise UserError(f"{place}: no field {field!r}; its fields are {', '.join(map(repr, record))}: set text_field")
    text = record[field]
    if not isinstance(text, str):
        raise UserError(f"{place}: the field {field!r} is {json.dumps(text)[:40]}, expected a string")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can spell half of a character
            raise UserError(f"{place}: an unpaired surrogate at character {error.start} of {field!r}") from error
    return text


def _gzip_texts(path, field, digest):
    try:
        with gzip.open(path, "rb") as file:
            for number, _, _, text in _json_lines(file, path, field, digest):
                yield number, text.encode()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: the gzip data is damaged or incomplete: {error}") from error


def _parquet_texts(path, field, digest):
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if field not in schema.names:
                raise UserError(
                    f"{path}: no column {field!r}; its columns are {', '.join(map(repr, schema.names))}: set text_field"
                )
            if schema.names.count(field) > 1:
                raise UserError(f"{path}: {schema.names.count(field)} columns are called {field!r}: rename all but one")
            kind = schema.field(field).type
            if not any(test(kind.value_type if pyarrow.types.is_dictionary(kind) else kind) for test in _TEXT_TYPES):
                raise UserError(f"{path}: column {field!r} holds {kind}, expected strings")
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                for content in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                    number += 1
                    if content is None:
                        raise UserError(f"{path} row {number}: column {field!r} is null")
                    decode(content, f"{path} row {number}")
                    digest.update(len(content).to_bytes(8, "little") + content)
                    yield number, content
    except (pyarrow.ArrowException, EOFError) as error:
        raise UserError(f"{path}: not a readable parquet file: {error}") from error


def _unpack(path, field, spool, read):
    """Text of a packed file -> spool/KEY/{text.bin, index.npz}; the key changes with the file."""
    stat = os.stat(path)
    key = _hash()
    key.update(json.dumps([os.path.abspath(path), stat.st_size, stat.st_mtime_ns, field]).encode())
    target = pathlib.Path(spool, key.hexdigest())
    if not target.exists():
        logging.info("unpacking %s into %s", path, target)
        try:
            _write_unpacked(target, read, path, field)
        except OSError as error:
            raise UserError(f"cannot unpack {path} into {spool}: {error.strerror or error}") from error
    with np.load(target / "index.npz") as index:
        return str(target / "text.bin"), index["places"], str(index["digest"])


def _write_unpacked(target, read, path, field):
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, places, start = _hash(), array.array("q"), 0
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpacking-", ignore_cleanup_errors=True) as temporary:
        with open(os.path.join(temporary, "text.bin"), "wb") as file:
            for number, content in read(path, field, digest):
                if content:
                    file.write(content)
                    places.extend((start, len(content), number))
                    start += len(content)
        np.savez(os.path.join(temporary, "index.npz"), places=_places(places), digest=digest.hexdigest())
        try:
            os.rename(temporary, target)
        except OSError:
            if not target.exists():  # else another process unpacked the same file meanwhile
                raise
