"""What a run prints: what is about to happen, and what it has come to."""

import os
import shlex
import shutil
import sys
from typing import Any

import jax
import numpy as np

from cubit_jax import data
from cubit_jax.data.bigram import bigram_bits_per_byte
from cubit_jax.data.sources import counted
from cubit_jax.flops import flops_per_token
from cubit_jax.inference.evaluation import nonfinite_parameters
from cubit_jax.inference.generation import generate_text
from cubit_jax.model import count_parameters
from cubit_jax.planning import step_time
from cubit_jax.runtime import cli
from cubit_jax.runtime.errors import UserError
from cubit_jax.runtime.progress import say
from cubit_jax.training import workdir
from cubit_jax.training.clock import Clock
from cubit_jax.training.run import Run

_BIGRAM_TOKENS = 20_000_000  # tokens of training text that the bigram baseline is fitted on, at most
_SAMPLE_TOKENS = 120


def describe(run: Run, state: dict[str, Any], resumed: bool) -> None:
    """Prints what is about to happen."""
    config, corpus = run.config, run.corpus
    kinds = {device.device_kind for device in run.mesh.devices.flat}
    axes = " ".join(f"{name}={size}" for name, size in run.mesh.shape.items() if size > 1) or "one device"
    tokens = config.batch_size * config.seq_len
    documents = "" if isinstance(corpus.train, np.ndarray) else f"{counted(len(corpus.train), 'document')}, "
    say(f"workdir     {run.folder}")
    say(f"devices     {run.mesh.size} x {', '.join(sorted(kinds))}, mesh: {axes}")
    say(
        f"model       {run.model_config.num_layers} layers of {' + '.join(run.model_config.mixers)}, "
        f"{count_parameters(state['params']):,} parameters"
    )
    say(
        f"data        {config.data.source}: {documents}{corpus.heldout_bytes:,} bytes held out; "
        f"{run.tokenizer.vocab_size:,} tokens in the vocabulary"
    )
    say(
        f"training    {config.num_steps:,} steps of {config.batch_size} x {config.seq_len} = {tokens:,} tokens, "
        f"{config.num_steps * tokens:,} in all"
    )
    corpus_tokens = data.estimate_tokens(corpus.train, run.tokenizer)
    say(
        f"            about {corpus_tokens:,} tokens to train on: the run makes "
        f"{config.num_steps * tokens / max(corpus_tokens, 1):.2g} epochs"
    )
    flops = flops_per_token(run.model_config, count_parameters(state["params"]))
    if flops is not None and (steps := config.num_steps - int(state["step"])) > 0:
        devices = 1 if jax.default_backend() == "cpu" else run.mesh.size
        seconds = step_time.step_seconds(flops, tokens, step_time.product_flops(config.model.dtype), devices)
        for line in step_time.describe_time(seconds, steps):
            say(line)
    for note in data.size_notes(corpus, corpus_tokens, config.seq_len):
        say(f"note        {note}")
    if config.optimizer.warmup_steps >= config.num_steps:
        say(
            f"note        warm-up ({config.optimizer.warmup_steps} steps) is as long as the run: the learning rate "
            "only rises"
        )
    if resumed:
        step = int(state["step"])
        complete = "" if step < config.num_steps else ": the run is complete, a larger --config.num_steps goes on"
        marker = workdir.read_preempted(run.folder) if jax.process_index() == 0 else None
        stopped = f" after {marker['signal']} at {marker['time']}" if marker else ""
        say(f"resumed     at step {step:,}{stopped}{complete}")


def report(run: Run, state: dict[str, Any], evaluation: dict[str, float] | None, clock: Clock | None) -> None:
    """Prints what a finished run has come to, a sample, and what to do next.

    Args:
      evaluation: of the state's parameters, as of `Run.evaluate`; None evaluates here.
      clock: of the steps of this process; None if it made none.
    """
    config = run.config
    step = int(state["step"])
    if bad := nonfinite_parameters(state["params"]):
        raise UserError(
            f"the parameters are not finite after step {step}, {bad[0]} first: try a lower optimizer.learning_rate "
            f"than {config.optimizer.learning_rate} in a new workdir"
        )
    evaluation = evaluation or run.evaluate(state["params"])
    prompt = "def" if config.data.source == "stdlib" else ""
    sample = _sample(run, state["params"], prompt)
    if jax.process_index():  # what the devices of all processes compute ends here
        return
    bigram = bigram_bits_per_byte(
        _first_tokens(run.corpus.train, run.tokenizer),
        data.token_stream(run.corpus.heldout, run.tokenizer),
        run.tokenizer.vocab_size,
        run.corpus.heldout_bytes,
    )
    speed = "" if clock is None else f", {clock.tokens / max(clock.seconds, 1e-9):,.0f} tokens/s"
    say(f"\ndone        {step:,} steps, {step * config.batch_size * config.seq_len:,} tokens{speed}")
    bits = "no bits per byte: the tokenizer does not give the text back exactly"
    if run.corpus.restored:
        bits = f"bits per byte {evaluation['eval/bits_per_byte']:.4f} (a bigram model of the same tokens: {bigram:.4f})"
    say(f"held-out    loss {evaluation['eval/loss']:.4f}, {bits}")
    folder = shlex.quote(str(run.folder))
    other = "cubit" if set(run.model_config.mixers) == {"attention"} else "transformer"
    if sample is None:
        say("sample      none: a mixer of this model keeps no cache to decode with")
        generate = ""
    else:
        lines = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in prompt + sample)
        say("sample\n    " + lines.replace("\n", "\n    "))
        arguments = f"--prompt='{prompt or 'The'}' --max_new_tokens=200"
        generate = f"\n    {_python()} -m cubit_jax.generate --workdir={folder} {arguments}"
    say(f"""next{generate}
    {_python()} -m cubit_jax.evaluate --workdir={folder}
    to compare, this command again with {_other_family(other)}, and another --workdir
    tensorboard --logdir={folder}   # pip install tensorboard""")


def _sample(run, params, prompt):
    """What the model makes of the prompt; None if it cannot generate."""
    if not run.model.can_decode:
        return None
    options = {"max_new_tokens": _SAMPLE_TOKENS, "temperature": 0.7, "seed": run.config.seed}
    return generate_text(run.model, params, run.tokenizer, [prompt], **options)[0]


def _other_family(other):
    """How the same command trains another mixer. A flag that stands in the way is named: it goes before the config."""
    given = cli.overridden()
    way = f"--config=configs/{other}.py and its size"
    if "model.mixers" in given:
        way = f"--config.model.mixers={'attention' if other == 'transformer' else other}"
    if options := sorted(name for name in given if name.startswith("model.options.")):
        way += f", without {' '.join(f'--config.{name}' for name in options)}"
    return way


def _python():
    """How a shell in this folder calls the interpreter that is running."""
    if shutil.which("python") == sys.executable:
        return "python"
    relative = os.path.relpath(sys.executable)
    return sys.executable if relative.startswith("..") else relative


def _first_tokens(documents, tokenizer):
    """The first tokens of the training stream, enough for a bigram model."""
    if isinstance(documents, np.ndarray):
        return documents[:_BIGRAM_TOKENS]
    parts, size = [], 0
    for ids in data.encode_documents(documents, tokenizer):
        parts.append(ids)
        size += len(ids)
        if size >= _BIGRAM_TOKENS:
            break
    return np.concatenate(parts)
