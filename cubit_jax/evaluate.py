"""Held-out loss of a trained run: python -m cubit_jax.evaluate --workdir=DIR"""

import math

import jax
from absl import flags

from cubit_jax import data, partitioning
from cubit_jax.inference.evaluation import Evaluation, heldout_loss, nonfinite_parameters
from cubit_jax.runtime import cli, distributed
from cubit_jax.runtime.errors import UserError
from cubit_jax.training import workdir
from cubit_jax.training.trained import load_run


def evaluate(
    folder: str, num_recursions: int | None = None, text: str | None = None, step: int | str = "latest"
) -> tuple[Evaluation, int]:
    """Evaluates a checkpoint of the run in `folder` on the held-out part of its corpus, or on other text.

    Args:
      folder: the workdir of train.
      text: glob of files to evaluate on, all of their text, in the place of the held-out part.
      num_recursions: T of Causal Energy Minimization layers; None is the number they were trained with.
      step: of the checkpoint: a number, "latest", or "best", the one with the lowest held-out loss.

    Returns:
      (Evaluation, step of the checkpoint).

    Raises:
      UserError: no run, no checkpoint or no corpus there, or one that does not fit; a loss that is not finite.
    """
    run = load_run(folder, step, **({} if num_recursions is None else {"num_recursions": num_recursions}))
    corpus = distributed.in_turn(
        lambda: data.check_restored(_open(run.config.data, folder, text), run.tokenizer), "corpus"
    )
    distributed.agree(corpus.fingerprint, "documents")
    rows = math.prod(run.mesh.shape[axis] for axis in partitioning.BATCH_AXES)
    # The result does not depend on the batch; this is the size that training has shown to fit.
    batch_size = -(-run.config.batch_size // run.config.accumulation_steps // rows) * rows
    try:
        process_index, process_count = partitioning.process_share(run.mesh)
    except ValueError as error:
        raise UserError(error) from error
    batches = data.heldout_batches(
        corpus.heldout,
        run.tokenizer,
        seq_len=run.config.seq_len,
        batch_size=batch_size,
        process_index=process_index,
        process_count=process_count,
    )

    def put(batch):
        return partitioning.put_batch(run.mesh, batch)

    with jax.set_mesh(run.mesh):
        result = heldout_loss(run.model, run.params, map(put, batches), corpus.scored_bytes)
        if not math.isfinite(result.loss):
            raise UserError(f"the loss at step {run.step} is {result.loss}: {_cause(run.params)}")
    return result, run.step


def _cause(params):
    """Why a loss is not finite."""
    if names := nonfinite_parameters(params):
        more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
        return f"parameter {names[0]}{more} not finite; evaluate an earlier checkpoint with --step"
    return "all parameters are finite, so an activation overflows; a wider model.dtype may hold it"


def _open(data_config, folder, text):
    if text:
        return data.open_text(text, data_config.text_field, folder)
    corpus = data.open_corpus(data_config, folder)
    workdir.check_corpus(folder, {"documents": corpus.fingerprint})  # or what is held out may have been trained on
    return corpus


def define_flags() -> None:
    distributed.define_flags()
    flags.DEFINE_string("workdir", None, "Folder of the run, as given to train.")
    flags.DEFINE_string(
        "step", "latest", "Checkpoint to evaluate: its step, latest, or best, the one with the lowest held-out loss."
    )
    flags.DEFINE_integer(
        "num_recursions",
        None,
        "Steps T of each Causal Energy Minimization layer in the place of those it was trained with.",
        lower_bound=0,
    )
    flags.DEFINE_string(
        "text",
        None,
        "Glob of .txt, .md, .py, .jsonl, .jsonl.gz or .parquet files (quote it) to "
        "evaluate on, all of them, in the place of the held-out part of the run's corpus.",
    )


def main() -> None:
    distributed.run(_print_evaluation)


def _print_evaluation() -> None:
    text = flags.FLAGS.text
    result, step = evaluate(flags.FLAGS.workdir, flags.FLAGS.num_recursions, text, flags.FLAGS.step)
    if jax.process_index() == 0:
        bits = "" if result.bits_per_byte is None else f", bits per byte {result.bits_per_byte:.4f}"
        print(
            f"{text or 'held-out part'} at step {step}: {result.tokens:,} tokens, loss {result.loss:.4f}, "
            f"perplexity {result.perplexity:.2f}{bits}"
        )


if __name__ == "__main__":
    define_flags()
    cli.run(main, required=["workdir"])
