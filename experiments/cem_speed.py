"""What do tied weights and recursion cost? CEM attention beside ordinary attention of the same shape.

    python -m experiments.cem_speed

Forward and backward pass of whole mixers, projections and rotary embedding included, one after the other in random
order within each round: compare within a run. "x attention" and "x T=1" are ratios of medians, the latter to the same
interaction with the first T; "spread" is the distance of the quartiles as a share of the median; "MiB" is what the
compiler sets aside for temporaries.
"""

import functools
import json
import statistics

import jax
import jax.numpy as jnp
from absl import flags

from cubit_jax.layers import Attention, CEMAttention
from cubit_jax.layers.cem import INTERACTIONS
from cubit_jax.runtime import cli
from experiments.measure import spread, time_in_turns
from experiments.options import integers, known, output_path


def define_flags():
    """In a function, so that several of these programs can be imported into one process."""
    flags.DEFINE_integer("batch", 2, "Batch size.", lower_bound=1)
    flags.DEFINE_integer("length", 1024, "Sequence length.", lower_bound=1)
    flags.DEFINE_integer("num_heads", 8, "Heads; model_dim is heads * head_dim.", lower_bound=1)
    flags.DEFINE_integer("head_dim", 64, "Head dimension.", lower_bound=2)
    flags.DEFINE_list("recursions", ["1", "2", "4"], "Values of T.")
    flags.DEFINE_list("interactions", list(INTERACTIONS), f"Of {', '.join(INTERACTIONS)}.")
    flags.DEFINE_string("dtype", "float32", "Of activations.")
    flags.DEFINE_integer("rounds", 9, "Measurements of each.", lower_bound=2)
    flags.DEFINE_string("output", None, "Path of a JSON file to write, if any.")


def compile_layer(layer, x):
    """Forward and backward pass of sum(layer(x)^2) in parameters and input: (compiled, its arguments)."""
    params = jax.jit(layer.init)(jax.random.key(0), x)

    def loss(params, x):
        return jnp.sum(jnp.square(layer.apply(params, x).astype(jnp.float32)))

    return jax.jit(jax.grad(loss, (0, 1))).lower(params, x).compile(), (params, x)


def measure(layers, x, rounds, seed=0):
    """{name: (list of seconds, bytes of temporaries)} of layers run in turns."""
    compiled = {name: compile_layer(layer, x) for name, layer in layers.items()}
    times = time_in_turns(
        {name: functools.partial(run, *arguments) for name, (run, arguments) in compiled.items()}, rounds, seed=seed
    )
    return {name: (times[name], compiled[name][0].memory_analysis().temp_size_in_bytes) for name in layers}


def table(results):
    """One record a layer: name, milliseconds, spread, ratios to attention and to its own first T, MiB."""
    medians = {name: statistics.median(seconds) for name, (seconds, _) in results.items()}
    first = {}
    for name, (seconds, memory) in results.items():
        kind = name.rpartition(" T=")[0]
        first.setdefault(kind, medians[name])
        yield {
            "layer": name,
            "milliseconds": 1e3 * medians[name],
            "spread": spread(seconds),
            "of_attention": medians[name] / medians["attention"],
            "of_first": medians[name] / first[kind] if kind else None,
            "mebibytes": memory / 2**20,
        }


def main():
    values = flags.FLAGS
    output = output_path(values.output) if values.output else None
    interactions = known("interactions", values.interactions, INTERACTIONS)
    recursions = integers("recursions", values.recursions, lowest=0)
    shape = {"num_heads": values.num_heads, "head_dim": values.head_dim, "dtype": jnp.dtype(values.dtype)}
    layers = {"attention": Attention(**shape)} | {
        f"{interaction} T={t}": CEMAttention(**shape, interaction=interaction, num_recursions=t)
        for interaction in interactions
        for t in recursions
    }
    x = jax.random.normal(
        jax.random.key(1), (values.batch, values.length, values.num_heads * values.head_dim), values.dtype
    )
    records = list(table(measure(layers, x, values.rounds)))
    print(
        f"B{values.batch} L{values.length} H{values.num_heads} K{values.head_dim} {values.dtype}, "
        f"forward and backward, {jax.devices()[0].device_kind}, jax {jax.__version__}"
    )
    print(f"{'layer':<22} {'ms':>8} {'spread':>7} {'x attention':>12} {'x T=1':>6} {'MiB':>8}")
    for r in records:
        of_first = "" if r["of_first"] is None else f"{r['of_first']:.2f}"
        print(
            f"{r['layer']:<22} {r['milliseconds']:>8.1f} {r['spread']:>7.1%} {r['of_attention']:>12.2f} "
            f"{of_first:>6} {r['mebibytes']:>8.1f}"
        )
    if output:
        output.write_text(json.dumps(records, indent=2) + "\n")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
