"""The tokenizer of a run: that of its data, a given file, or byte-level BPE trained on its training part."""

import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers
from absl import logging
from tokenizers import decoders, models, pre_tokenizers, trainers

from cubit_jax.data.corpus import Corpus
from cubit_jax.data.tokenizer import END_OF_TEXT, Tokenizer, check_vocabulary, load_tokenizer
from cubit_jax.runtime.errors import UserError

MIN_VOCAB_SIZE = 257  # every byte, and the end of text
_TRAINING_TEXT = 100_000_000  # characters of documents that a tokenizer is trained on, at most


def open_tokenizer(
    data: Any, corpus: Corpus, workdir: str | pathlib.Path, vocab_size: int, *, reuse: bool = False
) -> Tokenizer:
    """The tokenizer of a run: that of prepared data, or `data.tokenizer`, or one trained on `corpus.train`.

    Args:
      data: config.data.
      corpus: the run's corpus.
      workdir: a trained tokenizer is kept as workdir/tokenizer.json.
      vocab_size: the model's vocabulary; the size of a tokenizer that is trained.
      reuse: take workdir/tokenizer.json if it exists, because the run there was trained with it. Otherwise a start
        without checkpoints left it, and it is trained again.

    Raises:
      UserError: no tokenizer can be read, or it has more ids than the model's vocabulary.
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


def _sample(documents: Sequence[str]) -> Iterator[str]:
    """Yields documents in a fixed random order, until _TRAINING_TEXT characters."""
    remaining = _TRAINING_TEXT
    for index in np.random.default_rng(0).permutation(len(documents)):
        text = documents[index]
        yield text[:remaining]
        remaining -= len(text)
        if remaining <= 0:
            return


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains byte-level BPE. It decodes every text exactly, and equal texts give equal tokenizers.

    Args:
      texts: what it is trained on.
      vocab_size: the largest number of ids, at least 257; fewer if the texts have not enough different pairs.

    Raises:
      UserError: vocab_size is too small.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(f"vocabulary size {vocab_size} is too small: a byte-level tokenizer needs {MIN_VOCAB_SIZE}")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # The characters of END_OF_TEXT in the texts are ordinary; otherwise they would split the words around them.
    backend.encode_special_tokens = True
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend)
