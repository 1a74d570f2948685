"""Trains a language model: python -m cubit_jax.train --config=configs/cubit.py:tiny --workdir=DIR

DIR holds config.json, metrics.jsonl, tensorboard/, checkpoints/ and, where one was trained, tokenizer.json. The same
command on the same DIR goes on where it stopped, with the same batches and the same numbers. On several hosts it is
started once on each, see docs/launch.md; DIR is then on a file system that they share.
"""

import dataclasses
import functools
import os
import pathlib
import shutil
import sys
import time
from typing import Any

import jax
import numpy as np
from absl import flags

from cubit_jax import data, partitioning
from cubit_jax.data.bigram import bigram_bits_per_byte
from cubit_jax.flops import flops_per_token
from cubit_jax.inference.evaluation import heldout_loss
from cubit_jax.inference.generation import generate_text
from cubit_jax.model import LanguageModel, ModelConfig, count_parameters
from cubit_jax.runtime import cli, distributed
from cubit_jax.runtime.errors import UserError
from cubit_jax.runtime.profiler import Trace
from cubit_jax.runtime.signals import StopRequest
from cubit_jax.training import metrics, workdir
from cubit_jax.training import step as train_step
from cubit_jax.training.checkpoint import Checkpoints, SaveError, load_params
from cubit_jax.training.loop import Loop

_BIGRAM_TOKENS = 20_000_000  # tokens of training text that the bigram baseline is fitted on, at most
_SAMPLE_TOKENS = 120


def define_flags():
    cli.define_config()
    distributed.define_flags()
    flags.DEFINE_string(
        "workdir",
        None,
        "Folder of the run: metrics, checkpoints, tokenizer. If it holds a run of the same config, that run goes on.",
    )


def main():
    try:
        distributed.run(lambda: train(flags.FLAGS.config, flags.FLAGS.workdir), stop_together=True)
    except SaveError as error:
        cli.fail(error, at_once=True)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run is made of before its first step."""

    config: Any
    workdir: str
    model_config: ModelConfig
    mesh: jax.sharding.Mesh
    corpus: data.Corpus
    tokenizer: Any

    @functools.cached_property
    def model(self):
        return LanguageModel(self.model_config)

    @property
    def rows(self):
        """Sharding of a batch's arrays."""
        return partitioning.batch_sharding(self.mesh)

    def put(self, batch):
        """This process's rows of a batch -> the global batch on the devices."""
        return partitioning.put_batch(self.mesh, batch)


def train(config, folder):
    """Runs, or goes on with, the run of `config` in `folder` until it is complete or a signal asks it to stop.

    Raises UserError, before anything of an earlier run is touched, if the config, the data, the devices or the folder
    do not fit; and if the run cannot go on.
    """
    config = workdir.with_absolute_paths(config)
    workdir.check_processes(config)
    try:
        model_config, mesh = train_step.check(config)
        partitioning.process_share(mesh)
    except ValueError as error:
        raise UserError(error) from error
    workdir.check_config(folder, config)
    with workdir.lock(folder):
        workdir.check_config(folder, config)  # of a trainer that has just left, too
        corpus, tokenizer = distributed.in_turn(lambda: _open_data(config, folder), "data")
        distributed.agree(corpus.fingerprint, "documents")
        distributed.agree(tokenizer.digest, "tokenizer")
        run = Run(config, folder, model_config, mesh, corpus, tokenizer)
        with jax.set_mesh(run.mesh), StopRequest() as stop:
            _train(run, stop)


def _train(run, stop):
    config, folder = run.config, run.workdir
    checkpoints = Checkpoints(folder, config.keep_checkpoints)
    try:
        state, shardings, data_state = _initial_state(run, checkpoints)
        step = int(state["step"])
        _describe(run, state, resumed=data_state is not None)
        if jax.process_index() == 0:
            workdir.write_config(folder, config)
            workdir.write_corpus(folder, {"documents": run.corpus.fingerprint, "tokenizer": run.tokenizer.digest})
            workdir.clear_preempted(folder)
        evaluation = clock = None
        if step < config.num_steps:
            state, evaluation, clock = _fit(run, state, shardings, data_state, checkpoints, stop)
            step = int(state["step"])
    finally:
        checkpoints.close()
    if stop.name and step < config.num_steps:
        if jax.process_index() == 0:
            workdir.mark_preempted(folder, step, stop.name)
        _say(f"saved at step {step} of {config.num_steps} after {stop.name}; the same command goes on from there")
    else:
        _report(run, state, evaluation, clock)


def _open_data(config, folder):
    corpus = data.open_corpus(config.data, folder)
    workdir.check_corpus(folder, {"documents": corpus.fingerprint})
    tokenizer = data.open_tokenizer(
        config.data, corpus, folder, config.model.vocab_size, reuse=workdir.has_begun(folder)
    )
    workdir.check_corpus(folder, {"tokenizer": tokenizer.digest})
    return corpus, tokenizer


def _initial_state(run, checkpoints):
    """(state, shardings, position in the data or None): from the last checkpoint, another run's parameters, or new."""
    shapes, shardings = train_step.state_shapes(run.model, run.config, run.mesh)
    if checkpoints.latest_step is None:
        params = {}
        if run.config.init_from:
            params = {"params": load_params(run.config.init_from, run.model, shardings["params"])[0]}
        return train_step.make_state(run.model, run.config, shardings) | params, shardings, None
    state, position = checkpoints.restore(shapes)
    return state, shardings, position


def _fit(run, state, shardings, data_state, checkpoints, stop):
    """Trains to the end or until asked to stop: (state, last evaluation or None, Clock)."""
    config = run.config
    start = time.monotonic()
    _say("compiling   the training step")
    step_fn = train_step.compile_train_step(run.model, config, state, shardings, run.rows)
    _say(f"compiled    in {time.monotonic() - start:.0f} s")
    process_index, process_count = partitioning.process_share(run.mesh)
    batches = data.train_batches(
        run.corpus.train,
        run.tokenizer,
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        seed=config.seed,
        num_workers=config.data.num_workers,
        process_index=process_index,
        process_count=process_count,
    )
    writers = metrics.open_writers(run.workdir, int(state["step"]), jax.process_index())
    try:
        if data_state is not None:
            batches.set_state(data_state)
        return Loop(
            config=config,
            model_config=run.model_config,
            step_fn=step_fn,
            diagnostics_fn=train_step.make_diagnostics(run.model),
            evaluate=_make_evaluate(run),
            put=run.put,
            batches=batches,
            data_state=batches.get_state,
            checkpoints=checkpoints,
            writers=writers,
            stop=stop,
            trace=Trace(pathlib.Path(run.workdir, "profile"), **config.profile, show=jax.process_index() == 0),
            flops_per_token=flops_per_token(run.model_config, count_parameters(state["params"])),
            show=jax.process_index() == 0,
        ).run(state)
    finally:
        batches.close()
        writers.close()


def _make_evaluate(run):
    """The function params -> {"eval/loss", "eval/bits_per_byte"} of the whole held-out part."""

    @functools.cache
    def batches():
        process_index, process_count = partitioning.process_share(run.mesh)
        return data.heldout_batches(
            run.corpus.heldout,
            run.tokenizer,
            seq_len=run.config.seq_len,
            batch_size=run.config.batch_size // run.config.accumulation_steps,  # what a training step fits in memory
            process_index=process_index,
            process_count=process_count,
        )

    def evaluate_params(params):
        result = heldout_loss(run.model, params, map(run.put, batches()), run.corpus.heldout_bytes)
        return {"eval/loss": result.loss, "eval/bits_per_byte": result.bits_per_byte}

    return evaluate_params


def _report(run, state, evaluation, clock):
    """Prints what the run has come to, a sample, and what to do next."""
    config, folder = run.config, run.workdir
    step = int(state["step"])
    evaluation = evaluation or _make_evaluate(run)(state["params"])
    prompt = "def" if config.data.source == "stdlib" else ""
    sample = generate_text(
        run.model,
        state["params"],
        run.tokenizer,
        [prompt],
        max_new_tokens=_SAMPLE_TOKENS,
        temperature=0.7,
        seed=config.seed,
    )[0]
    if jax.process_index():  # what the devices of all processes compute ends here
        return
    bigram = bigram_bits_per_byte(
        _first_tokens(run.corpus.train, run.tokenizer),
        data.token_stream(run.corpus.heldout, run.tokenizer),
        run.tokenizer.vocab_size,
        run.corpus.heldout_bytes,
    )
    speed = "" if clock is None else f", {clock.tokens / max(clock.seconds, 1e-9):,.0f} tokens/s"
    _say(f"\ndone        {step:,} steps, {step * config.batch_size * config.seq_len:,} tokens{speed}")
    _say(
        f"held-out    loss {evaluation['eval/loss']:.4f}, bits per byte {evaluation['eval/bits_per_byte']:.4f} "
        f"(a bigram model of the same tokens: {bigram:.4f})"
    )
    other = "cubit" if set(run.model_config.mixers) == {"attention"} else "transformer"
    lines = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in prompt + sample)
    _say("sample\n    " + lines.replace("\n", "\n    "))
    _say(f"""next
    {_python()} -m cubit_jax.generate --workdir={folder} --prompt='{prompt or "The"}' --max_new_tokens=200
    {_python()} -m cubit_jax.evaluate --workdir={folder}
    to compare, this command again with --config=configs/{other}.py and its size, and another --workdir
    tensorboard --logdir={folder}   # pip install tensorboard""")


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


def _describe(run, state, resumed):
    """Prints what is about to happen."""
    config, corpus = run.config, run.corpus
    kinds = {device.device_kind for device in run.mesh.devices.flat}
    axes = " ".join(f"{name}={size}" for name, size in run.mesh.shape.items() if size > 1) or "one device"
    tokens = config.batch_size * config.seq_len
    documents = "" if isinstance(corpus.train, np.ndarray) else f"{len(corpus.train):,} documents, "
    _say(f"workdir     {run.workdir}")
    _say(f"devices     {run.mesh.size} x {', '.join(sorted(kinds))}, mesh: {axes}")
    _say(
        f"model       {run.model_config.num_layers} layers of {' + '.join(run.model_config.mixers)}, "
        f"{count_parameters(state['params']):,} parameters"
    )
    _say(
        f"data        {config.data.source}: {documents}{corpus.heldout_bytes:,} bytes held out; "
        f"{run.tokenizer.vocab_size:,} tokens in the vocabulary"
    )
    _say(
        f"training    {config.num_steps:,} steps of {config.batch_size} x {config.seq_len} = {tokens:,} tokens, "
        f"{config.num_steps * tokens:,} in all"
    )
    if config.optimizer.warmup_steps >= config.num_steps:
        _say(
            f"note        warm-up ({config.optimizer.warmup_steps} steps) is as long as the run: the learning rate "
            "only rises"
        )
    if resumed:
        step = int(state["step"])
        complete = "" if step < config.num_steps else ": the run is complete, a larger --config.num_steps goes on"
        marker = workdir.read_preempted(run.workdir) if jax.process_index() == 0 else None
        stopped = f" after {marker['signal']} at {marker['time']}" if marker else ""
        _say(f"resumed     at step {step:,}{stopped}{complete}")


def _say(text):
    if jax.process_index() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    define_flags()
    cli.run(main, required=["config", "workdir"])
