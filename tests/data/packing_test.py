"""Packing: segments, positions, weights and continued documents of a row."""

import numpy as np

from cubit_jax.data.packing import pack
from tests.data.streams import END, make_batches


def test_one_document_a_row_and_its_padding():
    batch = pack(np.array([[END, 5, 6, END, 7, END]]), END, real=[3])
    assert batch["tokens"].tolist() == [[END, 5, 6, 0, 0]]
    assert batch["targets"].tolist() == [[5, 6, END, 0, 0]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 0]]
    assert batch["weights"].tolist() == [[1, 1, 1, 0, 0]]


def test_a_row_of_a_hundred_documents_of_one_token():
    row = next(make_batches([str(i) for i in range(100)], seq_len=200, batch_size=1))
    assert (row["segment_ids"][0] == np.repeat(np.arange(1, 101), 2)).all()
    assert (row["positions"][0] == np.tile([0, 1], 100)).all()
    assert sorted(row["targets"][0, ::2]) == list(range(100)) and set(row["targets"][0, 1::2]) == {END}


def test_long_documents_go_on_in_the_next_row():
    text = [str(i) for i in range(100)]
    batch = next(make_batches([" ".join(text)], seq_len=30, batch_size=4))
    assert batch["tokens"].reshape(-1)[:101].tolist() == [END, *range(100)]
    assert batch["targets"].reshape(-1)[:101].tolist() == [*range(100), END]
    assert (batch["segment_ids"] == np.array([[1] * 30] * 3 + [[1] * 11 + [2] * 19])).all()
    assert (batch["positions"][:3] == np.arange(30)).all()
