"""Cases of the benchmark and of the GPU check: compiled once, checked against a reference, timed in turns, tabulated.

A case is one op or mixer with one implementation at one shape, forward or forward and backward. The same program is
checked and then timed, and a program that is wrong gets no time.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.support.problems import OPS, Problem, Shape, count_flops, worst_error
from experiments.support.timing import spread, time_in_turns


@dataclasses.dataclass
class Case:
    """One program and what became of it; times in seconds, memory in bytes, absent where it failed."""

    op: str
    implementation: str
    direction: str
    shape: Shape
    run: Callable = None  # the compiled program, no arguments
    flops: float | None = None
    compile_seconds: float | None = None
    memory: int | None = None  # the compiler's: arguments, outputs and temporaries at their peak
    temporaries: int | None = None  # of these the temporaries
    error: float | None = None  # the largest of output and gradients, as a share of its limit
    failure: str | None = None  # why there is no time
    times: list = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float | None:
        return statistics.median(self.times) if self.times else None

    @property
    def spread(self) -> float | None:
        return spread(self.times) if len(self.times) > 1 else None

    def record(self) -> dict:
        """A JSON object."""
        return {
            "op": self.op,
            "implementation": self.implementation,
            "pass": self.direction,
            **dataclasses.asdict(self.shape),
            "median_seconds": self.median,
            "spread": self.spread,
            "times": self.times,
            "flops": self.flops,
            "compile_seconds": self.compile_seconds,
            "memory_bytes": self.memory,
            "temporary_bytes": self.temporaries,
            "error_over_limit": self.error,
            "failure": self.failure,
        }


def memory(compiled) -> tuple[int | None, int | None]:
    """Bytes of a compiled program by the compiler's count: (arguments, outputs and temporaries; temporaries alone)."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None, None
    kept = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return kept + analysis.temp_size_in_bytes, analysis.temp_size_in_bytes


def prepare(problem: Problem, implementation: str, direction: str, expected: tuple) -> Case:
    """Compiles one case and checks it; `failure` says why it cannot be timed."""
    case = Case(
        problem.op, implementation, direction, problem.shape, flops=count_flops(problem.op, problem.shape, direction)
    )
    inputs = jax.tree.map(jnp.asarray, problem.inputs)
    try:
        start = time.perf_counter()
        compiled = (
            jax.jit(problem.program(implementation, direction)).lower(inputs, jnp.asarray(problem.cotangent)).compile()
        )
        case.compile_seconds = time.perf_counter() - start
        case.memory, case.temporaries = memory(compiled)
        # A cotangent of zero beyond the reference's rows: then later rows change no gradient either.
        checked = problem.cotangent.copy()
        checked[:, expected[0].shape[1] :] = 0
        case.error = worst_error(problem, jax.device_get(compiled(inputs, jnp.asarray(checked))), expected, direction)
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
        case.failure = (str(error) or type(error).__name__).splitlines()[0][:200]
        return case
    if not case.error <= 1:
        case.failure = f"wrong: error is {case.error:.2g} times its limit"
        return case
    cotangent = jnp.asarray(problem.cotangent)
    case.run = lambda: compiled(inputs, cotangent)
    return case


def matrix_product(shape: Shape, size: int) -> Case:
    """A square product of the dtype, the yardstick of FLOP/s; float32 is not rounded to less."""
    case = Case("matrix product", "xla", "forward", shape, flops=2.0 * size**3, error=0.0)
    a = jnp.asarray(np.random.default_rng(0).standard_normal((size, size)), shape.dtype)
    start = time.perf_counter()
    compiled = jax.jit(lambda a: jnp.dot(a, a, precision="highest")).lower(a).compile()
    case.compile_seconds = time.perf_counter() - start
    case.memory, case.temporaries = memory(compiled)
    case.run = lambda: compiled(a)
    return case


def time_cases(cases: list[Case], rounds: int, seconds: float = 0.02, seed: int = 0) -> None:
    """Fills the times of the cases that have a program, by `time_in_turns`."""
    runs = {index: case.run for index, case in enumerate(cases) if case.run is not None}
    for index, times in time_in_turns(runs, rounds, seconds, seed).items():
        cases[index].times = times


def run_group(
    names: Iterable[str],
    implementations: Iterable[str],
    directions: Iterable[str],
    shape: Shape,
    *,
    rounds: int,
    check_rows: int,
    matrix_size: int,
    seed: int = 0,
    seconds: float = 0.02,
) -> list[Case]:
    """All cases of one shape, checked and timed together; the matrix product is the last."""
    cases = []
    for op in names:
        problem = Problem(op, shape, seed)
        expected = problem.reference(min(shape.length, check_rows))
        cases += [prepare(problem, name, direction, expected) for name in implementations for direction in directions]
    cases.append(matrix_product(shape, matrix_size))
    time_cases(cases, rounds, seconds, seed)
    return cases


def finish(cases: list[Case]) -> list[dict]:
    """Records of one group with what compares its cases.

    FLOP/s and their share of the matrix product's; the ratio of an op to the fastest attention, of a mixer to the
    fastest attention mixer; the ratio of a CEM setting to the same interaction with the first T of the group.
    """
    peak = cases[-1].flops / cases[-1].median
    attention, first = {}, {}
    for case in cases:
        if case.op in ("attention", "attention_mixer") and case.median:
            key = (case.op, case.direction)
            attention[key] = min(case.median, attention.get(key, float("inf")))
    records = []
    for case in cases:
        record = case.record()
        timed = case.median is not None
        rate = case.flops / case.median if timed and case.flops else None
        record["flops_per_second"] = rate
        record["share_of_matrix_product"] = rate / peak if rate else None
        yardstick = attention.get(("attention" if case.op in OPS else "attention_mixer", case.direction))
        compared = timed and yardstick and case is not cases[-1]
        record["ratio_to_attention"] = case.median / yardstick if compared else None
        setting, _, recursions = case.op.rpartition("_T")
        record["ratio_to_first"] = None
        if timed and recursions.isdecimal():
            start = first.setdefault((setting, case.implementation, case.direction), case.median)
            record["ratio_to_first"] = case.median / start
        records.append(record)
    return records


COLUMNS = (
    ("op", "{}", "op"),
    ("implementation", "{}", "with"),
    ("dtype", "{}", "dtype"),
    ("length", "{}", "L"),
    ("pass", "{}", "pass"),
    ("median_seconds", "{:.3f}", "ms"),
    ("spread", "{:.0%}", "spread"),
    ("flops_per_second", "{:.1f}", "GFLOP/s"),
    ("share_of_matrix_product", "{:.0%}", "of matmul"),
    ("ratio_to_attention", "{:.2f}", "/attention"),
    ("ratio_to_first", "{:.2f}", "/first T"),
    ("memory_bytes", "{:.1f}", "MiB"),
    ("temporary_bytes", "{:.1f}", "temporaries"),
    ("compile_seconds", "{:.1f}", "compile s"),
    ("error_over_limit", "{:.2f}", "error/limit"),
)
UNITS = {"median_seconds": 1e3, "flops_per_second": 1e-9, "memory_bytes": 2**-20, "temporary_bytes": 2**-20}


def table(records: list[dict]) -> str:
    """The records as text, aligned; a case without a time ends with the reason."""
    rows = [[title for _, _, title in COLUMNS]]
    for record in records:
        rows.append(
            [
                "-"
                if record[key] is None
                else pattern.format(record[key] * UNITS[key] if key in UNITS else record[key])
                for key, pattern, _ in COLUMNS
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) if i < 5 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    ]
    failures = [""] + [record["failure"] for record in records]
    return "\n".join(line.rstrip() + (f"  {failure}" if failure else "") for line, failure in zip(lines, failures))
