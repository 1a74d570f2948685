"""Times kernel_solve, attention and whole mixers, each checked against the reference first.

    python -m experiments.benchmark                                          # small shapes, under two minutes on a CPU
    python -m experiments.benchmark --ops=kernel_solve,attention --implementations=xla,pallas --dtypes=bfloat16 \\
        --lengths=2048,8192,32768 --num_heads=16 --head_dim=128              # on a GPU or TPU
    python -m experiments.benchmark --ops=cubit_mixer,attention_mixer --passes=forward+backward

Prints a table and writes OUTPUT.json and OUTPUT.png (time and memory against L). Within a shape all cases run in turns,
in random order, after warm-up, so that drift of the clock hits all of them: compare within a run, not between runs.
"spread" is the distance of the quartiles as a share of the median; "of matmul" is the achieved FLOP/s as a share of a
square matrix product of the same dtype in the same turns; "/attention" is the ratio to the fastest attention of that
shape. "MiB" is the compiler's count of arguments, outputs and temporaries. "error/limit" must be at most 1, else there
is no time: over the first --check_rows rows, whose output and gradients later rows do not change.
"""

import json

import jax
import matplotlib
from absl import flags

from cubit_jax.runtime import cli
from experiments import measure
from experiments.options import integers, known, output_path

IMPLEMENTATIONS = ("xla", "pallas", "reference")
NAMES = measure.OPS + measure.MIXER_NAMES


def define_flags():
    """In a function, so that several of these programs can be imported into one process."""
    flags.DEFINE_list("ops", list(NAMES), f"What to time, of {', '.join(NAMES)}.")
    flags.DEFINE_list(
        "implementations", None, f"Of {', '.join(IMPLEMENTATIONS)}. Default: xla, and pallas on a TPU or GPU."
    )
    flags.DEFINE_list("lengths", ["256", "1024"], "Sequence lengths.")
    flags.DEFINE_list("dtypes", None, "Of float32, bfloat16, float16. Default: float32 on a CPU, else bfloat16.")
    flags.DEFINE_list("passes", list(measure.PASSES), "forward, forward+backward or both.")
    flags.DEFINE_integer("batch", 1, "Batch size.", lower_bound=1)
    flags.DEFINE_integer("num_heads", 4, "Heads; a mixer's model_dim is heads * head_dim.", lower_bound=1)
    flags.DEFINE_integer("head_dim", 64, "Head dimension.", lower_bound=1)
    flags.DEFINE_integer("window", None, "Sliding window; default: everything before.", lower_bound=1)
    flags.DEFINE_integer("rounds", 7, "Measurements a case.", lower_bound=2)
    flags.DEFINE_integer("check_rows", 256, "Rows compared with the dense float64 reference.", lower_bound=1)
    flags.DEFINE_integer(
        "matrix_size", None, "Side of the matrix product. Default: 1024 on a CPU, else 8192.", lower_bound=1
    )
    flags.DEFINE_integer("seed", 0, "Of inputs and order.")
    flags.DEFINE_string("output", "benchmark", "Path without ending of the .json and .png files.")


def plot(records, path):
    """Time and memory against L, a line an op, implementation, dtype and pass."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(14, 6), layout="constrained")
    timed = [record for record in records if record["median_seconds"] and record["op"] != "matrix product"]
    names = [(record["op"], record["implementation"], record["dtype"], record["pass"]) for record in timed]
    for index, name in enumerate(dict.fromkeys(names)):
        points = sorted(
            (record["length"], record["median_seconds"] * 1e3, (record["memory_bytes"] or 0) / 2**20)
            for record, own in zip(timed, names)
            if own == name
        )
        style = {
            "color": f"C{index // 2 % 10}",
            "marker": "o^sv"[index // 20 % 4],
            "linestyle": "-" if name[3] == "forward" else "--",
        }
        for axis, column in zip(axes, (1, 2)):
            axis.plot([p[0] for p in points], [p[column] for p in points], label=" ".join(name), **style)
    for axis, title in zip(axes, ("time, ms", "memory, MiB")):
        axis.set(xscale="log", yscale="log", xlabel="sequence length", title=title)
        axis.grid(True, which="both", alpha=0.3)
        lengths = sorted({record["length"] for record in timed})
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.minorticks_off()
    if timed:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main():
    options = flags.FLAGS
    accelerator = jax.default_backend() != "cpu"
    names = known("ops", options.ops, NAMES)
    implementations = known(
        "implementations", options.implementations or ["xla", "pallas"][: 1 + accelerator], IMPLEMENTATIONS
    )
    dtypes = known("dtypes", options.dtypes or ["bfloat16" if accelerator else "float32"], tuple(measure.LIMITS))
    directions = known("passes", options.passes, measure.PASSES)
    lengths = integers("lengths", options.lengths)
    output = output_path(options.output)

    where = measure.environment()
    print(f"{where['device']}, jax {jax.__version__}; B={options.batch} H={options.num_heads} K={options.head_dim}")
    records = []
    for dtype in dtypes:
        for length in lengths:
            shape = measure.Shape(options.batch, length, options.num_heads, options.head_dim, dtype, options.window)
            cases = measure.run_group(
                names,
                implementations,
                directions,
                shape,
                rounds=options.rounds,
                check_rows=options.check_rows,
                matrix_size=options.matrix_size or (8192 if accelerator else 1024),
                seed=options.seed,
            )
            records += measure.finish(cases)
            print(measure.table(records[-len(cases) :]), flush=True)
    settings = {
        name: options[name].value
        for name in ("batch", "num_heads", "head_dim", "window", "rounds", "check_rows", "matrix_size", "seed")
    }
    output.with_name(output.name + ".json").write_text(
        json.dumps({"environment": where, "settings": settings, "results": records}, indent=1) + "\n"
    )
    plot(records, output.with_name(output.name + ".png"))
    print(f"wrote {output}.json and {output}.png")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
