"""Tokenizers: exact round trips, the end of text never comes out of text, foreign files, errors of one line."""

import json
import pickle
import random
import time

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from cubit_jax.data import tokenizer as tokenizer_module
from cubit_jax.data.tokenizer import check_vocabulary, load_tokenizer
from cubit_jax.data.tokenizer_training import train_tokenizer
from cubit_jax.runtime.errors import UserError

TEXTS = [f"def function_{i}(x):\n    return x + {i}\n\n\nprint('the {i}th')\n" for i in range(60)]
HARD = [
    "",
    " ",
    "\r\n\t",
    "e\u0301 日本語 😀",
    "\x00\x7f\ufeff",
    "a<|endoftext|>b",
    "<|endoftext|>" * 3,
    "x" * 1000,
    "l1\nl2\n\n l3 \nl4",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 390)


@pytest.mark.parametrize("text", HARD + TEXTS[:2])
def test_text_survives_and_never_becomes_the_end_of_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_id not in ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert (len(ids) == 0) == (text == "")


def test_end_of_text_is_one_id(tokenizer):
    assert tokenizer.decode([tokenizer.end_id]) == tokenizer.end_token == "<|endoftext|>"
    assert tokenizer.vocab_size == 390


def test_training_is_deterministic_and_learns_pairs(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "a.json")
    train_tokenizer(iter(TEXTS), 390).save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]  # no temporary file is left
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_a_literal_end_of_text_in_the_training_text_is_ordinary():
    tokenizer = train_tokenizer(["ab<|endoftext|>cd"] * 9, 300)
    assert tokenizer.decode(tokenizer.encode("<|endoftext|>")) == "<|endoftext|>"
    assert len(tokenizer.encode("<|endoftext|>")) < 13  # its characters were merged like any others


def test_save_load_and_pickle_encode_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t.json")
    for other in (load_tokenizer(tmp_path / "t.json"), pickle.loads(pickle.dumps(tokenizer))):
        assert [other.encode(text) for text in HARD] == [tokenizer.encode(text) for text in HARD]
        assert other.encode_batch(HARD) == [tokenizer.encode(text) for text in HARD]
        assert (other.vocab_size, other.end_id) == (tokenizer.vocab_size, tokenizer.end_id)


def test_long_documents_are_encoded_in_pieces_with_the_same_ids(tokenizer, monkeypatch):
    text = "\n".join(text.strip() for text in TEXTS) + "  \n \n\nx\n" + "y" * 500
    whole = tokenizer.encode(text)
    monkeypatch.setattr(tokenizer_module, "_PIECE", 7)
    calls = []
    encode = tokenizer._encode_whole
    monkeypatch.setattr(tokenizer, "_encode_whole", lambda piece: calls.append(piece) or encode(piece))
    assert tokenizer.encode(text) == whole
    assert len(calls) > 50 and "".join(calls) == text
    assert tokenizer.encode_batch([text, "z"]) == [whole, encode("z")]


def _word_level(words, **special):
    """A tokenizer.json of whole words, as other projects write them."""
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.enable_truncation(3)
    backend.enable_padding(length=3)
    return backend


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"])
def test_foreign_files(tmp_path, name):
    backend = _word_level(["<unk>", "one", "two"])
    backend.add_special_tokens([name])
    backend.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert (tokenizer.end_id, tokenizer.vocab_size) == (3, 4)
    assert tokenizer.encode("one two one two") == [1, 2, 1, 2]  # neither truncated nor padded
    assert 3 not in tokenizer.encode(f"one{name} two")


def test_a_file_that_joins_lines_differently_is_never_cut(tmp_path, monkeypatch):
    backend = tokenizers.Tokenizer.from_str(_byte_level(prefix_space=True))
    backend.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    whole = tokenizer.encode("one\ntwo\nthree")
    monkeypatch.setattr(tokenizer_module, "_PIECE", 1)
    assert tokenizer.encode("one\ntwo\nthree") == whole


def _byte_level(prefix_space):
    backend = train_tokenizer(TEXTS, 300)._backend
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    return backend.to_str()


def _error(function, *args):
    with pytest.raises(UserError) as caught:
        function(*args)
    return str(caught.value)


def test_bad_files_are_named(tmp_path):
    path = tmp_path / "t.json"
    assert f"cannot read the tokenizer {path}" in _error(load_tokenizer, path)
    for content in (b"", b"{", b"[1]", json.dumps({"version": "1.0"}).encode(), b"\xff\xfe"):
        path.write_bytes(content)
        assert str(path) in _error(load_tokenizer, path)


def test_vocabulary_checks(tokenizer):
    check_vocabulary(tokenizer, 390)
    check_vocabulary(tokenizer, 512)
    message = _error(check_vocabulary, tokenizer, 389)
    assert "vocabulary mismatch" in message and "390" in message and "389" in message
    assert "257" in _error(train_tokenizer, TEXTS, 256)
    assert train_tokenizer(["a"], 1000).vocab_size == 257


def test_long_words_are_cut_for_training_only():
    word = "".join(random.Random(0).choices("ACGT", k=60_000))
    start = time.process_time()
    tokenizer = train_tokenizer([word], 600)
    assert time.process_time() - start < 5  # a second at most; without the cut half a minute
    assert tokenizer.vocab_size == 600 and tokenizer.decode(tokenizer.encode(word)) == word
    assert tokenizer.encode("A" * 300 + " b") == load(tokenizer).encode("A" * 300 + " b")
    assert json.loads(tokenizer._definition)["pre_tokenizer"]["type"] == "ByteLevel"


def load(tokenizer):
    return pickle.loads(pickle.dumps(tokenizer))
