"""Fuzz: random documents, tokenizers and configs. Each try ends in the right held-out loss, or in one line.

Most tries score a table of probabilities instead of a model: what is tested is every step from files to targets.
"""

import collections
import json
import math
import random
import types

import jax
import numpy as np
import pytest

from cubit_jax import data
from cubit_jax.data.bigram import bigram_bits_per_byte
from cubit_jax.data.tokenizer import load_tokenizer
from cubit_jax.evaluate import evaluate
from cubit_jax.prepare import prepare
from cubit_jax.runtime.errors import UserError
from cubit_jax.train import train
from cubit_jax.training.trained import load_run
from tests.data.fuzzing import make_text, make_tokenizer, write_files

EMPTY = ("is empty", "no training documents", "there is no text", "no file matches")  # what a small corpus may end in


def _texts(documents):
    return [documents[i] for i in range(len(documents))]


def _stream(texts, tokenizer):
    ids = [tokenizer.encode(text) for text in texts]
    assert all(tokenizer.end_id not in document for document in ids)
    assert all(0 <= i < tokenizer.vocab_size for document in ids for i in document)
    return np.array([i for document in ids for i in (tokenizer.end_id, *document)] + [tokenizer.end_id])


def _rows(stream, seq_len, end_id):
    """Every (row, segment start, place) of a target, counted one by one."""
    start = 0
    for place in range(len(stream) - 1):
        if place % seq_len == 0 or stream[place] == end_id:
            start = place
        yield place // seq_len, start, place


def _data_try(seed, folder):
    """-> "loss" or the line that it ended in."""
    rng = random.Random(seed)
    texts = [make_text(rng) for _ in range(rng.choice([0, 1, 2, 5, 12, 20, 30, 40]))]
    pattern, damage = write_files(rng, folder, texts)
    fraction = rng.choice([0.1, 0.2, 0.3, 0.5] * 10 + [0.0, 1.0, -1.0, math.nan])
    config = types.SimpleNamespace(
        source="files", path=pattern, heldout_path=None, heldout_fraction=fraction, text_field="text", tokenizer=None
    )
    vocab_size = rng.choice([257, 300, 300, 400, 400, 400, 100])
    if trained := rng.random() < 0.3:
        expected_error = vocab_size < 257
    else:
        make_tokenizer(rng, texts).save(str(folder / "given.json"))
        config.tokenizer, vocab_size, expected_error = str(folder / "given.json"), 10**6, False
    try:
        corpus = data.open_corpus(config, folder)
        assert not damage and 0 < fraction < 1
        train_texts, heldout_texts = _texts(corpus.train), _texts(corpus.heldout)
        found, whole = train_texts + heldout_texts, [text for text in texts if text]
        if collections.Counter(found) != collections.Counter(whole):  # else a single file, cut in two
            assert ["".join(found)] == whole and pattern.endswith(".txt")
        assert corpus.heldout_bytes == sum(len(text.encode()) for text in heldout_texts)
        tokenizer = data.open_tokenizer(config, corpus, folder, vocab_size)
        assert not expected_error
    except UserError as error:
        valid = not damage and 0 < fraction < 1 and not expected_error
        encodes = "encodes the characters" in str(error) and not trained
        assert not valid or encodes or any(message in str(error) for message in EMPTY), error
        return str(error)

    corpus = data.check_restored(corpus, tokenizer)
    assert corpus.restored == all(tokenizer.decode(tokenizer.encode(text)) == text for text in heldout_texts)
    assert corpus.restored or not trained
    stream = _stream(heldout_texts, tokenizer)
    tokenizer.save(folder / "copy.json")
    copy = load_tokenizer(folder / "copy.json")
    assert copy.digest == tokenizer.digest
    np.testing.assert_array_equal(_stream(heldout_texts, copy), stream)

    # A probability of y after x at every distance from the segment's start, as a model could give it.
    seq_len, batch_size, processes = rng.choice([1, 2, 7, 64]), rng.choice([1, 2, 6]) * 2, rng.choice([1, 2])
    generator = np.random.default_rng(seed)
    x_part, y_part = generator.normal(size=(2, tokenizer.vocab_size))

    def nll(x, y, position):
        scores = x_part[x] * y_part[y] / (1 + position)
        return np.logaddexp.reduce(np.multiply.outer(x_part[x] / (1 + position), y_part), -1) - scores

    places = [(start, place) for _, start, place in _rows(stream, seq_len, tokenizer.end_id)][:2000]
    direct = math.fsum(nll(stream[place], stream[place + 1], place - start) for start, place in places)
    total, targets = 0.0, 0
    options = {"seq_len": seq_len, "batch_size": batch_size, "process_count": processes}
    shards = [data.heldout_batches(corpus.heldout, tokenizer, process_index=i, **options) for i in range(processes)]
    for parts in zip(*shards, strict=True):
        batch = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        real = np.flatnonzero(batch["weights"].reshape(-1))[: max(2000 - targets, 0)]
        x, y, position = (batch[name].reshape(-1)[real] for name in ("tokens", "targets", "positions"))
        total += math.fsum(nll(x, y, position)) if len(real) else 0.0
        targets += len(real)
    assert (targets, total) == (len(places), pytest.approx(direct, rel=1e-9))
    assert shards[0].num_targets == len(stream) - 1

    # Training batches: only tokens of the training part, and the same ones after a resume.
    known = {*_stream(train_texts, tokenizer).tolist()}
    batches, again = (
        data.train_batches(corpus.train, tokenizer, seed=seed, shuffle_rows=9, **options) for _ in range(2)
    )
    for count in range(rng.randint(1, 6)):
        assert known.issuperset(next(batches)["targets"].reshape(-1).tolist()), count
    again.set_state(batches.get_state())
    for name, array in next(batches).items():
        np.testing.assert_array_equal(array, next(again)[name] if name == "tokens" else array)
    batches.close()
    again.close()
    bits = bigram_bits_per_byte(
        data.token_stream(corpus.train, tokenizer), stream, tokenizer.vocab_size, corpus.heldout_bytes
    )
    assert math.isfinite(bits) and bits >= 0
    if rng.random() < 0.3:
        prepare(folder / "prepared", path=pattern, heldout_fraction=fraction, tokenizer=str(folder / "copy.json"))
        opened = data.open_corpus(
            types.SimpleNamespace(**vars(config) | {"source": "prepared", "path": str(folder / "prepared")}), folder
        )
        np.testing.assert_array_equal(opened.heldout, stream)
        assert (opened.heldout_bytes, opened.restored) == (corpus.heldout_bytes, corpus.restored)
    return "loss"


FIELDS = {  # values within the limits, values beyond them
    "seq_len": ((1, 2, 7, 33), (0, -5)),
    "batch_size": ((8, 16), (0, 3, -8)),
    "accumulation_steps": ((1, 2), (0, 3)),
    "seed": ((0, 2**32 - 1), (-1, 2**32)),
    "num_steps": ((1, 2), (0,)),
    "model.mixers": ((("attention",), ("cubit",), ("deltaformer",), ("cubit", "attention")), (("none",), ())),
    "model.window": ((1, 5, 1000), (0, -1)),
    "model.tie_embeddings": ((True, False), ()),
    "model.scan_layers": ((True, False), ()),
    "model.num_layers": ((2, 4), (0, -2)),
    "model.num_heads": ((1, 2), (0,)),
    "model.head_dim": ((2, 8), (0, 3)),
    "model.mlp_dim": ((8, 32), (0,)),
    "model.vocab_size": ((300, 512), (0, 10, 256)),
    "model.dropout": ((0.0, 0.5), (-0.1, 1.5, math.nan)),
    "model.dtype": (("float32", "bfloat16"), ("float31",)),
    "model.remat": (("none", "full", "dots"), ("some",)),
    "model.rope_theta": ((1.5, 1e6), (0.0, -1.0, math.nan)),
    "model.norm_eps": ((1e-6, 1e-3), (-1.0, math.nan)),
    "optimizer.learning_rate": ((1e-5, 1e-3), (math.nan, math.inf, 0.0)),
    "optimizer.schedule": (("cosine", "wsd"), ("step",)),
    "optimizer.warmup_steps": ((0, 1, 100), (-1,)),
    "optimizer.b2": ((0.0, 0.99), (1.0, -0.5, math.nan)),
    "optimizer.clip_norm": ((0.1, 1e9), (math.nan, -1.0)),
    "data.heldout_fraction": ((0.2, 0.5), (0.0, 1.0, math.nan)),
    "data.source": (("files",), ("web", "tfds", "prepared")),
    "data.tokenizer": ((None,), ("/nowhere/t.json",)),
    "init_from": ((None,), ("/nowhere",)),
    "mesh.data": ((-1, 8), (3, 0, 16)),
    "mesh.tensor": ((1, 2), (5, 0)),
}


def _run_try(seed, folder, micro_config):
    """A run of one or two steps of a random config -> "loss" or the line that it ended in."""
    rng = random.Random(seed)
    texts = [make_text(rng)[:400] + f" {i}" for i in range(6)]
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_bytes(text.encode())
    chosen = {name: rng.choice(FIELDS[name][0]) for name in rng.sample(sorted(FIELDS), 4)}
    if bad := rng.random() < 0.85:
        name = rng.choice([name for name, (_, beyond) in FIELDS.items() if beyond])
        chosen[name] = rng.choice(FIELDS[name][1])
    base = {"data.source": "files", "data.path": str(folder / "*.txt"), "data.heldout_fraction": 0.3, "num_steps": 2}
    config = micro_config("transformer", **base | {"optimizer.warmup_steps": 0} | chosen)
    try:
        train(config, str(folder / "run"))
        assert not bad, f"{chosen} was not refused"
    except UserError as error:
        together = {"mesh.data", "mesh.tensor", "accumulation_steps", "model.mixers", "model.num_heads"}
        assert bad or together & {*chosen}, (chosen, error)  # these are limited by one another
        return str(error)
    run = load_run(str(folder / "run"))
    corpus = data.open_corpus(run.config.data, folder / "run")
    stream = _stream(_texts(corpus.heldout), run.tokenizer)
    places = list(_rows(stream, run.config.seq_len, run.tokenizer.end_id))
    tokens, targets, segments, positions = np.zeros((4, places[-1][0] + 1, run.config.seq_len), np.int32)
    for row, start, place in places:
        column = place % run.config.seq_len
        tokens[row, column], targets[row, column] = stream[place : place + 2]
        segments[row, column], positions[row, column] = 1 + start % run.config.seq_len, place - start
    with jax.set_mesh(run.mesh):
        logits = jax.jit(run.model.apply)({"params": run.params}, tokens, segment_ids=segments, positions=positions)
    logits = np.asarray(logits, np.float64)
    nll = np.logaddexp.reduce(logits, -1) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    nll = nll[segments > 0].tolist()
    expected = math.fsum(nll) / len(nll)
    tolerance = 2e-2 if run.config.model.dtype == "bfloat16" else 1e-4
    result, _ = evaluate(str(folder / "run"))
    written = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert result.loss == pytest.approx(expected, rel=tolerance)
    assert written[-1]["eval/loss"] == pytest.approx(expected, rel=tolerance)
    assert result.bits_per_byte == pytest.approx(
        expected * len(nll) / math.log(2) / corpus.heldout_bytes, rel=tolerance
    )
    return "loss"


def _fuzz(tries, runs, tmp_path, micro_config, first=0):
    outcomes, faults = collections.Counter(), []
    for seed in range(first, first + tries):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            outcome = _run_try(seed, folder, micro_config) if seed % tries < runs else _data_try(seed, folder)
            outcomes["a loss" if outcome == "loss" else "a line"] += 1
            assert len(outcome.splitlines()) == 1, outcome
        except Exception as error:  # all tries are made, then all faults are shown
            faults.append(f"seed {seed}: {type(error).__name__}: {error}")
    print(f"{tries} tries: {dict(outcomes)}, {len(faults)} faults")
    assert not faults, "\n".join(faults)
    assert min(outcomes["a loss"], outcomes["a line"]) > tries // 10


@pytest.mark.full
def test_twenty_tries(tmp_path, micro_config):
    _fuzz(20, 6, tmp_path, micro_config)


@pytest.mark.slow
def test_five_hundred_tries(tmp_path, micro_config):
    _fuzz(500, 80, tmp_path, micro_config, first=1000)
