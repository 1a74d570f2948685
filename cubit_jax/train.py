"""Trains a language model: python -m cubit_jax.train --config=configs/cubit.py:tiny --workdir=DIR

DIR holds config.json, metrics.jsonl, tensorboard/, checkpoints/ and, where one was trained, tokenizer.json. The same
command on the same DIR goes on where it stopped, with the same batches and the same numbers. On several hosts it is
started once on each, see docs/launch.md; DIR is then on a file system that they share.
"""

import pathlib
import time

import jax
from absl import flags
from ml_collections import ConfigDict

from cubit_jax.flops import flops_per_token
from cubit_jax.model import count_parameters
from cubit_jax.model_config import drop_replaced_options
from cubit_jax.runtime import cli, distributed
from cubit_jax.runtime.profiler import Trace
from cubit_jax.runtime.progress import say
from cubit_jax.runtime.signals import StopRequest
from cubit_jax.training import metrics, workdir
from cubit_jax.training import step as train_step
from cubit_jax.training.checkpoint import Checkpoints, SaveError
from cubit_jax.training.loop import Loop
from cubit_jax.training.report import describe, report
from cubit_jax.training.run import open_run


def define_flags() -> None:
    cli.define_config()
    distributed.define_flags()
    flags.DEFINE_string(
        "workdir",
        None,
        "Folder of the run: metrics, checkpoints, tokenizer. If it holds a run of the same config, that run goes on.",
    )


def main() -> None:
    drop_replaced_options(flags.FLAGS.config, cli.given_options())
    try:
        distributed.run(lambda: train(flags.FLAGS.config, flags.FLAGS.workdir), stop_together=True)
    except SaveError as error:
        cli.fail(error, at_once=True)


def train(config: ConfigDict, folder: str) -> None:
    """Runs, or goes on with, the run of `config` in `folder` until it is complete or a signal asks it to stop.

    Raises:
      UserError: the config, the data, the devices or the folder do not fit, before anything of an earlier run is
        touched; or the run cannot go on.
    """
    with open_run(config, folder) as run, jax.set_mesh(run.mesh), StopRequest() as stop:
        num_steps = run.config.num_steps
        checkpoints = Checkpoints(folder, run.config.keep_checkpoints, run.config.keep_best)
        try:
            state, shardings, data_state = run.initial_state(checkpoints)
            describe(run, state, resumed=data_state is not None)
            if jax.process_index() == 0:
                workdir.write_config(folder, run.config)
                workdir.write_corpus(folder, {"documents": run.corpus.fingerprint, "tokenizer": run.tokenizer.digest})
                run.tokenizer.save(pathlib.Path(folder, "tokenizer.json"))  # its own copy: the run may be moved
                workdir.clear_preempted(folder)
            evaluation = clock = None
            if int(state["step"]) < num_steps:
                state, evaluation, clock = _fit(run, state, shardings, data_state, checkpoints, stop)
        finally:
            checkpoints.close()
        step = int(state["step"])
        if stop.name and step < num_steps:
            if jax.process_index() == 0:
                workdir.mark_preempted(folder, step, stop.name)
            say(f"saved at step {step} of {num_steps} after {stop.name}; the same command goes on from there")
        else:
            report(run, state, evaluation, clock)


def _fit(run, state, shardings, data_state, checkpoints, stop):
    """Trains to the end or until asked to stop: (state, last evaluation or None, Clock)."""
    first = jax.process_index() == 0
    # Before the step is compiled: what can't be written is said at once.
    writers = metrics.open_writers(run.folder, -1 if data_state is None else int(state["step"]), jax.process_index())
    batches = run.train_batches()
    try:
        start = time.monotonic()
        say("compiling   the training step")
        step_fn = train_step.compile_train_step(run.model, run.config, state, shardings, run.batch_sharding)
        say(f"compiled    in {time.monotonic() - start:.0f} s")
        if data_state is None and run.config.eval_every:
            evaluation = run.evaluate(state["params"])
            writers.write(0, {"tokens_seen": 0} | evaluation)
            say(f"untrained   held-out loss {evaluation['eval/loss']:.3f}")
        if data_state is not None:
            batches.set_state(data_state)
        return Loop(
            config=run.config,
            model_config=run.model_config,
            step_fn=step_fn,
            diagnostics_fn=train_step.make_diagnostics(run.model),
            evaluate=run.evaluate,
            put=run.put,
            batches=batches,
            data_state=batches.get_state,
            checkpoints=checkpoints,
            writers=writers,
            stop=stop,
            trace=Trace(pathlib.Path(run.folder, "profile"), **run.config.profile, show=first),
            flops_per_token=flops_per_token(run.model_config, count_parameters(state["params"])),
            show=first,
        ).run(state)
    finally:
        batches.close()
        writers.close()


if __name__ == "__main__":
    define_flags()
    cli.run(main, required=["config", "workdir"])
