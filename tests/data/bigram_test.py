"""The bigram baseline: a probability distribution, close to the truth on data it can know."""

import numpy as np
import pytest

from cubit_jax.data.bigram import bigram_bits_per_byte


def _bits(train, first, second, vocab_size):
    """-log2 p(second | first): one pair in one byte."""
    return bigram_bits_per_byte(train, np.array([first, second]), vocab_size, 1)


@pytest.mark.parametrize("length", [2, 3, 50, 400])
def test_probabilities_add_up_to_one_after_every_token(length):
    train = np.random.default_rng(0).integers(0, 9, length)
    for first in range(12):  # 9 to 11 were never seen
        total = sum(2 ** -_bits(train, first, second, 12) for second in range(12))
        assert total == pytest.approx(1, abs=1e-9)


def test_reaches_the_entropy_of_a_markov_chain():
    generator = np.random.default_rng(1)
    table = generator.dirichlet(np.full(20, 0.3), size=20)
    tokens = [0]
    for _ in range(60_000):
        tokens.append(generator.choice(20, p=table[tokens[-1]]))
    train, heldout = np.split(np.array(tokens), [50_000])
    truth = -np.log2(table[heldout[:-1], heldout[1:]]).sum() / len(heldout)
    found = bigram_bits_per_byte(train, heldout, 20, len(heldout))
    assert truth < found < 1.005 * truth
    assert bigram_bits_per_byte(train, heldout, 20, 2 * len(heldout)) == pytest.approx(found / 2)


def test_large_vocabulary_and_narrow_integers():
    train = np.random.default_rng(2).integers(0, 50_000, 20_000).astype(np.uint16)  # products exceed 32 bits
    repeated = np.concatenate([train, train])
    assert bigram_bits_per_byte(repeated, train, 50_257, len(train)) < 2
    assert bigram_bits_per_byte(train, train[::-1], 50_257, len(train)) > 10
