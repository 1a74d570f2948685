"""What fits where? The shipped sizes and lengths on slices of TPUs, by cubit_jax.plan; writes docs/plan.md.

    python -m experiments.plan_table                       # every row that is not yet in docs/plan.jsonl: hours
    python -m experiments.plan_table --minutes=30          # as many as there is time for; the next call goes on
    python -m experiments.plan_table --rows=cubit:1p3b/8192/v5p:4x4x8 --again
    python -m experiments.plan_table --minutes=0           # writes the table anew from the rows that there are

Each row compiles in a process of its own and is a line of docs/plan.jsonl as soon as it is known: killing this program
loses one row. A row whose shipped settings do not fit shows the nearest ones that do, compiled as well.
"""

import itertools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from absl import flags

from cubit_jax.runtime import cli
from cubit_jax.runtime.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]
GIB, MIB = 2**30, 2**20
SLICES = {
    "v5e": ("2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8"),
    "v6e": ("2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
}
SIZES = ("125m", "350m", "1p3b")
LENGTHS = (512, 1024, 2048, 4096, 8192)

_BEGIN = "<!-- rows of docs/plan.jsonl, by experiments/plan_table.py -->\n"


def define_flags() -> None:
    """In a function, so that several of these programs can be imported into one process."""
    flags.DEFINE_list("rows", None, "Rows FAMILY:SIZE/LENGTH/TOPOLOGY; without it those named in this file.")
    flags.DEFINE_float("minutes", None, "No row is begun later than this.")
    flags.DEFINE_bool("again", False, "Compile rows, too, that are known already.")
    flags.DEFINE_integer("tries", 2, "As for cubit_jax.plan.", lower_bound=0)
    flags.DEFINE_string("store", str(ROOT / "docs" / "plan.jsonl"), "The rows, a JSON object a line.")
    flags.DEFINE_string("table", str(ROOT / "docs" / "plan.md"), "The table, after the line that begins it.")


def rows() -> list[tuple[str, int, str]]:
    """Every (family:size, length, topology), the most asked for first: whole pods, the ends of the table, the rest."""

    def all_of(sizes, lengths, topologies):
        return [(f"cubit:{size}", length, name) for name, size, length in itertools.product(topologies, sizes, lengths)]

    first = all_of(SIZES, (2048, 8192), ("v5e:16x16", "v5p:4x4x8"))
    ends = [f"{chip}:{shapes[end]}" for end in (0, -1) for chip, shapes in SLICES.items()]
    rest = [f"{chip}:{shape}" for chip, shapes in SLICES.items() for shape in shapes]
    every = first + all_of(SIZES, (2048, 8192), ends) + all_of(SIZES, LENGTHS, ends) + all_of(SIZES, LENGTHS, rest)
    return list(dict.fromkeys(every))


def parse(row: str) -> tuple[str, int, str]:
    """(family:size, length, topology) of a value of --rows."""
    if not re.fullmatch(r"\w+:\w+/\d+/\w+:\w+", row):
        raise UserError(f"--rows={row}: give FAMILY:SIZE/LENGTH/TOPOLOGY, as cubit:1p3b/8192/v5p:4x4x8")
    name, length, topology = row.split("/")
    return name, int(length), topology


def make(name: str, length: int, topology: str, tries: int) -> dict:
    """One row: the plan as cubit_jax.plan gives it, or the error that ended it."""
    row = {"config": name, "seq_len": length, "topology": topology}
    family, _, size = name.partition(":")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "plan.json"
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "cubit_jax.plan",
                f"--config=configs/{family}.py:{size}",
                f"--config.seq_len={length}",
                f"--topology={topology}",
                f"--tries={tries}",
                f"--json={output}",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        if output.exists():
            return row | {"seconds": round(time.monotonic() - start), "plan": json.loads(output.read_text())}
    return row | {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]}


def line(row: dict) -> str:
    """The row in Markdown."""
    cells = [row["config"], row["topology"], f"{row['seq_len']}"]
    if "error" in row:
        return f"| {' | '.join(cells)} | {row['error']} | | | | | |"
    plan = row["plan"]
    mesh = " ".join(f"{name}={size}" for name, size in plan["mesh"].items() if size > 1)
    state = (plan["parameters"] + plan["optimizer"]) / GIB
    fits = f"{'≤ ' * plan['peak_is_bound']}{plan['peak'] / GIB:.2f} of {plan['available'] / GIB:.2f}"
    if not plan["fits"]:
        fits = f"**no**: {fits}"
        if plan["suggestion"]:
            how = "compiled" if plan["suggestion_compiled"] else "estimated"
            values = ", ".join(f"{name}={value}" for name, value in plan["suggestion"].items())
            fits += f"; {plan['suggestion_peak'] / GIB:.2f} with {values} ({how})"
    sent = "; ".join(f"{kind} {value['sent'] / MIB:,.0f}" for kind, value in (plan["collectives"] or {}).items())
    lowest = f"{plan['seconds_at_peak'] * 1e3:,.1f}" if plan["seconds_at_peak"] else ""
    cells += [mesh, f"{state:.2f}", fits, f"{plan['flops']:.2e}", lowest, sent]
    return f"| {' | '.join(cells)} |"


def read(store: pathlib.Path) -> dict[tuple[str, int, str], dict]:
    """{(config, length, topology): row}, the last of each; without a line that a killed process left unfinished."""
    lines = store.read_text().splitlines(keepends=True) if store.exists() else ()
    rows = [json.loads(text) for text in lines if text.endswith("\n")]
    return {(row["config"], row["seq_len"], row["topology"]): row for row in rows}


def write_table(known: dict[tuple[str, int, str], dict], path: pathlib.Path) -> None:
    """docs/plan.md, whose text before the table stays."""
    text = path.read_text().partition(_BEGIN)[0] if path.exists() else ""
    titles = [
        "config",
        "topology",
        "L",
        "mesh",
        "state GiB",
        "peak GiB",
        "FLOPs a step",
        "ms at peak",
        "MiB a device sends a step",
    ]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    order = {
        key: i
        for i, key in enumerate(
            itertools.product(
                (f"{chip}:{shape}" for chip, shapes in SLICES.items() for shape in shapes), SIZES, LENGTHS
            )
        )
    }

    def place(row):
        return order.get((row["topology"], row["config"].partition(":")[2], row["seq_len"]), len(order))

    path.parent.mkdir(exist_ok=True)
    path.write_text(text + _BEGIN + "\n".join(lines + [line(row) for row in sorted(known.values(), key=place)]) + "\n")


def main() -> None:
    values = flags.FLAGS
    store, table = pathlib.Path(values.store), pathlib.Path(values.table)
    store.parent.mkdir(exist_ok=True)
    wanted = list(map(parse, values.rows)) if values.rows else rows()
    start = time.monotonic()
    for key in wanted:
        if values.minutes is not None and time.monotonic() - start >= 60 * values.minutes:
            break
        if "plan" in read(store).get(key, ()) and not values.again:  # read each time: several may work at it
            continue
        row = make(*key, values.tries)
        with store.open("a") as file:
            file.write(json.dumps(row) + "\n")
        write_table(read(store), table)
        print(line(row), flush=True)
    write_table(read(store), table)


if __name__ == "__main__":
    define_flags()
    cli.run(main)
