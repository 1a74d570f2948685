"""Text to batches: documents, tokenizers, packed rows with an exact position. Imports neither JAX nor a model."""

from cubit_jax.data.corpus import Corpus, open_corpus, open_text, size_notes
from cubit_jax.data.pipeline import encode_documents, estimate_tokens, heldout_batches, token_stream, train_batches
from cubit_jax.data.tokenizer_training import check_restored, open_tokenizer

__all__ = [
    "Corpus",
    "check_restored",
    "encode_documents",
    "estimate_tokens",
    "heldout_batches",
    "open_corpus",
    "open_text",
    "open_tokenizer",
    "size_notes",
    "token_stream",
    "train_batches",
]
