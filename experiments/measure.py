"""What the programs that measure share: timing in turns and where it was done; cases of the benchmark and of the GPU
check, their check against a reference, tables.

A case is one op or mixer with one implementation at one shape, forward or forward and backward. It is compiled once;
the same program is checked and then timed, and a program that is wrong gets no time.
"""

import dataclasses
import os
import pathlib
import platform
import random
import re
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from cubit_jax import ops

OPS = ("kernel_solve", "delta_solve", "attention")
MIXER_NAMES = ("attention_mixer", "deltaformer_mixer", "cubit_mixer", "cem_mixer")
PASSES = ("forward", "forward+backward")
# max|a - b| / max|b| against the float64 reference of the rounded inputs, of the output and of each gradient. A mixer's
# 16-bit reference rounds where the mixer does.
LIMITS = {"float32": (1e-5, 1e-4), "bfloat16": (2e-2, 2e-2), "float16": (2e-2, 2e-2)}
MIXER_LIMITS = {"float32": (1e-4, 1e-3), "bfloat16": (3e-2, 1e-1), "float16": (3e-2, 1e-1)}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the arrays [B, L, H, K]; mixers have model_dim H * K."""

    batch: int
    length: int
    num_heads: int
    head_dim: int
    dtype: str
    window: int | None = None


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
    error: float | None = None  # the largest of output and gradients, as a share of its limit
    failure: str | None = None  # why there is no time
    times: list = dataclasses.field(default_factory=list)

    @property
    def median(self):
        return statistics.median(self.times) if self.times else None

    @property
    def spread(self):
        return spread(self.times) if len(self.times) > 1 else None

    def record(self):
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
            "error_over_limit": self.error,
            "failure": self.failure,
        }


def spread(times):
    """Distance of the quartiles as a share of the median."""
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle


def environment():
    """Where the numbers come from."""
    device = jax.devices()[0]
    versions = {
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "runtime": device.client.platform_version,
        "python": platform.python_version(),
    }
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "processor": _processor(),
        "processor_cores": os.cpu_count(),
        "versions": versions,
    }


def _processor():
    """The name of the host's processor."""
    info = pathlib.Path("/proc/cpuinfo")  # Linux; elsewhere what Python knows
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor()


def visible_pairs(length, window):
    """Number of (i, j) with j <= i and i - j < window."""
    window = min(window or length, length)
    return length * window - window * (window - 1) // 2


def count_flops(op, shape, direction):
    """Multiplications and additions that the definition needs: two products a visible pair forward, five more backward.

    A mixer adds its projections, and Cubit's and DeltaFormer's are a solve and an attention. None for CEM, whose steps
    share products with their own gradient.
    """
    pairs = shape.batch * shape.num_heads * visible_pairs(shape.length, shape.window)
    tile = 2 * shape.head_dim * pairs * (2 if direction == "forward" else 7)
    if op in OPS:
        return tile
    if op == "cem_mixer":
        return None
    projections = {"attention_mixer": 4, "deltaformer_mixer": 5, "cubit_mixer": 5}[op]
    matrix = 2 * shape.batch * shape.length * (shape.num_heads * shape.head_dim) ** 2
    return tile * (1 if op == "attention_mixer" else 2) + matrix * projections * (1 if direction == "forward" else 3)


def _op_inputs(op, shape, rng):
    """({argument: array}, f(arguments, implementation)): norms and ridge as at the start of training."""
    dims = (shape.batch, shape.length, shape.num_heads, shape.head_dim)
    query, key, rhs = rng.standard_normal((3, *dims)).astype(np.float32)
    if op == "attention":
        return {"q": query, "k": key, "v": rhs}, lambda a, name: ops.attention(
            a["q"], a["k"], a["v"], window=shape.window, implementation=name
        )
    if op == "kernel_solve":
        key = query / np.linalg.norm(query, axis=-1, keepdims=True)
        ridge = np.full(shape.num_heads, 1e-10, np.float32)
        return {"query": query, "key": key, "rhs": rhs, "ridge": ridge}, lambda a, name: ops.kernel_solve(
            a["query"], a["key"], a["rhs"], ridge=a["ridge"], window=shape.window, implementation=name
        )
    beta = rng.uniform(0.0, 1.0, dims[:3]).astype(np.float32)
    return {"query": query, "key": key, "rhs": rhs, "beta": beta}, lambda a, name: ops.kernel_solve(
        a["query"],
        a["key"],
        a["rhs"],
        beta=a["beta"],
        scale=shape.head_dim**-0.5,
        window=shape.window,
        implementation=name,
    )


def _mixer(op, shape, dtype, implementation):
    from cubit_jax.layers import MIXERS

    return MIXERS[op.removesuffix("_mixer")](
        num_heads=shape.num_heads,
        head_dim=shape.head_dim,
        window=shape.window,
        dtype=dtype,
        param_dtype=jnp.promote_types(dtype, jnp.float32),
        implementation=implementation,
        name="mixer",
    )


ROWS = ("q", "k", "v", "query", "key", "rhs", "beta", "x")  # arguments with a row a position


class Problem:
    """Inputs of one op at one shape, the function of an implementation, and the reference on the first rows."""

    def __init__(self, op, shape, seed=0):
        self.op, self.shape, self.dtype = op, shape, jnp.dtype(shape.dtype)
        rng = np.random.default_rng(seed)
        if op in OPS:
            inputs, self.call = _op_inputs(op, shape, rng)
            wide = ("ridge", "beta")
        else:
            model_dim = shape.num_heads * shape.head_dim
            x = rng.standard_normal((shape.batch, shape.length, model_dim)).astype(np.float32)
            params = jax.jit(_mixer(op, shape, jnp.float32, "xla").init)(jax.random.key(seed), jnp.asarray(x[:, :1]))
            inputs, wide = {"params": params, "x": x}, ("params",)
            self.call = lambda a, name: _mixer(op, shape, a["x"].dtype, name).apply(a["params"], a["x"])
        self.inputs = {
            name: value if name in wide else np.asarray(jnp.asarray(value, self.dtype))
            for name, value in inputs.items()
        }
        # The solve returns float32; everything else its input's dtype.
        out_dtype = np.float32 if op in ("kernel_solve", "delta_solve") else self.dtype
        out_shape = np.shape(inputs["x"] if "x" in inputs else inputs.get("rhs", inputs.get("v")))
        self.cotangent = rng.standard_normal(out_shape).astype(np.float32).astype(out_dtype)

    def program(self, implementation, direction):
        """Function of (inputs, cotangent): the output, or (output, gradients)."""
        if direction == "forward":
            return lambda inputs, cotangent: self.call(inputs, implementation)

        def both(inputs, cotangent):
            out, vjp = jax.vjp(lambda inputs: self.call(inputs, implementation), inputs)
            return out, vjp(cotangent)[0]

        return both

    def reference(self, rows):
        """(output, gradients) of the first `rows` rows, which later rows do not change, by the dense implementation.

        On the CPU; in float64, but a 16-bit mixer in its own dtype, because its roundings belong to it.
        """
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            own = self.op not in OPS and self.dtype.itemsize == 2

            def place(x):
                return jnp.asarray(x if own else np.asarray(x, np.float64))

            inputs = {
                name: jax.tree.map(lambda x, row=name in ROWS: place(x[:, :rows] if row else x), value)
                for name, value in self.inputs.items()
            }
            cotangent = self.cotangent[:, :rows]
            out = jax.jit(self.program("reference", PASSES[1]))(inputs, place(cotangent))
            return jax.tree.map(lambda x: np.asarray(x, np.float64), out)


def relative_error(actual, expected):
    """max|a - b| / max|b|; infinite where `actual` is not finite."""
    actual = np.asarray(actual, np.float64)
    if not np.isfinite(actual).all():
        return float("inf")
    return float(np.max(np.abs(actual - expected)) / (np.max(np.abs(expected)) or 1.0))


def worst_error(problem, result, expected, direction):
    """The largest error of output and gradients, each as a share of its limit, over the rows the reference has."""
    forward, backward = (LIMITS if problem.op in OPS else MIXER_LIMITS)[problem.shape.dtype]
    out, grads = result if direction == PASSES[1] else (result, {})
    rows = expected[0].shape[1]
    worst = relative_error(out[:, :rows], expected[0]) / forward
    for name, grad in grads.items():
        for a, b in zip(jax.tree.leaves(grad), jax.tree.leaves(expected[1][name])):
            worst = max(worst, relative_error(a[:, :rows] if name in ROWS else a, b) / backward)
    return worst


def peak_memory(compiled):
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - (analysis.alias_size_in_bytes)
    )


def prepare(problem, implementation, direction, expected):
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
        case.memory = peak_memory(compiled)
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


def matrix_product(shape, size):
    """A square product of the dtype, the yardstick of FLOP/s; float32 is not rounded to less."""
    case = Case("matrix product", "xla", "forward", shape, flops=2.0 * size**3, error=0.0)
    a = jnp.asarray(np.random.default_rng(0).standard_normal((size, size)), shape.dtype)
    start = time.perf_counter()
    compiled = jax.jit(lambda a: jnp.dot(a, a, precision="highest")).lower(a).compile()
    case.compile_seconds, case.memory = time.perf_counter() - start, peak_memory(compiled)
    case.run = lambda: compiled(a)
    return case


def time_in_turns(runs, rounds, seconds=0.02, seed=0):
    """{name: seconds a run, one number a round}: after warm-up every run has its turn in each round, in random order.

    A measurement repeats its program until it lasts about `seconds`, queued on the device and waited for once.

    Args:
      runs: {name: () -> arrays}.
    """
    repeats = {}
    for name, run in runs.items():
        jax.block_until_ready(run())
        start = time.perf_counter()
        jax.block_until_ready(run())
        repeats[name] = max(1, min(200, round(seconds / (time.perf_counter() - start))))
    order = list(runs)
    times = {name: [] for name in runs}
    shuffle = random.Random(seed).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            for _ in range(repeats[name]):
                out = runs[name]()
            jax.block_until_ready(out)
            times[name].append((time.perf_counter() - start) / repeats[name])
    return times


def time_cases(cases, rounds, seconds=0.02, seed=0):
    """Fills the times of the cases that have a program, by `time_in_turns`."""
    runs = {index: case.run for index, case in enumerate(cases) if case.run is not None}
    for index, times in time_in_turns(runs, rounds, seconds, seed).items():
        cases[index].times = times


def run_group(names, implementations, directions, shape, *, rounds, check_rows, matrix_size, seed=0, seconds=0.02):
    """All cases of one shape, checked and timed together; the matrix product is the last."""
    cases = []
    for op in names:
        problem = Problem(op, shape, seed)
        expected = problem.reference(min(shape.length, check_rows))
        cases += [prepare(problem, name, direction, expected) for name in implementations for direction in directions]
    cases.append(matrix_product(shape, matrix_size))
    time_cases(cases, rounds, seconds, seed)
    return cases


def finish(cases):
    """Records of one group with what compares its cases: FLOP/s, share of the matrix product, ratio to attention."""
    peak = cases[-1].flops / cases[-1].median
    attention = {}
    for case in cases:
        if case.op == "attention" and case.median:
            attention[case.direction] = min(case.median, attention.get(case.direction, float("inf")))
    records = []
    for case in cases:
        record = case.record()
        timed = case.median is not None
        rate = case.flops / case.median if timed and case.flops else None
        record["flops_per_second"] = rate
        record["share_of_matrix_product"] = rate / peak if rate else None
        reference = attention.get(case.direction)
        compared = timed and reference and case is not cases[-1]
        record["ratio_to_attention"] = case.median / reference if compared else None
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
    ("memory_bytes", "{:.1f}", "MiB"),
    ("compile_seconds", "{:.1f}", "compile s"),
    ("error_over_limit", "{:.2f}", "error/limit"),
)
UNITS = {"median_seconds": 1e3, "flops_per_second": 1e-9, "memory_bytes": 2**-20}


def table(records):
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
