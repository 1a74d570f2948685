"""The tokenizer of a run: that of its data, a given file, or byte-level BPE trained on its training part."""

import dataclasses
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
_RESTORED_TEXT = 1_000_000  # characters of held-out text, at most, that a tokenizer has to give back
_LONGEST_WORD = 256  # bytes of a word that a tokenizer is trained on


def open_tokenizer(
    data: Any,
    corpus: Corpus,
    workdir: str | pathlib.Path,
    vocab_size: int,
    *,
    reuse: bool = False,
    inherited: Tokenizer | None = None,
) -> Tokenizer:
    """The tokenizer of a run: of prepared data, or `data.tokenizer`, or `inherited`, or one trained on `corpus.train`.

    Args:
      data: config.data.
      corpus: the run's corpus.
      workdir: a trained tokenizer is kept as workdir/tokenizer.json.
      vocab_size: the model's vocabulary; the size of a tokenizer that is trained.
      reuse: the run has checkpoints, so that workdir/tokenizer.json is its own copy; it is taken if no other file is
        given or the given one is gone. Without, a start without checkpoints left it, and it is trained again.
      inherited: the tokenizer of the parameters that a new run begins with; any other is refused.

    Raises:
      UserError: no tokenizer can be read, it is not the inherited one, or it has more ids than the model's vocabulary.
    """
    given, own = corpus.tokenizer_path or data.tokenizer, pathlib.Path(workdir, "tokenizer.json")
    if corpus.tokenizer_path and data.tokenizer:
        raise UserError(f"data.tokenizer does not go with prepared data, whose tokens are those of {given}")
    if reuse and own.exists() and not (given and pathlib.Path(given).expanduser().exists()):
        path = own
    elif given:
        path = pathlib.Path(given)
    elif inherited:
        path = own
        inherited.save(own)
    else:
        path = own
        logging.info("training a tokenizer of %d entries", vocab_size)
        train_tokenizer(_sample(corpus.train), vocab_size).save(own)
    tokenizer = load_tokenizer(path)
    if inherited and inherited.digest != tokenizer.digest:
        hint = (
            "prepare the data with that one" if corpus.tokenizer_path else "leave out data.tokenizer to take that one"
        )
        raise UserError(
            f"tokenizer {path} (hash {tokenizer.digest[:8]}) is not that of the parameters in init_from (hash "
            f"{inherited.digest[:8]}), whose ids mean other text: {hint}"
        )
    check_vocabulary(tokenizer, vocab_size, origin=f"tokenizer {path}")
    return tokenizer


def check_restored(corpus: Corpus, tokenizer: Tokenizer) -> Corpus:
    """`corpus` as it was, or, with a note, as one without bits per byte.

    The latter if `tokenizer` does not give a sample of the held-out text back: what it loses costs no bits. Of prepared
    data this was found out when it was prepared.
    """
    if isinstance(corpus.heldout, np.ndarray):
        lost = not corpus.restored
    else:
        lost = not tokenizer.restores(_sample(corpus.heldout, _RESTORED_TEXT))
    if lost:
        logging.info("note: the tokenizer does not give the text back exactly: bits per byte are left out")
    return dataclasses.replace(corpus, restored=not lost)


def _sample(documents: Sequence[str], remaining: int = _TRAINING_TEXT) -> Iterator[str]:
    """Yields documents in a fixed random order, until `remaining` characters."""
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
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # The time of training grows with the square of a word's length, so long words are cut.
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(_LONGEST_WORD)])
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
    backend.pre_tokenizer = words
    return Tokenizer(backend)
