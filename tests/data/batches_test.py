"""Batches: every prediction exactly once, and a position that is exact at every batch whatever reads the stream."""

import json
import os
import signal
import subprocess
import sys
import time

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from cubit_jax.data import heldout_batches, token_stream, train_batches
from cubit_jax.data.batches import HeldoutBatches, PreparedBatches, pack
from cubit_jax.data.tokenizer import END_OF_TEXT, Tokenizer
from cubit_jax.runtime.errors import UserError

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


def _batches(documents=DOCUMENTS, seq_len=32, batch_size=4, seed=0, shuffle_rows=1, **options):
    """Rows in the order of the stream, unless shuffle_rows says otherwise."""
    return train_batches(
        documents, TOKENIZER, seq_len=seq_len, batch_size=batch_size, seed=seed, shuffle_rows=shuffle_rows, **options
    )


def _take(batches, count):
    return [next(batches) for _ in range(count)]


def _assert_equal(got, expected):
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


def _documents(batches):
    """The documents that were predicted, as lists of ids: continued segments are joined again."""
    inputs = targets = ()
    for piece_inputs, piece_targets in _pieces(batches):
        assert (piece_inputs[0] == END) == (not len(inputs))  # a document begins with the end of text, and only there
        inputs, targets = [*inputs, *piece_inputs], [*targets, *piece_targets]
        if targets[-1] == END:
            np.testing.assert_array_equal(inputs[1:], targets[:-1])
            yield inputs[1:]
            inputs = targets = ()


def test_one_document_a_row_and_its_padding():
    batch = pack(np.array([[END, 5, 6, END, 7, END]]), END, real=[3])
    assert batch["tokens"].tolist() == [[END, 5, 6, 0, 0]]
    assert batch["targets"].tolist() == [[5, 6, END, 0, 0]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 0]]
    assert batch["weights"].tolist() == [[1, 1, 1, 0, 0]]


def test_a_row_of_a_hundred_documents_of_one_token():  # H17
    row = next(_batches([str(i) for i in range(100)], seq_len=200, batch_size=1))
    assert (row["segment_ids"][0] == np.repeat(np.arange(1, 101), 2)).all()
    assert (row["positions"][0] == np.tile([0, 1], 100)).all()
    assert sorted(row["targets"][0, ::2]) == list(range(100)) and set(row["targets"][0, 1::2]) == {END}


def test_long_documents_go_on_in_the_next_row():
    text = [str(i) for i in range(100)]
    batch = next(_batches([" ".join(text)], seq_len=30, batch_size=4))
    assert batch["tokens"].reshape(-1)[:101].tolist() == [END, *range(100)]
    assert batch["targets"].reshape(-1)[:101].tolist() == [*range(100), END]
    assert (batch["segment_ids"] == np.array([[1] * 30] * 3 + [[1] * 11 + [2] * 19])).all()
    assert (batch["positions"][:3] == np.arange(30)).all()


@pytest.mark.parametrize("documents", [37, 1])
def test_epochs_are_permutations_that_differ(documents):  # H17
    texts = [" ".join([str(i)] * (i % 5 + 1)) for i in range(documents)]
    shards = [_batches(texts, seq_len=8, batch_size=8, process_index=i, process_count=4) for i in range(4)]
    parts = [_take(shard, 3 * documents * 4 // 64 + 1) for shard in shards]
    whole = [{name: np.concatenate([part[name] for part in batch]) for name in batch[0]} for batch in zip(*parts)]
    found = [ids[0] for ids in _documents(whole)]
    assert len(found) >= 3 * documents
    epochs = np.reshape(found[: 3 * documents], (3, documents))
    assert (np.sort(epochs) == np.arange(documents)).all()
    if documents == 37:
        assert not (epochs[0] == epochs[1]).all() and not (epochs[1] == epochs[2]).all()
    assert all(batch["weights"].all() for batch in whole)


def test_every_token_of_an_epoch_is_predicted_once():  # H17
    seen = list(_documents(_take(_batches(), 60)))
    epoch = sorted(seen[: len(DOCUMENTS)])
    assert epoch == sorted(TOKENIZER.encode(text) for text in DOCUMENTS)
    assert sum(len(ids) + 1 for ids in epoch) == sum(LENGTHS) + len(LENGTHS)
    assert len(seen) > 2 * len(DOCUMENTS)


def test_example_order_is_pinned():  # H16
    texts = [str(i) for i in range(100)]
    batch = next(_batches(texts, seq_len=128, batch_size=1))
    assert batch["targets"][0, ::2].tolist() == GOLDEN_ORDER
    other = next(_batches(texts, seq_len=128, batch_size=1, seed=1))
    assert other["targets"][0, ::2].tolist() != GOLDEN_ORDER


GOLDEN_ORDER = [
    96,
    77,
    31,
    79,
    9,
    70,
    28,
    83,
    66,
    41,
    71,
    15,
    23,
    38,
    5,
    4,
    1,
    57,
    0,
    64,
    99,
    54,
    50,
    12,
    95,
    26,
    17,
    29,
    63,
    35,
    44,
    13,
    53,
    10,
    61,
    39,
    78,
    84,
    81,
    18,
    80,
    3,
    47,
    60,
    97,
    43,
    48,
    2,
    7,
    72,
    98,
    24,
    74,
    11,
    16,
    94,
    45,
    40,
    20,
    69,
    42,
    58,
    65,
    68,
]


def test_windows_of_rows_are_shuffled_within_an_epoch():
    def rows(shuffle_rows, count):
        batches = _take(_batches(batch_size=1, shuffle_rows=shuffle_rows), count)
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
def test_position_is_exact_at_every_batch_and_over_epoch_ends(shuffle_rows):  # H16
    straight = _batches(shuffle_rows=shuffle_rows)
    states, expected = [straight.get_state()], []
    for _ in range(50):
        expected.append(next(straight))
        states.append(straight.get_state())
    assert straight.epoch > 3
    for index, state in enumerate(states[:45]):
        assert len(state) < 200 and json.loads(state)
        resumed = _batches(shuffle_rows=shuffle_rows)
        resumed.set_state(state)
        assert resumed.get_state() == state
        for batch, after in list(zip(expected, states[1:]))[index : index + 6]:
            _assert_equal(next(resumed), batch)
            assert resumed.get_state() == after
        resumed.close()


def test_workers_change_nothing():  # H16; sources_test resumes with one worker
    plain, workers = _batches(shuffle_rows=9), _batches(shuffle_rows=9, num_workers=2)
    states = [plain.get_state()]
    for _ in range(40):
        _assert_equal(next(workers), next(plain))
        states.append(plain.get_state())
        assert workers.get_state() == states[-1]
    # A position saved with any number of workers is one for any other.
    workers.set_state(states[13])
    plain.set_state(states[13])
    for _ in range(12):
        _assert_equal(next(workers), next(plain))
    workers.close()
    plain.close()


def test_processes_share_out_the_rows_of_one_stream():
    single = _batches(batch_size=8, shuffle_rows=20)
    parts = [_batches(batch_size=8, shuffle_rows=20, process_index=i, process_count=4) for i in range(4)]
    for _ in range(12):
        rows = [next(part) for part in parts]
        assert rows[0]["tokens"].shape == (2, 32)
        _assert_equal({name: np.concatenate([row[name] for row in rows]) for name in rows[0]}, next(single))
        assert {part.get_state() for part in parts} == {single.get_state()}
    resumed = _batches(batch_size=8, shuffle_rows=20, process_index=1, process_count=2)
    resumed.set_state(single.get_state())
    _assert_equal(next(resumed), {name: array[4:] for name, array in next(single).items()})
    with pytest.raises(UserError, match="batch size 10 is not a multiple of the number of processes, 4"):
        _batches(batch_size=10, process_count=4)


def test_state_of_other_data_is_refused():
    state = _batches().get_state()
    for other in (_batches(DOCUMENTS[:9]), _batches(seed=1), _batches(np.arange(50))):
        before = other.get_state()
        with pytest.raises(UserError, match="does not fit this run's data"):
            other.set_state(state)
        assert other.get_state() == before


def test_checkpoints_through_orbax(tmp_path):
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        batches, expected = _batches(), []
        for step in range(6):
            expected.append(next(batches))
            manager.save(step, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(batches)))
        expected += _take(batches, 3)
        for step in range(6):
            resumed = _batches()
            manager.restore(step, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(resumed)))
            for batch in expected[step + 1 : step + 4]:
                _assert_equal(next(resumed), batch)


class _Failing:
    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 3:
            raise UserError("document 3 is damaged")
        return str(index)


def test_an_error_while_reading_ahead_reaches_the_consumer():
    batches = _batches(_Failing(), seq_len=4, batch_size=1)
    with pytest.raises(UserError, match="document 3 is damaged"):
        _take(batches, 20)
    with pytest.raises(UserError, match="document 3 is damaged"):
        _take(batches, 20)


def test_closing_in_between_loses_nothing():
    expected, batches = _take(_batches(), 6), _batches(prefetch=3)
    for batch in expected:
        _assert_equal(next(batches), batch)
        batches.close()
        batches.close()


STREAM = token_stream(DOCUMENTS, TOKENIZER)


def test_heldout_predicts_every_target_once_with_equal_batches():
    batches = heldout_batches(DOCUMENTS, TOKENIZER, seq_len=32, batch_size=4)
    assert list(_documents(batches)) == [TOKENIZER.encode(text) for text in DOCUMENTS]
    assert list(_documents(batches)) == [TOKENIZER.encode(text) for text in DOCUMENTS]  # again
    assert sum(batch["weights"].sum() for batch in batches) == batches.num_targets == sum(LENGTHS) + len(LENGTHS)
    assert {batch["tokens"].shape for batch in batches} == {(4, 32)}
    assert len(list(batches)) == len(batches) == -(-batches.num_targets // (32 * 4))
    parts = [HeldoutBatches(STREAM, END, seq_len=32, batch_size=4, process_index=i, process_count=2) for i in range(2)]
    for batch, *rows in zip(batches, *parts, strict=True):
        _assert_equal({name: np.concatenate([row[name] for row in rows]) for name in batch}, batch)


@pytest.mark.parametrize("num_targets", [1, 31, 32, 33, 128, 129])
def test_heldout_of_any_length(num_targets):
    stream = np.arange(num_targets + 1)
    batches = list(HeldoutBatches(stream, END, seq_len=32, batch_size=4))
    targets = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in batches])
    np.testing.assert_array_equal(targets, stream[1:])


def test_prepared_epochs_predict_every_target_once():
    rows = -(-(len(STREAM) - 1) // 32)
    batches = _batches(STREAM.astype(np.uint16), batch_size=1)
    epochs = [_take(batches, rows) for _ in range(2)]
    assert batches.epoch == 2
    expected = {row["tokens"].tobytes() for row in HeldoutBatches(STREAM, END, seq_len=32, batch_size=1)}
    for epoch in epochs:
        assert {row["tokens"].tobytes() for row in epoch} == expected
        assert sum(row["weights"].sum() for row in epoch) == len(STREAM) - 1
    assert any((a["tokens"] != b["tokens"]).any() for a, b in zip(*epochs))


def test_prepared_goes_on_with_other_processes_and_batch_sizes():  # H19
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

    start = _batches(STREAM).get_state()
    expected, end = tokens(24, 1, 8, start)  # several epochs
    for batch_size in (8, 16):
        first, state = tokens(64 // batch_size, 4, batch_size, start)
        for processes in (1, 2, 8):
            rest, last = tokens(16, processes, 8, state)
            np.testing.assert_array_equal(np.concatenate([first, rest]), expected)
            assert last == end
    with pytest.raises(UserError, match="seq_len was 32, now it is 16"):
        _batches(STREAM[: (len(STREAM) - 1) // 2 + 1], seq_len=16).set_state(start)


KILLED = """
import multiprocessing, sys
from cubit_jax.data import train_batches
from cubit_jax.data.tokenizer import train_tokenizer
if __name__ == "__main__":
    batches = train_batches(["a b"] * 9, train_tokenizer(["a b"], 257), seq_len=4, batch_size=1, seed=0, num_workers=1)
    next(batches)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_no_worker_outlives_its_parent(tmp_path, end):
    (tmp_path / "script.py").write_text(KILLED)
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        text=True,
    )
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 1 and _alive(workers[0])
    if end == "kill":
        parent.send_signal(signal.SIGKILL)
    _, errors = parent.communicate(timeout=60)
    assert end == "kill" or (parent.returncode, errors) == (0, "")
    deadline = time.time() + 20
    while _alive(workers[0]) and time.time() < deadline:
        time.sleep(0.1)
    assert not _alive(workers[0])


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")")[-1].split()[0] != "Z"  # dead, but nobody has asked yet how it ended
    except FileNotFoundError:
        return False
