"""Tokenizers that others made: they load, their special tokens never come out of text, and what they lose is known."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from cubit_jax.data.corpus import Corpus
from cubit_jax.data.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer
from cubit_jax.data.tokenizer_training import check_restored, train_tokenizer
from cubit_jax.runtime.errors import UserError

NAMES = ("<s>", "</s>", "<pad>", "[SEP]")
CHARACTERS = "<>/[]SEPspad b"


def _unigram(names):
    pieces = [("<unk>", 0.0), *((name, 0.0) for name in names), *((c, -3.0) for c in CHARACTERS), ("\u2581a", -2.0)]
    backend = tokenizers.Tokenizer(models.Unigram([*pieces, ("\u2581", -4.0)], unk_id=0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return backend


def _words(model, names):
    words = ["<unk>", *names, "a", "b", *CHARACTERS.replace("b", "").replace("a", "")]
    backend = tokenizers.Tokenizer(model({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def _bpe(names, merges=()):
    vocab = {word: i for i, word in enumerate(["<unk>", *names, *CHARACTERS, *map("".join, merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, list(merges), unk_token="<unk>", ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Whitespace() if merges else None
    return backend


KINDS = {
    "unigram": _unigram,
    "word level": lambda names: _words(models.WordLevel, names),
    "word piece": lambda names: _words(models.WordPiece, names),
    "bpe": _bpe,
    "bpe without a pre-tokenizer": lambda names: _bpe(names, [("<", "/"), ("s", ">")]),
}


@pytest.mark.parametrize("marked", ["not added", "added", "added as ordinary"])
@pytest.mark.parametrize("kind", KINDS)
def test_special_names_in_text_are_text(tmp_path, kind, marked):
    backend = KINDS[kind](NAMES)
    if marked != "not added":
        backend.add_tokens([AddedToken(name, special=marked == "added") for name in NAMES])
    backend.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    special = {backend.token_to_id(name) for name in NAMES}
    assert tokenizer.end_token == "</s>" and tokenizer.end_id == backend.token_to_id("</s>")
    for name in NAMES:
        for text in (name, f"a {name} b", f"a{name}{name}b", f"b\n{name}\na", f"a{name[:-1]} {name[-1]}"):
            assert not special & {*tokenizer.encode(text)}, text
            assert tokenizer.encode_batch([text]) == [tokenizer.encode(text)]
    # Other text is encoded as before, and a saved copy is the same tokenizer.
    assert tokenizer.encode("a b a") == tokenizers.Tokenizer.from_file(str(tmp_path / "t.json")).encode("a b a").ids
    tokenizer.save(tmp_path / "copy.json")
    for other in (load_tokenizer(tmp_path / "copy.json"), pickle.loads(pickle.dumps(tokenizer))):
        assert (other.digest, other.encode("a </s><s> b")) == (tokenizer.digest, tokenizer.encode("a </s><s> b"))


def test_a_tokenizer_without_an_end_of_text_gets_one(tmp_path):
    _words(models.WordLevel, ()).save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert tokenizer.end_token == END_OF_TEXT and tokenizer.end_id == tokenizer.vocab_size - 1
    assert tokenizer.end_id not in tokenizer.encode(f"a {END_OF_TEXT} b")
    assert "no end-of-text token" in tokenizer.notes[0]


def test_what_cannot_be_encoded_as_text_is_one_line():
    # One character cannot be split.
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "~": 2}, unk_token="<unk>"))
    backend.add_special_tokens(["~", "</s>"])
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (note,) = Tokenizer(backend, "tokenizer t.json").notes
    assert note == "tokenizer t.json encodes these characters in text as special tokens: '~'"
    # Unknown text must not end a document.
    backend = tokenizers.Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="</s>"))
    with pytest.raises(UserError, match="encodes the characters '</s>' in text as its end-of-text id"):
        Tokenizer(backend)


def test_text_that_is_normalized_to_a_special_name_is_text():
    backend = _words(models.WordLevel, ("</s>", "~"))
    backend.normalizer = normalizers.Replace("~", "</s>")
    assert backend.token_to_id("</s>") not in Tokenizer(backend).encode("a ~ a")


def test_dropout_is_switched_off(tmp_path):
    backend = tokenizers.Tokenizer.from_str(train_tokenizer(["abab abab abc"] * 9, 270)._definition)
    plain = Tokenizer(tokenizers.Tokenizer.from_str(backend.to_str())).encode("abab abc")
    backend.model.dropout = 0.5
    backend.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert "dropout 0.5" in tokenizer.notes[0] and "switched off" in tokenizer.notes[0]
    for _ in range(20):
        assert tokenizer.encode("abab abc") == plain == pickle.loads(pickle.dumps(tokenizer)).encode("abab abc")


def _byte_fallback():
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a"]
    merges = [("\u2581", "a")]
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


def test_byte_fallback_decodes_every_whole_character():
    tokenizer = _byte_fallback()
    text = "a \u00e9\u65e5\U0001f600 a"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    # The text of more ids begins with the text of the first ones, wherever a character is whole.
    prompt = tokenizer.encode("a \u00e9")
    for more in ([0xE6], [0xE6, 0x97], [0xFF, 0x41], [0xE6, 0x97, 0xA5, 0x80]):
        whole = tokenizer.decode([*prompt, *(2 + byte for byte in more)])
        assert whole == "a \u00e9" + bytes(more).decode("utf-8", "replace")


def _lossy(change):
    backend = tokenizers.Tokenizer.from_str(train_tokenizer(["a"], 257)._definition)
    change(backend)
    return Tokenizer(backend)


def test_a_tokenizer_that_loses_text_has_no_bits_per_byte(caplog):
    corpus = Corpus(["a"], ["Some T\u00c9XT"], "", 10)
    assert check_restored(corpus, train_tokenizer(["a"], 257)).scored_bytes == 10
    losses = {
        "unknown characters vanish": Tokenizer(tokenizers.Tokenizer(models.BPE({"a": 0, "</s>": 1}, []))),
        "normalizer": _lossy(lambda backend: setattr(backend, "normalizer", normalizers.Lowercase())),
        "unknown token": Tokenizer(_words(models.WordLevel, ("</s>",))),
        "a space in front": _lossy(
            lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True))
        ),
    }
    for name, tokenizer in losses.items():
        assert check_restored(corpus, tokenizer).scored_bytes is None, name
    assert check_restored(corpus, _byte_fallback()).scored_bytes == 10
    # Of prepared data the program that wrote it knows.
    prepared = dataclasses.replace(corpus, heldout=np.zeros(9, np.uint16), restored=False)
    assert check_restored(prepared, losses["normalizer"]).scored_bytes is None
    assert check_restored(dataclasses.replace(prepared, restored=True), losses["normalizer"]).scored_bytes == 10


@pytest.mark.parametrize("content", ['{"model": 3}', json.dumps({"version": "1.0", "model": {"type": "BPE"}})])
def test_other_json_is_one_line(tmp_path, content):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(UserError, match=r"is not a Hugging Face tokenizer\.json"):
        load_tokenizer(tmp_path / "t.json")
