"""Tokenizes a corpus once: python -m cubit_jax.prepare --input='GLOB' --output=DIR [--train_tokenizer=VOCAB]

Training from the result (data.source=prepared data.path=DIR) reads tokens instead of text. Each process reads only its
own rows, and a run may go on with another number of processes. DIR holds

    train.bin, heldout.bin    the token streams, little-endian unsigned integers; they are cut into rows while they are
                              read, so that any seq_len can be trained
    tokenizer.json
    metadata.json             counts of documents, tokens and bytes, vocabulary, dtype, hashes of corpus and tokenizer
"""

import contextlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
import types
from typing import Any

from absl import flags, logging
from tqdm import tqdm

from cubit_jax.data import check_restored, encode_documents, open_corpus, open_tokenizer
from cubit_jax.data.sources import counted, digest
from cubit_jax.runtime import cli
from cubit_jax.runtime.errors import UserError


def define_flags():
    flags.DEFINE_string(
        "input",
        None,
        "Text to read: a glob of .txt, .md, .py, .jsonl, .jsonl.gz or .parquet files "
        "(quote it); with --source=tfds a TFDS directory; with --source=stdlib nothing.",
    )
    flags.DEFINE_enum("source", "files", ["files", "tfds", "stdlib"], "What --input is.")
    flags.DEFINE_string(
        "heldout_path",
        None,
        "Glob or TFDS directory of held-out text; if not given, a share of "
        "--input is held out by a hash of its documents' names (of TFDS the validation or test split).",
    )
    flags.DEFINE_float(
        "heldout_fraction", 0.05, "Share of the documents that is held out where no --heldout_path is given."
    )
    flags.DEFINE_string("text_field", "text", "Field or column that holds the text of a record.")
    flags.DEFINE_string("output", None, "Directory to make; it must not exist yet.")
    flags.DEFINE_string("tokenizer", None, "A tokenizer.json to use.")
    flags.DEFINE_integer(
        "train_tokenizer",
        None,
        "Train a byte-level BPE with this many entries on the training part instead; 32768 if neither flag is given.",
    )


def main():
    given = flags.FLAGS
    prepare(
        given.output,
        source=given.source,
        path=given.input,
        heldout_path=given.heldout_path,
        heldout_fraction=given.heldout_fraction,
        text_field=given.text_field,
        tokenizer=given.tokenizer,
        vocab_size=given.train_tokenizer,
    )


def prepare(
    output: str | pathlib.Path,
    *,
    source: str = "files",
    path: str | None = None,
    heldout_path: str | None = None,
    heldout_fraction: float = 0.05,
    text_field: str = "text",
    tokenizer: str | None = None,
    vocab_size: int | None = None,
) -> dict[str, Any]:
    """Writes the directory `output`, whole or not at all. Arguments as the flags.

    Returns:
      the metadata that is in metadata.json.

    Raises:
      UserError: the flags, the text or the tokenizer are wrong, or `output` exists or cannot be written.
    """
    output = pathlib.Path(output).expanduser()
    if output.exists():
        raise UserError(f"{output} exists already: give another --output, or remove it, nothing was written")
    if tokenizer and vocab_size:
        raise UserError("give --tokenizer or --train_tokenizer, not both")
    if source != "stdlib" and not path:
        raise UserError("--input is missing: give the text to read, e.g. --input='texts/*.txt'")
    data = types.SimpleNamespace(
        source=source,
        path=path,
        heldout_path=heldout_path,
        text_field=text_field,
        heldout_fraction=heldout_fraction,
        tokenizer=tokenizer,
    )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        work = pathlib.Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}-"))
    except OSError as error:
        raise UserError(f"cannot write to {output.parent}: {error.strerror}") from error
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, work, ignore_errors=True)  # it is gone if all went well
        try:
            metadata = _write(work, data, vocab_size)
            work.chmod(0o755)  # temporary directories are private
            work.rename(output)
        except OSError as error:
            raise UserError(f"cannot write {output}: {error.strerror or error}, nothing was written") from error
    return metadata


def _write(work, data, vocab_size):
    corpus = open_corpus(data, work)
    limit = sys.maxsize if data.tokenizer else vocab_size or 32_768
    tokenizer = open_tokenizer(data, corpus, work, limit)
    tokenizer.save(work / "tokenizer.json")
    dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
    metadata = {
        "vocab_size": tokenizer.vocab_size,
        "end_id": tokenizer.end_id,
        "dtype": dtype,
        "corpus": corpus.fingerprint,
        "tokenizer": digest((work / "tokenizer.json").read_text(encoding="utf-8")),
        "restored": check_restored(corpus, tokenizer).restored,
    }
    for name, documents in (("train", corpus.train), ("heldout", corpus.heldout)):
        metadata[name] = _write_stream(work / f"{name}.bin", documents, tokenizer, dtype, name)
    (work / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(work / "unpacked", ignore_errors=True)
    return metadata


def _write_stream(path, documents, tokenizer, dtype, name):
    """-> counts. The stream is  E d1.. E d2.. E  with E the end-of-text id."""
    tokens, documents = 1, _Counted(documents)
    with open(path, "wb") as file:
        for ids in _progress(encode_documents(documents, tokenizer), len(documents), f"tokenizing {name}"):
            file.write(ids.astype(dtype).tobytes())
            tokens += len(ids)
        file.write(int(tokenizer.end_id).to_bytes(int(dtype[-1]), "little"))
        file.flush()
        os.fsync(file.fileno())
    counts = (len(documents), "document"), (documents.bytes, "byte"), (tokens, "token")
    logging.info("%s: %s", name, ", ".join(counted(number, noun) for number, noun in counts))
    return {"documents": len(documents), "bytes": documents.bytes, "tokens": tokens}


class _Counted:
    """Documents that count the bytes read from them."""

    def __init__(self, documents):
        self._documents, self.bytes = documents, 0

    def __len__(self):
        return len(self._documents)

    def __getitem__(self, index):
        text = self._documents[index]
        self.bytes += len(text.encode())
        return text


def _progress(items, total, title):
    """A bar on a terminal, else a line every five seconds."""
    if sys.stderr.isatty():
        yield from tqdm(items, title, total, unit=" documents", smoothing=0)
        return
    for done, item in enumerate(items, 1):
        yield item
        logging.log_every_n_seconds(logging.INFO, "%s: %d of %d documents", 5, title, done, total)


if __name__ == "__main__":
    define_flags()
    cli.run(main, required=["output"])
