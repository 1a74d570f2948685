"""Text from a model: one parallel pass over the prompts, then one token at a time from the cache."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cubit_jax import partitioning
from cubit_jax.model import LanguageModel, init_cache

_MIN_TEMPERATURE = 1e-6  # logits divided by less are more than float32 holds


def generate_tokens(
    model: LanguageModel,
    params: Any,
    tokens: np.ndarray,
    lengths: np.ndarray,
    *,
    max_new_tokens: int,
    end_id: int | None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    vocab_size: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Continues a batch of prompts of unequal length: one parallel pass over them, then one token at a time.

    Args:
      model: LanguageModel. params: its parameters.
      tokens: int [B, L], prompts, right-padded with anything.
      lengths: int [B], their real lengths, from 1 to L.
      max_new_tokens: N, at least 1.
      end_id: a row stops after producing it; the loop stops when all rows have. None never stops.
      temperature: the logits are divided by it; at least 1e-6, or 0, which takes the most likely token.
      top_k: sample from the k most likely tokens only. top_p: from the fewest whose probabilities sum to at least p.
      seed: of the sampling; the same seed and batch give the same tokens.
      vocab_size: ids from here on are never produced; None allows all.

    Returns:
      (new int32 [B, N], count int32 [B]): the new tokens, of which count are real and come before the end (if any);
      the rest is end_id.

    Raises:
      ValueError: an argument is outside its range.
    """
    tokens, lengths = np.asarray(tokens, np.int32), np.asarray(lengths, np.int32)
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
        raise ValueError(f"{tokens.shape=} must be [B, L] and {lengths.shape=} [B]")
    if lengths.size == 0 or lengths.min() < 1 or lengths.max() > tokens.shape[1]:
        raise ValueError(f"{lengths=} must be from 1 to {tokens.shape[1]}, one per prompt")
    check_sampling(max_new_tokens, temperature, top_k, top_p)
    new, count = _generate(
        params,
        tokens,
        lengths,
        jax.random.key(seed),
        -1 if end_id is None else end_id,
        vocab_size or model.config.vocab_size,
        temperature or 1.0,
        top_k or model.config.vocab_size,
        1.0 if top_p is None else top_p,
        model=model,
        max_new_tokens=max_new_tokens,
        greedy=temperature == 0,
        restricted=top_k is not None or top_p is not None,
    )
    return np.asarray(new), np.asarray(count)


@functools.partial(jax.jit, static_argnames=("model", "max_new_tokens", "greedy", "restricted"))
def _generate(
    params,
    tokens,
    lengths,
    key,
    end_id,
    vocab_size,
    temperature,
    top_k,
    top_p,
    *,
    model,
    max_new_tokens,
    greedy,
    restricted,
):
    batch, width = tokens.shape
    allowed = jnp.arange(model.config.vocab_size) < vocab_size

    def pick(step, logits):
        logits = jnp.where(allowed, logits, -jnp.inf)
        if greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        step_key, logits = jax.random.fold_in(key, step), logits / temperature
        if restricted:
            return sample_restricted(step_key, logits, top_k, top_p)
        return jax.random.categorical(step_key, logits).astype(jnp.int32)

    def forward(tokens, cache, **arguments):
        return model.apply({"params": params}, tokens, cache=cache, method="next_logits", **arguments)

    prompt = (jnp.arange(width) < lengths[:, None]).astype(jnp.int32)
    logits, cache = forward(
        jnp.where(prompt == 1, tokens, 0),
        init_cache(model.config, batch, width + max_new_tokens),
        segment_ids=prompt,
        prefill=True,
    )
    first = pick(0, logits)
    new = jnp.full((batch, max_new_tokens), end_id, jnp.int32).at[:, 0].set(first)

    def running(state):
        step, _, _, _, ended = state
        return (step < max_new_tokens) & ~jnp.all(ended)

    def advance(state):
        step, cache, token, new, ended = state
        logits, cache = forward(token[:, None], cache)
        token = jnp.where(ended, end_id, pick(step, logits))
        return step + 1, cache, token, new.at[:, step].set(token), ended | (token == end_id)

    step, _, _, new, ended = jax.lax.while_loop(running, advance, (1, cache, first, new, first == end_id))
    count = jnp.where(ended, jnp.argmax(new == end_id, axis=1), step).astype(jnp.int32)
    # Whole on every device, so that every process can read them.
    return partitioning.constrain(new, "NN"), partitioning.constrain(count, "N")


def sample_restricted(key: jax.Array, logits: jax.Array, top_k: int | jax.Array, top_p: float | jax.Array) -> jax.Array:
    """int32 [B] from logits [B, V]: of the top_k most likely tokens, the fewest whose probabilities reach top_p.

    Among equals the smaller id counts as more likely, so that top_k=1 is argmax. One token is always left.
    """
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    probabilities = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    rank = jnp.arange(logits.shape[-1])
    # Summed in float32 the probabilities may pass 1 early: top_p = 1 is to restrict nothing.
    kept = (rank < top_k) & ((before < top_p) | (top_p >= 1) | (rank == 0))
    chosen = jax.random.categorical(key, jnp.where(kept, ranked, -jnp.inf))
    return jnp.take_along_axis(order, chosen[:, None], axis=-1)[:, 0].astype(jnp.int32)


def generate_text(
    model: LanguageModel,
    params: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> list[str]:
    """The continuations of the prompts: what all tokens decode to, without what the prompt's tokens decode to.

    A prompt begins a document. Arguments as of `generate_tokens`; tokenizer: see `data.tokenizer`.
    """
    ids = [[tokenizer.end_id, *tokenizer.encode(prompt)] for prompt in prompts]
    tokens = np.zeros((len(ids), max(map(len, ids))), np.int32)
    for row, prompt in zip(tokens, ids):
        row[: len(prompt)] = prompt
    new, counts = generate_tokens(
        model,
        params,
        tokens,
        [len(prompt) for prompt in ids],
        max_new_tokens=max_new_tokens,
        end_id=tokenizer.end_id,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        vocab_size=tokenizer.vocab_size,
    )
    texts = []
    for prompt, row, count in zip(ids, new, counts):
        # Some tokenizers decode the first word of a text without its space: decode all, then cut the prompt off. Where
        # the prompt ends within a character, which new tokens complete, the two differ from there on.
        whole = tokenizer.decode([*prompt[1:], *row[:count]])
        pairs = zip(whole, tokenizer.decode(prompt[1:]))
        texts.append(whole[sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) :])
    return texts


def check_sampling(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raises ValueError for an argument of `generate_tokens` that is outside its range."""
    if max_new_tokens < 1:
        raise ValueError(f"{max_new_tokens=} must be at least 1")
    if not (temperature == 0 or _MIN_TEMPERATURE <= temperature < math.inf):
        raise ValueError(f"{temperature=} must be 0 (the most likely token), or from {_MIN_TEMPERATURE} and finite")
    if top_k is not None and top_k < 1:
        raise ValueError(f"{top_k=} must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"{top_p=} must be above 0 and at most 1")
