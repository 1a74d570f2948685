"""Batches of one token stream: the held-out pass, and training on prepared data."""

import numpy as np
import pytest

from cubit_jax.data import heldout_batches, token_stream
from cubit_jax.data.stream_batches import HeldoutBatches, PreparedBatches
from cubit_jax.runtime.errors import UserError
from tests.data.streams import DOCUMENTS, END, LENGTHS, TOKENIZER, assert_equal, make_batches, read_documents, take

STREAM = token_stream(DOCUMENTS, TOKENIZER)


def test_heldout_predicts_every_target_once_with_equal_batches():
    batches = heldout_batches(DOCUMENTS, TOKENIZER, seq_len=32, batch_size=4)
    assert list(read_documents(batches)) == [TOKENIZER.encode(text) for text in DOCUMENTS]
    assert list(read_documents(batches)) == [TOKENIZER.encode(text) for text in DOCUMENTS]  # again
    assert sum(batch["weights"].sum() for batch in batches) == batches.num_targets == sum(LENGTHS) + len(LENGTHS)
    assert {batch["tokens"].shape for batch in batches} == {(4, 32)}
    assert len(list(batches)) == len(batches) == -(-batches.num_targets // (32 * 4))
    parts = [HeldoutBatches(STREAM, END, seq_len=32, batch_size=4, process_index=i, process_count=2) for i in range(2)]
    for batch, *rows in zip(batches, *parts, strict=True):
        assert_equal({name: np.concatenate([row[name] for row in rows]) for name in batch}, batch)


@pytest.mark.parametrize("num_targets", [1, 31, 32, 33, 128, 129])
def test_heldout_of_any_length(num_targets):
    stream = np.arange(num_targets + 1)
    batches = list(HeldoutBatches(stream, END, seq_len=32, batch_size=4))
    targets = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in batches])
    np.testing.assert_array_equal(targets, stream[1:])


def test_prepared_epochs_predict_every_target_once():
    rows = -(-(len(STREAM) - 1) // 32)
    batches = make_batches(STREAM.astype(np.uint16), batch_size=1)
    epochs = [take(batches, rows) for _ in range(2)]
    assert batches.epoch == 2
    expected = {row["tokens"].tobytes() for row in HeldoutBatches(STREAM, END, seq_len=32, batch_size=1)}
    for epoch in epochs:
        assert {row["tokens"].tobytes() for row in epoch} == expected
        assert sum(row["weights"].sum() for row in epoch) == len(STREAM) - 1
    assert any((a["tokens"] != b["tokens"]).any() for a, b in zip(*epochs))


def test_prepared_goes_on_with_other_processes_and_batch_sizes():
    def tokens(count, processes, batch_size, state):
        parts = [
            PreparedBatches(
                STREAM, END, seq_len=32, batch_size=batch_size, seed=0, process_index=i, process_count=processes
            )
            for i in range(processes)
        ]
        for part in parts:
            part.set_state(state)
        rows = [next(part)["tokens"] for _ in range(count) for part in parts]
        assert len({part.get_state() for part in parts}) == 1
        return np.concatenate(rows), parts[0].get_state()

    start = make_batches(STREAM).get_state()
    expected, end = tokens(24, 1, 8, start)  # several epochs
    for batch_size in (8, 16):
        first, state = tokens(64 // batch_size, 4, batch_size, start)
        for processes in (1, 2, 8):
            rest, last = tokens(16, processes, 8, state)
            np.testing.assert_array_equal(np.concatenate([first, rest]), expected)
            assert last == end
    with pytest.raises(UserError, match="seq_len was 32, now it is 16"):
        make_batches(STREAM[: (len(STREAM) - 1) // 2 + 1], seq_len=16).set_state(start)
