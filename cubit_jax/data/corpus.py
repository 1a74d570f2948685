"""Opening the corpus of a run: the documents that a config names, checked, and split into training and held-out."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging

from cubit_jax.data import sources
from cubit_jax.data.prepared import open_prepared
from cubit_jax.runtime.errors import UserError
from cubit_jax.runtime.globs import identity

_SOURCES = ("stdlib", "files", "tfds", "prepared")
_FEW_BYTES = 1000  # of held-out text, below which a note is due


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents for training and for evaluation.

    Attributes:
      train, heldout: random-access documents (`len`, `[i] -> str`). Of prepared data: token streams, [n] unsigned int.
      fingerprint: hash of the content and of the split. Equal fingerprints mean equal documents.
      heldout_bytes: bytes of UTF-8 in `heldout`.
      tokenizer_path: the tokenizer of prepared data, else None.
      restored: whether the tokenizer gives the text back exactly (`check_restored`).
    """

    train: Sequence[str] | np.ndarray
    heldout: Sequence[str] | np.ndarray
    fingerprint: str
    heldout_bytes: int
    tokenizer_path: pathlib.Path | None = None
    restored: bool = True

    @property
    def scored_bytes(self) -> int | None:
        """The denominator of bits per byte; None if they would be too low because the tokenizer loses text."""
        return self.heldout_bytes if self.restored else None


def open_corpus(data: Any, workdir: str | pathlib.Path) -> Corpus:
    """Opens and checks the corpus that a config's `data` names.

    The held-out documents are those of `data.heldout_path`, or of the TFDS directory's validation or test split.
    Without either they are a share `data.heldout_fraction` of the documents by a hash of their names (for files "name"
    or "name:line"); of a single text file they are its end.

    Args:
      data: config.data (source, path, heldout_path, heldout_fraction, text_field).
      workdir: text of compressed and columnar files is unpacked to workdir/unpacked.

    Raises:
      UserError: the config, a file or a document is wrong, or a part is empty.
    """
    if data.source not in _SOURCES:
        raise UserError(f"unknown data.source {data.source!r}: choose one of {', '.join(_SOURCES)}")
    if data.source != "stdlib" and not data.path:
        raise UserError(f"data.source={data.source} needs data.path")
    if not 0 < data.heldout_fraction < 1:
        raise UserError(f"data.heldout_fraction must be between 0 and 1, not {data.heldout_fraction}")
    if data.source == "prepared":
        return Corpus(*open_prepared(data.path))
    train, heldout, fingerprint = _open_documents(data, pathlib.Path(workdir, "unpacked"))
    if not len(train) and not heldout:
        raise UserError(f"the corpus is empty: no text in {data.path or data.source}")
    split = "given"
    if heldout is None:
        split = data.heldout_fraction
        train, heldout = sources.split_documents(train, split)
    if not len(train):
        raise UserError(
            f"no training documents: all {len(heldout)} of {data.path or data.source} are held out; give "
            "held-out text of its own with heldout_path, or lower heldout_fraction"
        )
    heldout_bytes = sum(len(heldout[index].encode()) for index in range(len(heldout)))
    if not heldout_bytes:
        raise UserError(
            f"the held-out part is empty: no text in {data.heldout_path or data.path}"
            + ("" if data.heldout_path else " that can be held out; give some with heldout_path")
        )
    logging.info(
        "%s; held out: %s, %s",
        sources.counted(len(train), "training document"),
        sources.counted(len(heldout), "document"),
        sources.counted(heldout_bytes, "byte"),
    )
    return Corpus(train, heldout, sources.digest([fingerprint, split]), heldout_bytes)


def open_text(pattern: str, field: str, workdir: str | pathlib.Path) -> Corpus:
    """A Corpus whose held-out part is all text of the files that match a glob. It has no training part.

    Args:
      pattern, field: as of `sources.open_files`.
      workdir: as of `open_corpus`.

    Raises:
      UserError: no file matches, a file is wrong, or there is no text.
    """
    documents, fingerprint = sources.open_files(pattern, field, pathlib.Path(workdir, "unpacked"))
    size = sum(len(documents[index].encode()) for index in range(len(documents)))
    if not size:
        raise UserError(f"there is no text in {pattern}")
    return Corpus([], documents, fingerprint, size)


def size_notes(corpus: Corpus, train_tokens: int, seq_len: int) -> list[str]:
    """Lines for the user about a corpus that is too small for its numbers to mean much."""
    notes = []
    if train_tokens < seq_len:
        notes.append(
            f"the training part has {sources.counted(train_tokens, 'token')}, less than a row of {seq_len}: every row "
            "repeats all of it; give more text, or lower seq_len"
        )
    if corpus.heldout_bytes < _FEW_BYTES:
        notes.append(
            f"the held-out part has {sources.counted(corpus.heldout_bytes, 'byte')}: its loss means little; raise "
            "data.heldout_fraction or give data.heldout_path"
        )
    return notes


def _open_documents(data, unpacked):
    """-> (train, held-out or None, fingerprint)."""
    if data.source == "stdlib":
        train, fingerprint = sources.open_stdlib()
        if data.heldout_path:
            raise UserError("data.heldout_path does not go with data.source=stdlib")
        return train, None, fingerprint
    if data.source == "tfds":
        train, heldout, fingerprint = sources.open_tfds(data.path, data.text_field)
        if data.heldout_path:
            other, own_heldout, other_fingerprint = sources.open_tfds(data.heldout_path, data.text_field)
            if not own_heldout and os.path.samefile(*map(os.path.expanduser, (data.path, data.heldout_path))):
                raise UserError(f"{data.heldout_path} is data.path too, and has no validation or test split")
            return train, own_heldout or other, fingerprint + other_fingerprint
        return train, heldout, fingerprint
    train, fingerprint = sources.open_files(data.path, data.text_field, unpacked)
    if not data.heldout_path:
        return train, None, fingerprint
    heldout, other_fingerprint = sources.open_files(data.heldout_path, data.text_field, unpacked)
    trained = {identity(path) for path in train.files}
    if both := [path for path in heldout.files if identity(path) in trained]:
        raise UserError(f"{both[0]} is matched by data.path and by data.heldout_path, as it is or by a link")
    return train, heldout, fingerprint + other_fingerprint
