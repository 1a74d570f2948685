"""Generation equals repeated full forward passes; sampling follows its seed and its restrictions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cubit_jax.inference import generation
from cubit_jax.inference.generation import generate_text, generate_tokens, sample_restricted
from cubit_jax.layers import MIXERS
from cubit_jax.model import LanguageModel, ModelConfig

LENGTHS, NEW, VOCAB = [1, 5, 12], 9, 41


@pytest.fixture(scope="module")
def trained():
    """A model with every mixer, its parameters, and a batch of prompts."""
    config = ModelConfig(
        vocab_size=VOCAB,
        num_layers=len(MIXERS),
        model_dim=16,
        num_heads=2,
        head_dim=8,
        mlp_dim=16,
        seq_len=32,
        mixers=tuple(MIXERS),
        implementation="reference",  # compiles fastest
    )
    model = LanguageModel(config)
    params = jax.jit(model.init)(jax.random.key(3), jnp.zeros((1, 4), jnp.int32))["params"]
    # Sharper logits: the differences between the two ways to compute them then change no token.
    params["lm_head"]["kernel"] *= 50
    tokens = np.random.default_rng(0).integers(0, VOCAB, (3, max(LENGTHS)))
    return model, params, tokens


@pytest.fixture(scope="module")
def greedy(trained):
    """NEW tokens a prompt by the most likely token of a full forward pass each."""
    model, params, tokens = trained
    forward = jax.jit(lambda tokens: model.apply({"params": params}, tokens))
    rows = np.zeros((3, max(LENGTHS) + NEW), np.int32)
    rows[:, : max(LENGTHS)] = tokens
    for step in range(NEW):
        place = np.array(LENGTHS) + step
        rows[np.arange(3), place] = np.argmax(forward(jnp.asarray(rows))[np.arange(3), place - 1], -1)
    return np.stack([row[length : length + NEW] for row, length in zip(rows, LENGTHS)])


def generate(trained, **options):
    model, params, tokens = trained
    return generate_tokens(model, params, tokens, LENGTHS, **{"max_new_tokens": NEW, "end_id": None} | options)


def test_greedy_is_argmax_of_the_full_forward(trained, greedy):
    new, count = generate(trained)
    np.testing.assert_array_equal(new, greedy)
    np.testing.assert_array_equal(count, [NEW] * 3)


@pytest.mark.full
def test_padding_of_prompts_is_not_read(trained, greedy):
    model, params, tokens = trained
    for row, length in enumerate(LENGTHS):
        tokens = tokens.copy()
        tokens[row, length:] = VOCAB - 1
    np.testing.assert_array_equal(generate((model, params, tokens))[0], greedy)


def test_top_k_1_is_greedy(trained, greedy):
    np.testing.assert_array_equal(generate(trained, temperature=1.5, top_k=1, seed=4)[0], greedy)


@pytest.mark.full
def test_seeds_repeat_and_differ(trained, greedy):
    hot = {"temperature": 30.0}
    first, again, other = (generate(trained, seed=seed, **hot)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first != greedy).any()


def test_stops_at_the_end_of_text(trained, greedy):
    end = int(greedy[1, 3])
    new, count = generate(trained, end_id=end)
    for row in range(3):
        places = np.flatnonzero(greedy[row] == end)
        expected = places[0] if len(places) else NEW
        assert count[row] == expected
        np.testing.assert_array_equal(new[row, :expected], greedy[row, :expected])
        assert (new[row, expected:] == end).all()
    assert count[1] == np.flatnonzero(greedy[1] == end)[0] < NEW


def test_ids_beyond_the_tokenizer_are_not_produced(trained):
    limit = 7
    assert generate(trained, temperature=100.0)[0].max() >= limit
    assert generate(trained, temperature=100.0, vocab_size=limit)[0].max() < limit
    assert generate(trained, vocab_size=limit)[0].max() < limit


def test_text_is_the_decoded_continuation(trained):
    class Letters:
        """One token a letter, 0 is the end; a text's first space is lost in decoding, as with some tokenizers."""

        end_id, vocab_size = 0, 27
        letters = "\0 bcdefghijklmnopqrstuvwxyz"

        def encode(self, text):
            return [self.letters.index(letter) for letter in text]

        def decode(self, ids):
            return "".join(self.letters[i] for i in ids).removeprefix(" ")

    model, params, _ = trained
    prompts = ["", "some words", "hello words"]
    texts = generate_text(model, params, Letters(), prompts, max_new_tokens=NEW)
    ids = [[0, *Letters().encode(prompt)] for prompt in prompts]
    tokens = [row + [0] * (12 - len(row)) for row in ids]
    new, counts = generate_tokens(
        model, params, tokens, [len(row) for row in ids], max_new_tokens=NEW, end_id=0, vocab_size=27
    )
    expected = ["".join(Letters.letters[i] for i in row[:count]) for row, count in zip(new, counts)]
    assert texts == [expected[0].removeprefix(" "), *expected[1:]]
    assert any(texts)


def test_text_after_a_prompt_that_ends_within_a_character(trained, monkeypatch):
    """Bytes as tokens: the new ones complete the character whose first two bytes end the prompt."""
    new = np.array([[0xAC, ord("!"), 0, 0]])
    monkeypatch.setattr(generation, "generate_tokens", lambda *arguments, **options: (new, np.array([2])))

    class Bytes:
        end_id, vocab_size = 256, 257

        def encode(self, text):
            return list(text.encode("latin-1"))

        def decode(self, ids):
            return bytes(ids).decode(errors="replace")

    prompt = "ab\xe2\x82"
    assert Bytes().decode(Bytes().encode(prompt)) == "ab\N{REPLACEMENT CHARACTER}"
    model, params, _ = trained
    assert generation.generate_text(model, params, Bytes(), [prompt], max_new_tokens=4) == ["\N{EURO SIGN}!"]


@pytest.mark.parametrize(
    "top_k, top_p, kept",
    [
        (2, 1.0, [3, 0]),
        (4, 0.5, [3]),
        (4, 0.51, [3, 0]),
        (4, 0.85, [3, 0, 2]),
        (4, 1.0, [3, 0, 2, 1]),
        (2, 0.85, [3, 0]),
        (1, 0.01, [3]),
    ],
)
def test_restrictions_keep_the_likely_tokens(top_k, top_p, kept):
    probabilities = np.array([0.3, 0.04, 0.16, 0.5])
    rows = 4000
    logits = jnp.broadcast_to(jnp.log(probabilities), (rows, 4)).astype(jnp.float32)
    drawn = np.bincount(jax.jit(sample_restricted)(jax.random.key(0), logits, top_k, top_p), minlength=4) / rows
    expected = np.where(np.isin(np.arange(4), kept), probabilities, 0)
    np.testing.assert_allclose(drawn, expected / expected.sum(), atol=0.03)
    assert set(np.flatnonzero(drawn)) == set(kept)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0 must"),
        ({"temperature": 1e-38}, "temperature=1e-38 must"),
        ({"temperature": float("nan")}, "temperature=nan must"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"top_p": 1.5}, "top_p=1.5 must be above 0 and at most 1"),
    ],
)
def test_bad_arguments(trained, options, message):
    with pytest.raises(ValueError, match=message):
        generate(trained, **options)


def test_bad_lengths(trained):
    model, params, tokens = trained
    with pytest.raises(ValueError, match=r"lengths=.* must be from 1 to 12"):
        generate_tokens(model, params, tokens, [0, 5, 12], max_new_tokens=1, end_id=None)
