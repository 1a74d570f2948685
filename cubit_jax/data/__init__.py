"""Text to batches: documents, tokenizers, packed rows with an exact position. Imports neither JAX nor a model."""

from cubit_jax.data.corpus import Corpus, open_corpus, open_text
from cubit_jax.data.pipeline import encode_documents, heldout_batches, token_stream, train_batches
from cubit_jax.data.tokenizer_training import open_tokenizer

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
