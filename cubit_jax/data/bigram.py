"""Interpolated Kneser-Ney bigram model: the baseline that a trained language model has to beat."""

import numpy as np


def bigram_bits_per_byte(train: np.ndarray, heldout: np.ndarray, vocab_size: int, heldout_bytes: int) -> float:
    """Bits per byte of a bigram model, fitted on `train`, on exactly the targets of `data.heldout_batches`.

    p(y | x) = max(c(x, y) - d, 0) / c(x) + d n(x) / c(x) * q(y), where c counts pairs, n(x) is the number of different
    tokens seen after x, q(y) the share of different pairs that end in y (add-one smoothed, so that every token has a
    probability), and d = n1 / (n1 + 2 n2) from the numbers of pairs seen once and twice (Ney, Essen and Kneser 1994).
    The smoothing is fitted on the training tokens alone.

    Args:
      train, heldout: token streams, [n] and [m] int, as from `data.token_stream`; consecutive tokens are the pairs.
      vocab_size: more than the largest token.
      heldout_bytes: bytes of text in `heldout`.
    """
    pairs, counts = np.unique(_pairs(train, vocab_size), return_counts=True)
    seen = np.bincount(pairs // vocab_size, counts, vocab_size)  # c(x)
    followers = np.bincount(pairs // vocab_size, minlength=vocab_size)  # n(x)
    backoff = (np.bincount(pairs % vocab_size, minlength=vocab_size) + 1) / (len(pairs) + vocab_size)  # q(y)
    once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    discount = (once + 1) / (once + 2 * twice + 2)  # + 1, + 2: within (0, 1) even where nothing was seen once or twice

    wanted = _pairs(heldout, vocab_size)
    first, second = np.divmod(wanted, vocab_size)
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    count = np.where(pairs[place] == wanted, counts[place], 0)
    known = np.maximum(seen[first], 1)
    probability = np.maximum(count - discount, 0) / known + discount * followers[first] / known * backoff[second]
    probability = np.where(seen[first] > 0, probability, backoff[second])
    return float(-np.log2(probability).sum() / heldout_bytes)


def _pairs(stream, vocab_size):
    stream = np.asarray(stream).astype(np.int64)
    return stream[:-1] * vocab_size + stream[1:]
