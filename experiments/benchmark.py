"""Times ops, whole mixers, settings of CEM attention, and training steps.

    python -m experiments.benchmark                                          # small shapes, under two minutes on a CPU
    python -m experiments.benchmark --ops=kernel_solve,attention --implementations=xla,pallas --dtypes=bfloat16 \\
        --lengths=2048,8192,32768 --num_heads=16 --head_dim=128              # on a GPU or TPU
    XLA_FLAGS= python -m experiments.benchmark --what=cem --batch=2 --lengths=1024 --num_heads=8 \\
        --passes=forward+backward                                            # what do tied weights and recursion cost?
    XLA_FLAGS= python -m experiments.benchmark --what=train                  # tokens/s of whole training steps

Prints tables and writes OUTPUT.json and OUTPUT.png (time and memory against L). Within a table all cases run in turns,
in random order, after warm-up, so that drift of the clock hits all of them: compare within a run, not between runs.
"spread" is the distance of the quartiles as a share of the median.

Ops, mixers and CEM settings are compared with the dense reference first. "error/limit" must be at most 1, else there is
no time: over the first --check_rows rows, whose output and gradients later rows do not change. "of matmul" is the
achieved FLOP/s as a share of a square matrix product of the same dtype in the same turns. "/attention" is the ratio of
an op to the fastest attention of that shape, of a mixer to the fastest attention mixer. "/first T" is the ratio of a
CEM setting to the same interaction with the first of --recursions. "MiB" is the compiler's count of arguments, outputs
and temporaries, "temporaries" that of the last alone.

Training steps are those of --configs on one device, optimizer included, on random tokens of the config's shape. "of
first" is the ratio of a config's tokens/s to the first one's.
"""

import json

import jax
from absl import flags

from cubit_jax.layers.cem import INTERACTIONS
from cubit_jax.runtime import cli
from cubit_jax.runtime.files import write_atomically
from experiments.support import cases, plots, problems, train_steps
from experiments.support.options import integers, known, output_files
from experiments.support.timing import environment

IMPLEMENTATIONS = ("xla", "pallas", "reference")
WHAT = ("ops", "mixers", "cem", "train")
_SETTINGS = ("batch", "num_heads", "head_dim", "window", "rounds", "check_rows", "matrix_size", "seed")


def define_flags() -> None:
    """In a function, so that several of these programs can be imported into one process."""
    flags.DEFINE_list("what", ["ops", "mixers"], f"Tables to make, of {', '.join(WHAT)}.")
    names = problems.OPS + problems.MIXER_NAMES
    flags.DEFINE_list("ops", None, f"In the place of --what's ops and mixers, these: of {', '.join(names)}.")
    flags.DEFINE_list("interactions", list(INTERACTIONS), f"For --what=cem, of {', '.join(INTERACTIONS)}.")
    flags.DEFINE_list("recursions", ["1", "2", "4"], "For --what=cem, values of T.")
    flags.DEFINE_string("configs", train_steps.CONFIGS, "For --what=train, FILE:ARGUMENT of configs, spaces between.")
    flags.DEFINE_list(
        "implementations", None, f"Of {', '.join(IMPLEMENTATIONS)}. Default: xla, and pallas on a TPU or GPU."
    )
    flags.DEFINE_list("lengths", ["256", "1024"], "Sequence lengths.")
    flags.DEFINE_list("dtypes", None, "Of float32, bfloat16, float16. Default: float32 on a CPU, else bfloat16.")
    flags.DEFINE_list("passes", list(problems.PASSES), "forward, forward+backward or both.")
    flags.DEFINE_integer("batch", 1, "Batch size.", lower_bound=1)
    flags.DEFINE_integer("num_heads", 4, "Heads; a mixer's model_dim is heads * head_dim.", lower_bound=1)
    flags.DEFINE_integer("head_dim", 64, "Head dimension.", lower_bound=1)
    flags.DEFINE_integer("window", None, "Sliding window; default: everything before.", lower_bound=1)
    flags.DEFINE_integer("rounds", 7, "Measurements of each case.", lower_bound=2)
    flags.DEFINE_integer("check_rows", 256, "Rows compared with the dense float64 reference.", lower_bound=1)
    flags.DEFINE_integer(
        "matrix_size", None, "Side of the matrix product. Default: 1024 on a CPU, else 8192.", lower_bound=1
    )
    flags.DEFINE_integer("seed", 0, "Of inputs and order.")
    flags.DEFINE_string("output", "benchmark", "Path without ending of the .json and .png files.")


def plot(records: list[dict], path) -> None:
    """Time and memory against L, one line per op, implementation, dtype and pass."""
    figure, axes = plots.pyplot().subplots(1, 2, figsize=(14, 6), layout="constrained")
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
    plots.save(figure, path)


def names_of(what: list[str]) -> list[str]:
    """The ops, mixers and CEM settings that the flags ask for; a UserError for an unknown one."""
    values = flags.FLAGS
    if values.ops is not None:
        names = known("ops", values.ops, problems.OPS + problems.MIXER_NAMES)
    else:
        names = [*problems.OPS] * ("ops" in what) + [*problems.MIXER_NAMES] * ("mixers" in what)
    if "cem" in what:
        interactions = known("interactions", values.interactions, INTERACTIONS)
        settings = problems.cem_names(interactions, integers("recursions", values.recursions, lowest=0))
        names = list(dict.fromkeys([*names, "attention_mixer", *settings]))
    return names


def main() -> None:
    values = flags.FLAGS
    accelerator = jax.default_backend() != "cpu"
    what = known("what", values.what, WHAT)
    names = names_of(what)
    implementations = known(
        "implementations", values.implementations or ["xla", "pallas"][: 1 + accelerator], IMPLEMENTATIONS
    )
    dtypes = known("dtypes", values.dtypes or ["bfloat16" if accelerator else "float32"], tuple(problems.LIMITS))
    directions = known("passes", values.passes, problems.PASSES)
    lengths = integers("lengths", values.lengths)
    configs = {name: train_steps.load(name) for name in values.configs.split()} if "train" in what else {}
    json_path, png_path = output_files(values.output)
    plots.pyplot()

    where = environment()
    report = {"environment": where, "settings": {name: values[name].value for name in _SETTINGS}, "results": []}
    print(f"{where['device']}, jax {jax.__version__}; B={values.batch} H={values.num_heads} K={values.head_dim}")
    for dtype in dtypes if names else ():
        for length in lengths:
            shape = problems.Shape(values.batch, length, values.num_heads, values.head_dim, dtype, values.window)
            group = cases.run_group(
                names,
                implementations,
                directions,
                shape,
                rounds=values.rounds,
                check_rows=values.check_rows,
                matrix_size=values.matrix_size or (8192 if accelerator else 1024),
                seed=values.seed,
            )
            records = cases.finish(group)
            report["results"] += records
            print(cases.table(records), flush=True)
    if configs:
        report["train"] = train_steps.measure(configs, values.rounds, values.seed)
        print(train_steps.table(report["train"]))
    write_atomically(json_path, (json.dumps(report, indent=1) + "\n").encode())
    written = [json_path]
    if names:
        plot(report["results"], png_path)
        written.append(png_path)
    print(f"wrote {' and '.join(map(str, written))}")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
