"""Text to batches: documents, tokenizers, packed rows with an exact position. Imports neither JAX nor a model."""

from cubit_jax.data.corpus import (
    Corpus,
    encode_documents,
    heldout_batches,
    open_corpus,
    open_text,
    open_tokenizer,
    token_stream,
    train_batches,
)

__all__ = [
    "Corpus",
    "encode_documents",
    "heldout_batches",
    "open_corpus",
    "open_text",
    "open_tokenizer",
    "token_stream",
    "train_batches",
]
