"""Recursion as a dial after training: loss and energies of one checkpoint, run with other numbers of recursions T.

    python -m cubit_jax.train --config=configs/cem.py:tiny,steps=2 --workdir=runs/cem_tiny_t2
    python -m experiments.recursion --workdir=runs/cem_tiny_t2

No parameter of a CEM layer depends on T. Prints held-out loss and bits per byte against T, and the mean energy of a
position before and after a layer's T steps, over all layers on a held-out batch; writes OUTPUT.json and OUTPUT.png.
"""

import dataclasses
import json
import os

import jax
import numpy as np
from absl import flags

from cubit_jax import data, evaluate, partitioning
from cubit_jax.model import LanguageModel
from cubit_jax.runtime import cli
from cubit_jax.runtime.errors import UserError
from cubit_jax.runtime.files import write_atomically
from cubit_jax.training.trained import Trained, load_run
from experiments.support import plots
from experiments.support.options import integers, output_files
from experiments.support.timing import environment


def define_flags() -> None:
    """In a function, so that several of these programs can be imported into one process."""
    flags.DEFINE_string("workdir", None, "Folder of a run whose model has CEM layers, as given to train.")
    flags.DEFINE_list("recursions", ["0", "1", "2", "3", "4", "6", "8"], "Values of T.")
    flags.DEFINE_integer("energy_rows", 4, "Rows of the held-out part that energies are measured on.", lower_bound=1)
    flags.DEFINE_string(
        "output", None, "Path without ending of the .json and .png files; default: recursion in --workdir."
    )


def measure(folder: str, recursions: list[int], energy_rows: int) -> tuple[dict[int, dict], int, int]:
    """What one checkpoint gives at other numbers of recursions. Prints the rows of a table as they are known.

    Returns:
      ({T: {"loss", "bits_per_byte", "energy_before", "energy_after"}}, step of the checkpoint, T of its training).

    Raises:
      UserError: no run there, or one whose layers have no recursion; nothing is printed before.
    """
    run = load_run(folder)
    model = run.model.config
    if "cem" not in (*model.mixers, model.mlp):
        raise UserError(
            f"--workdir={folder}: its layers (mixers {', '.join(model.mixers)}, mlp {model.mlp}) have no recursion; "
            "give a run of configs/cem.py"
        )
    results = {}
    corpus = data.open_corpus(run.config.data, folder)
    batch = next(
        iter(data.heldout_batches(corpus.heldout, run.tokenizer, seq_len=run.config.seq_len, batch_size=energy_rows))
    )
    print(f"{'T':>3} {'loss':>8} {'bits/byte':>10} {'energy before':>14} {'energy after':>13}")
    for steps in recursions:
        evaluation, checkpoint = evaluate.evaluate(folder, steps)
        before, after = mean_energies(run, steps, batch)
        bits = "-" if evaluation.bits_per_byte is None else f"{evaluation.bits_per_byte:.4f}"
        results[steps] = {
            "loss": evaluation.loss,
            "bits_per_byte": evaluation.bits_per_byte,
            "energy_before": before,
            "energy_after": after,
        }
        print(
            f"{steps:>3} {evaluation.loss:8.4f} {bits:>10} {before:14.4f} {after:13.4f}",
            flush=True,
        )
    return results, checkpoint, model.options.get("num_recursions", 1)


def mean_energies(run: Trained, steps: int, batch: dict) -> tuple[float, float]:
    """Mean energy of a position before and after the recursions of a layer, over all CEM layers of the model."""
    config = run.model.config
    model = LanguageModel(dataclasses.replace(config, options={**config.options, "num_recursions": steps}))
    with jax.set_mesh(partitioning.make_mesh({"data": 1}, jax.devices()[:1])):
        apply = jax.jit(lambda params: model.apply({"params": params}, batch, method="loss", mutable=["diagnostics"]))
        _, seen = apply(jax.device_get(run.params))
    leaves = jax.tree_util.tree_leaves_with_path(seen["diagnostics"])
    energies = {
        name: np.concatenate([np.ravel(leaf) for path, leaf in leaves if path[-1].key == name])
        for name in ("energy_before", "energy_after")
    }
    return float(energies["energy_before"].mean()), float(energies["energy_after"].mean())


def plot(results: dict[int, dict], trained_with: int, path) -> None:
    """Loss and energy against T, one axis each."""
    figure, left = plots.pyplot().subplots(figsize=(6, 4))
    right = left.twinx()
    steps = list(results)
    left.plot(steps, [r["loss"] for r in results.values()], "o-", color="C0", label="held-out loss")
    right.plot(steps, [r["energy_after"] for r in results.values()], "s-", color="C1", label="energy after T steps")
    right.plot(steps, [r["energy_before"] for r in results.values()], "s:", color="C1", label="energy before")
    left.axvline(trained_with, color="gray", linestyle="--", label="trained with")
    left.set(xlabel="recursions T", ylabel="loss (nats a token)", xticks=steps)
    right.set_yscale("symlog")  # it may fall by orders of magnitude: the MLP's is not bounded below
    right.set_ylabel("mean energy of a position")
    handles = [a + b for a, b in zip(left.get_legend_handles_labels(), right.get_legend_handles_labels())]
    left.legend(*handles)
    figure.tight_layout()
    plots.save(figure, path)


def main() -> None:
    values = flags.FLAGS
    recursions = integers("recursions", values.recursions, lowest=0)
    json_path, png_path = output_files(values.output or os.path.join(values.workdir, "recursion"))
    plots.pyplot()
    results, checkpoint, trained_with = measure(values.workdir, recursions, values.energy_rows)
    print(f"checkpoint {checkpoint} of {values.workdir}, trained with T={trained_with}")
    record = {"results": results, "checkpoint": checkpoint, "trained_with": trained_with, "environment": environment()}
    write_atomically(json_path, (json.dumps(record, indent=2) + "\n").encode())
    plot(results, trained_with, png_path)


if __name__ == "__main__":
    define_flags()
    cli.run(main, required=["workdir"])
