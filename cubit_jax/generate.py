"""Text from a trained run: python -m cubit_jax.generate --workdir=DIR --prompt='def' --max_new_tokens=100"""

import functools
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from cubit_jax import partitioning
from cubit_jax.model import init_cache
from cubit_jax.runtime import cli, distributed
from cubit_jax.runtime.errors import UserError
from cubit_jax.training.trained import load_trained

_COLDEST = 1e-6  # logits divided by less are more than float32 holds


def generate_tokens(
    model,
    params,
    tokens,
    lengths,
    *,
    max_new_tokens,
    end_id,
    temperature=0.0,
    top_k=None,
    top_p=None,
    seed=0,
    vocab_size=None,
):
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
        raise ValueError(f"{lengths=} must be from 1 to {tokens.shape[1]}, one a prompt")
    _check(max_new_tokens, temperature, top_k, top_p)
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


def sample_restricted(key, logits, top_k, top_p):
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
    model, params, tokenizer, prompts, *, max_new_tokens, temperature=0.0, top_k=None, top_p=None, seed=0
):
    """The continuations, list of str without the prompts: see `generate_tokens`. A prompt begins a document."""
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
        # Some tokenizers decode the first word of a text without its space: decode all, then cut the prompt off.
        whole = tokenizer.decode([*prompt[1:], *row[:count]])
        texts.append(whole[len(tokenizer.decode(prompt[1:])) :])
    return texts


def _check(max_new_tokens, temperature, top_k, top_p):
    if max_new_tokens < 1:
        raise ValueError(f"{max_new_tokens=} must be at least 1")
    if not (temperature == 0 or _COLDEST <= temperature < math.inf):
        raise ValueError(f"{temperature=} must be 0 (the most likely token), or from {_COLDEST} and finite")
    if top_k is not None and top_k < 1:
        raise ValueError(f"{top_k=} must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"{top_p=} must be above 0 and at most 1")


def define_flags():
    flags.DEFINE_string("workdir", None, "Folder of the run, as given to train; its last checkpoint is used.")
    flags.DEFINE_multi_string(
        "prompt", [], "Text to go on from; give the flag again for a batch of several. An empty one begins a document."
    )
    flags.DEFINE_multi_string("prompt_file", [], "File whose whole text is a prompt; may be given several times.")
    flags.DEFINE_integer(
        "max_new_tokens",
        100,
        "Tokens to generate at most; a row stops at the end of its document. "
        "Together with the prompt they may exceed the length that the model was trained with.",
    )
    flags.DEFINE_float("temperature", 0.7, "Divides the logits before sampling; 0 takes the most likely token.")
    flags.DEFINE_integer("top_k", None, "Sample from this many most likely tokens only.", upper_bound=2**31 - 1)
    flags.DEFINE_float("top_p", None, "Sample from the fewest tokens whose probabilities sum to this, above 0 to 1.")
    flags.DEFINE_integer("num_samples", 1, "Continuations of each prompt.", lower_bound=1)
    flags.DEFINE_integer(
        "seed", 0, "Of the sampling; the same command gives the same text.", lower_bound=-(2**63), upper_bound=2**63 - 1
    )


def main():
    distributed.require_one_process("generate")
    options = flags.FLAGS
    prompts = [*options.prompt, *map(_read, options.prompt_file)]
    if not prompts:
        raise UserError("there is no prompt: give --prompt=TEXT or --prompt_file=FILE")
    sampling = {
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
    }
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # bytes of the command line that are not UTF-8
            raise UserError(f"the prompt {prompt!r} is not UTF-8 text") from error
    try:
        _check(**sampling)
    except ValueError as error:
        raise UserError(error) from error
    run = load_trained(options.workdir)
    longest = 1 + max(len(run.tokenizer.encode(prompt)) for prompt in prompts)
    if longest + options.max_new_tokens > run.config.seq_len:
        print(
            f"note: a prompt of {longest} tokens and {options.max_new_tokens} new ones are longer than the "
            f"{run.config.seq_len} that the model was trained with",
            file=sys.stderr,
        )
    prompts = [prompt for prompt in prompts for _ in range(options.num_samples)]
    with jax.set_mesh(run.mesh):
        texts = generate_text(run.model, run.params, run.tokenizer, prompts, seed=options.seed, **sampling)
    for index, (prompt, text) in enumerate(zip(prompts, texts)):
        if len(prompts) > 1:
            print(f"--- prompt {index // options.num_samples + 1}, sample {index % options.num_samples + 1}")
        print(prompt + text)


def _read(path):
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --prompt_file={path}: {getattr(error, 'strerror', None) or error}") from error


if __name__ == "__main__":
    define_flags()
    cli.run(main, required=["workdir"])
