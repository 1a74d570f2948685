"""Training and evaluation data: `open_corpus`, `open_tokenizer`, `train_batches`, `heldout_batches`."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import numpy as np
from absl import logging

from cubit_jax.data import sources
from cubit_jax.data.batches import DocumentBatches, HeldoutBatches, Prefetch, PreparedBatches
from cubit_jax.data.tokenizer import check_vocabulary, load_tokenizer, train_tokenizer
from cubit_jax.runtime.errors import UserError

_SOURCES = ("stdlib", "files", "tfds", "prepared")
_TOKENIZER_TEXT = 100_000_000  # characters of documents that a tokenizer is trained on, at most
_SHUFFLE_TOKENS = 1 << 19  # tokens in the window that is shuffled by rows: a hundred or more typical documents
_ENCODE_TEXT = 1_000_000  # characters that are encoded together


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents for training and for evaluation.

    Attributes:
      train, heldout: random-access documents (`len`, `[i] -> str`); of prepared data the token stream, [n] unsigned
        integers.
      fingerprint: hash of the content and of the split; two runs with the same one saw the same documents.
      heldout_bytes: bytes of UTF-8 in `heldout`, the denominator of bits per byte.
      tokenizer_path: the tokenizer of prepared data, else None.
    """

    train: Sequence[str] | np.ndarray
    heldout: Sequence[str] | np.ndarray
    fingerprint: str
    heldout_bytes: int
    tokenizer_path: pathlib.Path | None = None


def open_corpus(data, workdir):
    """Opens and checks the corpus that a config's `data` names; UserError if anything is wrong with it.

    The held-out documents are those of `data.heldout_path`, or of the TFDS directory's validation or test split, or
    else a share `data.heldout_fraction` of the documents by a hash of their names (for files "name" or "name:line"), of
    a single text file its end.

    Args:
      data: config.data (source, path, heldout_path, heldout_fraction, text_field).
      workdir: text of compressed and columnar files is unpacked to workdir/unpacked.
    """
    if data.source not in _SOURCES:
        raise UserError(f"unknown data.source {data.source!r}: choose one of {', '.join(_SOURCES)}")
    if data.source != "stdlib" and not data.path:
        raise UserError(f"data.source={data.source} needs data.path")
    if not 0 < data.heldout_fraction < 1:
        raise UserError(f"data.heldout_fraction must be between 0 and 1, not {data.heldout_fraction}")
    if data.source == "prepared":
        return _open_prepared(data.path)
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
    logging.info("%d training documents; held out: %d, %d bytes", len(train), len(heldout), heldout_bytes)
    return Corpus(train, heldout, sources.digest([fingerprint, split]), heldout_bytes)


def open_text(pattern, field, workdir):
    """A Corpus whose held-out part is all text of the files that match a glob; there is nothing to train on.

    Args: pattern, field as of `sources.open_files`; workdir as of `open_corpus`.
    """
    documents, fingerprint = sources.open_files(pattern, field, pathlib.Path(workdir, "unpacked"))
    size = sum(len(documents[index].encode()) for index in range(len(documents)))
    if not size:
        raise UserError(f"there is no text in {pattern}")
    return Corpus([], documents, fingerprint, size)


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
            return train, own_heldout or other, fingerprint + other_fingerprint
        return train, heldout, fingerprint
    train, fingerprint = sources.open_files(data.path, data.text_field, unpacked)
    if not data.heldout_path:
        return train, None, fingerprint
    heldout, other_fingerprint = sources.open_files(data.heldout_path, data.text_field, unpacked)
    if both := set(train.paths) & set(heldout.paths):
        raise UserError(f"{min(both)} is matched by data.path and by data.heldout_path")
    return train, heldout, fingerprint + other_fingerprint


def _open_prepared(path):
    """A directory that the program `prepare` wrote."""
    path = pathlib.Path(path).expanduser()
    try:
        metadata = json.loads((path / "metadata.json").read_text())
        streams = {name: np.memmap(path / f"{name}.bin", metadata["dtype"], "r") for name in ("train", "heldout")}
        for name, stream in streams.items():
            if len(stream) != metadata[name]["tokens"]:
                raise UserError(
                    f"{path / name}.bin holds {len(stream)} tokens, its metadata says "
                    f"{metadata[name]['tokens']}: prepare the data again"
                )
        if sources.digest((path / "tokenizer.json").read_text()) != metadata["tokenizer"]:
            raise UserError(f"{path / 'tokenizer.json'} is not the tokenizer that the data was prepared with")
        return Corpus(
            streams["train"],
            streams["heldout"],
            sources.digest([metadata["corpus"], metadata["tokenizer"]]),
            metadata["heldout"]["bytes"],
            path / "tokenizer.json",
        )
    except FileNotFoundError as error:
        raise UserError(
            f"no prepared data at {path}: {error.filename} is missing; python -m cubit_jax.prepare makes it"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read the prepared data at {path}: {error!r}") from error


def open_tokenizer(data, corpus, workdir, vocab_size, *, reuse=False):
    """The tokenizer of a run: that of prepared data, or `data.tokenizer`, or one trained on `corpus.train`.

    The last is kept as workdir/tokenizer.json. With `reuse`, one that is there already is taken: the folder holds a
    run that was trained with it. Without, it was left by a start without checkpoints and is trained again. UserError if
    the model's `vocab_size` is less than the tokenizer's.
    """
    path = corpus.tokenizer_path or data.tokenizer
    if corpus.tokenizer_path and data.tokenizer:
        raise UserError(f"data.tokenizer does not go with prepared data, whose tokens are those of {path}")
    if not path:
        path = pathlib.Path(workdir, "tokenizer.json")
        if not path.exists() or not reuse:
            logging.info("training a tokenizer of %d entries", vocab_size)
            train_tokenizer(_sample(corpus.train), vocab_size).save(path)
    tokenizer = load_tokenizer(path)
    check_vocabulary(tokenizer, vocab_size, origin=f"tokenizer {path}")
    return tokenizer


def _sample(documents):
    """Yields documents in a fixed random order, all of them unless they are long together."""
    remaining = _TOKENIZER_TEXT
    for index in np.random.default_rng(0).permutation(len(documents)):
        text = documents[index]
        yield text[:remaining]
        remaining -= len(text)
        if remaining <= 0:
            return


def train_batches(
    documents,
    tokenizer,
    *,
    seq_len,
    batch_size,
    seed,
    num_workers=0,
    process_index=0,
    process_count=1,
    shuffle_rows=None,
    prefetch=2,
):
    """Endless training batches of [batch_size / process_count, seq_len] rows: see `batches.pack` for what they hold.

    Reshuffled each epoch. Nothing of a document is cut off or repeated, and no row is padded (of prepared data only
    the last one of an epoch). Rows depend neither on `num_workers` nor on the number of processes: the global batch,
    process after process, is that of a run of one process, and the position is equal on all processes.

    Args:
      documents: `Corpus.train`: documents, or the token stream of prepared data.
      tokenizer: a Tokenizer.
      batch_size: rows of all processes together.
      seed: of the order, 0 <= seed < 2^32.
      num_workers: grain worker processes that tokenize; 0 is two threads of this process.
      shuffle_rows: rows in a window of documents' rows that are shuffled once more; None is _SHUFFLE_TOKENS of them.
      prefetch: batches that are read ahead.

    Returns:
      a `batches.Prefetch`: an iterator with `get_state() -> bytes`, `set_state(bytes)`, `epoch` and `close()`.
    """
    where = {
        "seq_len": seq_len,
        "batch_size": batch_size,
        "seed": seed,
        "process_index": process_index,
        "process_count": process_count,
    }
    if isinstance(documents, np.ndarray):
        return Prefetch(PreparedBatches(documents, tokenizer.end_id, **where), prefetch)
    shuffle_rows = shuffle_rows or -(-_SHUFFLE_TOKENS // seq_len)
    batches = DocumentBatches(documents, tokenizer, num_workers=num_workers, shuffle_rows=shuffle_rows, **where)
    return Prefetch(batches, prefetch)


def heldout_batches(documents, tokenizer, *, seq_len, batch_size, process_index=0, process_count=1):
    """Every held-out target exactly once, in batches of equal shape; `batches.HeldoutBatches`, iterable repeatedly."""
    return HeldoutBatches(
        token_stream(documents, tokenizer),
        tokenizer.end_id,
        seq_len=seq_len,
        batch_size=batch_size,
        process_index=process_index,
        process_count=process_count,
    )


def token_stream(documents, tokenizer):
    """The whole stream  E d1.. E d2.. E  as one array; prepared data is one already."""
    if isinstance(documents, np.ndarray):
        return documents
    return np.concatenate([*encode_documents(documents, tokenizer), [tokenizer.end_id]]).astype(np.int32)


def encode_documents(documents, tokenizer):
    """Yields [n + 1] int32 a document, in order: the end-of-text id and its tokens. On all cores."""
    texts, size = [], 0
    for index in range(len(documents)):
        texts.append(documents[index])
        size += len(texts[-1])
        if size >= _ENCODE_TEXT or index == len(documents) - 1:
            for ids in tokenizer.encode_batch(texts):
                yield np.asarray([tokenizer.end_id, *ids], np.int32)
            texts, size = [], 0
