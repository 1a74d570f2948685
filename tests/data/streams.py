"""Documents whose tokens can be told apart, and the reading of batches back into documents."""

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

from cubit_jax.data import train_batches
from cubit_jax.data.tokenizer import END_OF_TEXT, Tokenizer

END = 1000


def _numbers():
    """A tokenizer whose ids are the numbers that a text consists of: "7 7 3" -> [7, 7, 3]."""
    backend = tokenizers.Tokenizer(models.WordLevel({str(i): i for i in range(END)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([END_OF_TEXT])
    return Tokenizer(backend)


TOKENIZER = _numbers()
# Document i says i again and again: short documents, among them empty ones, and one of many rows.
LENGTHS = [*np.random.default_rng(0).integers(0, 40, 52), 300]
DOCUMENTS = [" ".join([str(i)] * n) for i, n in enumerate(LENGTHS)]


def make_batches(documents=DOCUMENTS, seq_len=32, batch_size=4, seed=0, shuffle_rows=1, **options):
    """Rows in the order of the stream, unless shuffle_rows says otherwise."""
    return train_batches(
        documents, TOKENIZER, seq_len=seq_len, batch_size=batch_size, seed=seed, shuffle_rows=shuffle_rows, **options
    )


def take(batches, count):
    return [next(batches) for _ in range(count)]


def assert_equal(got, expected):
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


def _pieces(batches):
    """Runs of inputs and targets, one a segment, checking what holds for every row."""
    for batch in batches:
        assert {name: a.dtype.name for name, a in batch.items()} == {
            "tokens": "int32",
            "targets": "int32",
            "segment_ids": "int32",
            "positions": "int32",
            "weights": "float32",
        }
        for row in range(len(batch["tokens"])):
            tokens, targets, segments, positions, weights = (
                batch[name][row] for name in ("tokens", "targets", "segment_ids", "positions", "weights")
            )
            np.testing.assert_array_equal(weights, segments > 0)
            assert list(np.unique(segments[segments > 0])) == list(range(1, segments.max() + 1))
            for segment in range(1, segments.max() + 1):
                place = np.flatnonzero(segments == segment)
                np.testing.assert_array_equal(np.diff(place), 1)
                np.testing.assert_array_equal(positions[place], np.arange(len(place)))
                yield tokens[place], targets[place]


def read_documents(batches):
    """The documents that were predicted, as lists of ids: continued segments are joined again."""
    inputs = targets = ()
    for piece_inputs, piece_targets in _pieces(batches):
        assert (piece_inputs[0] == END) == (not len(inputs))  # a document begins with the end of text, and only there
        inputs, targets = [*inputs, *piece_inputs], [*targets, *piece_targets]
        if targets[-1] == END:
            np.testing.assert_array_equal(inputs[1:], targets[:-1])
            yield inputs[1:]
            inputs = targets = ()
