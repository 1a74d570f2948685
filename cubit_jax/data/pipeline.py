"""From documents or a token stream to batches: `train_batches` for training, `heldout_batches` for evaluation."""

from collections.abc import Iterator, Sequence

import numpy as np

from cubit_jax.data.document_batches import DocumentBatches
from cubit_jax.data.read_ahead import Prefetch
from cubit_jax.data.sources import FileDocuments
from cubit_jax.data.stream_batches import HeldoutBatches, PreparedBatches
from cubit_jax.data.tokenizer import Tokenizer

_SHUFFLE_TOKENS = 1 << 19  # tokens per window of rows that are shuffled: a hundred or more typical documents
_ENCODE_TEXT = 1_000_000  # characters that are encoded together


def train_batches(
    documents: Sequence[str] | np.ndarray,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    num_workers: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    shuffle_rows: int | None = None,
    prefetch: int = 2,
) -> Prefetch:
    """Endless training batches of [batch_size / process_count, seq_len] rows; `packing.pack` says what they hold.

    Documents are reshuffled each epoch. Every token is predicted once per epoch, and no row is padded (of prepared
    data only the last row of an epoch). The rows do not depend on `num_workers` or on the number of processes: the
    global batch is that of a run of one process, and the position is the same on all processes.

    Args:
      documents: `Corpus.train`: documents, or the token stream of prepared data.
      tokenizer: the tokenizer; of prepared data its end-of-text id alone is used.
      batch_size: rows of all processes together.
      seed: of the order, 0 <= seed < 2^32.
      num_workers: grain worker processes that tokenize; 0: two threads of this process.
      shuffle_rows: rows per window of documents' rows that are shuffled; None: as many as hold _SHUFFLE_TOKENS.
      prefetch: batches that are read ahead.

    Returns:
      an iterator with `get_state() -> bytes`, `set_state(bytes)`, `epoch` and `close()`.

    Raises:
      UserError: batch_size is not a multiple of process_count; while iterating, if a document cannot be read.
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


def heldout_batches(
    documents: Sequence[str] | np.ndarray,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
) -> HeldoutBatches:
    """Every held-out target exactly once, in batches of equal shape. Arguments as of `train_batches`."""
    return HeldoutBatches(
        token_stream(documents, tokenizer),
        tokenizer.end_id,
        seq_len=seq_len,
        batch_size=batch_size,
        process_index=process_index,
        process_count=process_count,
    )


def token_stream(documents: Sequence[str] | np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """The whole token stream  E d1.. E d2.. E  as one array [n] int32. Prepared data is returned as it is."""
    if isinstance(documents, np.ndarray):
        return documents
    return np.concatenate([*encode_documents(documents, tokenizer), [tokenizer.end_id]]).astype(np.int32)


def estimate_tokens(documents: Sequence[str] | np.ndarray, tokenizer: Tokenizer) -> int:
    """About how many tokens an epoch has: exact of prepared data and of a small corpus, else from a random sample."""
    if isinstance(documents, np.ndarray):
        return len(documents)
    tokens = size = count = 0
    for index in np.random.default_rng(0).permutation(len(documents)):
        text = documents[index]
        tokens += 1 + len(tokenizer.encode(text[:_ENCODE_TEXT])) * max(len(text), 1) // max(len(text[:_ENCODE_TEXT]), 1)
        size, count = size + len(text.encode()), count + 1
        if size >= _ENCODE_TEXT:
            break
    # Tokens follow the bytes of documents more closely than their number; a TFDS directory does not tell bytes.
    share = size / documents.length.sum() if isinstance(documents, FileDocuments) else count / len(documents)
    return tokens if count == len(documents) else round(tokens / share)


def encode_documents(documents: Sequence[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yields [n + 1] int32 per document, in order: the end-of-text id and its tokens. Uses all cores."""
    texts, size = [], 0
    for index in range(len(documents)):
        texts.append(documents[index])
        size += len(texts[-1])
        if size >= _ENCODE_TEXT or index == len(documents) - 1:
            for ids in tokenizer.encode_batch(texts):
                yield np.asarray([tokenizer.end_id, *ids], np.int32)
            texts, size = [], 0
