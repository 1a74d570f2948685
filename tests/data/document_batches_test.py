"""Batches of documents: every prediction once per epoch, and a position that is exact at every batch."""

import json

import numpy as np
import pytest

from cubit_jax.runtime.errors import UserError
from tests.data.streams import DOCUMENTS, LENGTHS, TOKENIZER, assert_equal, make_batches, read_documents, take


@pytest.mark.parametrize("documents", [37, 1])
def test_epochs_are_permutations_that_differ(documents):
    texts = [" ".join([str(i)] * (i % 5 + 1)) for i in range(documents)]
    shards = [make_batches(texts, seq_len=8, batch_size=8, process_index=i, process_count=4) for i in range(4)]
    parts = [take(shard, 3 * documents * 4 // 64 + 1) for shard in shards]
    whole = [{name: np.concatenate([part[name] for part in batch]) for name in batch[0]} for batch in zip(*parts)]
    found = [ids[0] for ids in read_documents(whole)]
    assert len(found) >= 3 * documents
    epochs = np.reshape(found[: 3 * documents], (3, documents))
    assert (np.sort(epochs) == np.arange(documents)).all()
    if documents == 37:
        assert not (epochs[0] == epochs[1]).all() and not (epochs[1] == epochs[2]).all()
    assert all(batch["weights"].all() for batch in whole)


def test_every_token_of_an_epoch_is_predicted_once():
    seen = list(read_documents(take(make_batches(), 60)))
    epoch = sorted(seen[: len(DOCUMENTS)])
    assert epoch == sorted(TOKENIZER.encode(text) for text in DOCUMENTS)
    assert sum(len(ids) + 1 for ids in epoch) == sum(LENGTHS) + len(LENGTHS)
    assert len(seen) > 2 * len(DOCUMENTS)


def test_example_order_is_pinned():
    texts = [str(i) for i in range(100)]
    batch = next(make_batches(texts, seq_len=128, batch_size=1))
    assert batch["targets"][0, ::2].tolist() == GOLDEN_ORDER
    other = next(make_batches(texts, seq_len=128, batch_size=1, seed=1))
    assert other["targets"][0, ::2].tolist() != GOLDEN_ORDER


# fmt: off
GOLDEN_ORDER = [
    96, 77, 31, 79, 9, 70, 28, 83, 66, 41, 71, 15, 23, 38, 5, 4, 1, 57, 0, 64, 99, 54,
    50, 12, 95, 26, 17, 29, 63, 35, 44, 13, 53, 10, 61, 39, 78, 84, 81, 18, 80, 3, 47, 60,
    97, 43, 48, 2, 7, 72, 98, 24, 74, 11, 16, 94, 45, 40, 20, 69, 42, 58, 65, 68,
]
# fmt: on


def test_windows_of_rows_are_shuffled_within_an_epoch():
    def rows(shuffle_rows, count):
        batches = take(make_batches(batch_size=1, shuffle_rows=shuffle_rows), count)
        return [tuple(batch["targets"][0]) for batch in batches]

    plain = rows(1, 90)
    for window in (7, 1000):
        shuffled = rows(window, 90)
        # The first epoch's rows come before the second's, whatever the window.
        first = (sum(LENGTHS) + len(LENGTHS) - 1) // 32 + 1
        assert shuffled[:first] != plain[:first] and sorted(shuffled[:first]) == sorted(plain[:first])
    assert sorted(rows(7, 7)) == sorted(plain[:7])
    assert rows(None, 90) == rows(1000, 90)  # by default a window is far larger than this epoch


@pytest.mark.parametrize("shuffle_rows", [1, 7])
def test_position_is_exact_at_every_batch_and_over_epoch_ends(shuffle_rows):
    straight = make_batches(shuffle_rows=shuffle_rows)
    states, expected = [straight.get_state()], []
    for _ in range(50):
        expected.append(next(straight))
        states.append(straight.get_state())
    assert straight.epoch > 3
    for index, state in enumerate(states[:45]):
        assert len(state) < 200 and json.loads(state)
        resumed = make_batches(shuffle_rows=shuffle_rows)
        resumed.set_state(state)
        assert resumed.get_state() == state
        for batch, after in list(zip(expected, states[1:]))[index : index + 6]:
            assert_equal(next(resumed), batch)
            assert resumed.get_state() == after
        resumed.close()


def test_workers_change_nothing():  # sources_test resumes with one worker
    plain, workers = make_batches(shuffle_rows=9), make_batches(shuffle_rows=9, num_workers=2)
    states = [plain.get_state()]
    for _ in range(40):
        assert_equal(next(workers), next(plain))
        states.append(plain.get_state())
        assert workers.get_state() == states[-1]
    # A position saved with any number of workers is one for any other.
    workers.set_state(states[13])
    plain.set_state(states[13])
    for _ in range(12):
        assert_equal(next(workers), next(plain))
    workers.close()
    plain.close()


def test_processes_share_out_the_rows_of_one_stream():
    single = make_batches(batch_size=8, shuffle_rows=20)
    parts = [make_batches(batch_size=8, shuffle_rows=20, process_index=i, process_count=4) for i in range(4)]
    for _ in range(12):
        rows = [next(part) for part in parts]
        assert rows[0]["tokens"].shape == (2, 32)
        assert_equal({name: np.concatenate([row[name] for row in rows]) for name in rows[0]}, next(single))
        assert {part.get_state() for part in parts} == {single.get_state()}
    resumed = make_batches(batch_size=8, shuffle_rows=20, process_index=1, process_count=2)
    resumed.set_state(single.get_state())
    assert_equal(next(resumed), {name: array[4:] for name, array in next(single).items()})
    with pytest.raises(UserError, match="batch size 10 is not a multiple of the number of processes, 4"):
        make_batches(batch_size=10, process_count=4)


def test_state_of_other_data_is_refused():
    state = make_batches().get_state()
    for other in (make_batches(DOCUMENTS[:9]), make_batches(seed=1), make_batches(np.arange(50))):
        before = other.get_state()
        with pytest.raises(UserError, match="does not fit this run's data"):
            other.set_state(state)
        assert other.get_state() == before
