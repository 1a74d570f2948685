"""Checks the GPU kernels on a GPU, then times them. At most eight minutes on one H100 or H200.

    python -m experiments.gpu_check --output=gpu_check.json
    python -m experiments.gpu_check --output=gpu_check.json --smoke      # tiny shapes, in the interpreter, on a CPU

Stages, each in a process of its own with a time limit, so that a kernel that hangs or crashes costs its stage only:
  first       one small solve; if it fails, stages that need the kernels are skipped
  correct     value and every gradient against the dense float64 reference (beyond 256 rows against xla in float32);
              the same bits in repeated runs, and for float32 at the default and the highest matrix precision
  benchmark   kernel_solve and attention, pallas (cuDNN for attention) and xla, in turns, forward and with backward
  sizes       the same solve with other warps and pipeline stages than BlockSizes chooses
  fla         flash-linear-attention's DeltaFormer, where it and torch can be imported
The JSON file is written after every stage: environment, and a stage's seconds, failure (null if none) and results.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from absl import flags

from cubit_jax.runtime import cli
from cubit_jax.runtime.errors import UserError
from experiments.support.options import known, output_path

STAGES = {"first": 60, "correct": 170, "benchmark": 150, "sizes": 90, "fla": 40}  # seconds at most
CORRECT = (  # op, length, heads, head_dim, dtype, window: at least three blocks, most lengths ragged
    ("kernel_solve", 1000, 2, 64, "bfloat16", None),
    ("kernel_solve", 1000, 2, 64, "float32", None),
    ("delta_solve", 1000, 2, 64, "bfloat16", None),
    ("delta_solve", 777, 2, 128, "float32", None),
    ("kernel_solve", 1024, 2, 128, "bfloat16", None),
    ("kernel_solve", 700, 2, 128, "float16", 300),
    ("delta_solve", 200, 3, 48, "bfloat16", 50),
    ("kernel_solve", 130, 1, 256, "bfloat16", None),
    ("delta_solve", 130, 1, 8, "float32", None),
    ("kernel_solve", 1, 1, 64, "float32", None),
    ("kernel_solve", 4096, 16, 64, "bfloat16", None),
)
BENCHMARK = ((2048, 16, 128), (8192, 16, 128), (8192, 16, 64), (32768, 8, 128))  # length, heads, head_dim
SIZES = ((64, 4, 4, 4, 2), (64, 8, 8, 8, 2), (64, 4, 8, 4, 3), (64, 4, 8, 8, 1), (32, 4, 4, 4, 2))


def define_flags() -> None:
    """In a function, so that several of these programs can be imported into one process."""
    flags.DEFINE_string("output", "gpu_check.json", "The JSON file to write.")
    flags.DEFINE_bool("smoke", False, "Tiny shapes in Pallas' interpreter on a CPU: checks this script.")
    flags.DEFINE_integer("seconds", 470, "Time limit of all stages together.", lower_bound=1)
    flags.DEFINE_list("only", list(STAGES), f"Stages to run, of {', '.join(STAGES)}.")
    flags.DEFINE_enum("stage", None, list(STAGES), "For the script itself: run one stage, print its results.")


def write_line(record: dict) -> None:
    """One result of a stage, which the parent reads also if the stage is stopped later."""
    print("RESULT " + json.dumps(record), flush=True)


def compiled_solve(problem, direction: str) -> Callable:
    """The solve by its kernel, compiled: a function of no arguments."""
    import jax
    import jax.numpy as jnp

    inputs, cotangent = jax.tree.map(jnp.asarray, (problem.inputs, problem.cotangent))
    program = jax.jit(problem.program("pallas", direction)).lower(inputs, cotangent).compile()
    return lambda: program(inputs, cotangent)


def in_float32(problem) -> tuple:
    """(output, gradients) of all rows by xla in float32 from the same rounded inputs: linear in memory."""
    import jax
    import jax.numpy as jnp

    with jax.default_matmul_precision("highest"):
        inputs, cotangent = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (problem.inputs, problem.cotangent))
        return jax.device_get(jax.jit(problem.program("xla", "forward+backward"))(inputs, cotangent))


def first(smoke: bool) -> None:
    """One small solve against the reference."""
    from experiments.support import problems

    length, head_dim = (40, 16) if smoke else (250, 64)
    problem = problems.Problem("kernel_solve", problems.Shape(1, length, 2, head_dim, "bfloat16"))
    expected = problem.reference(problem.shape.length)
    write_line(
        {"error_over_limit": problems.worst_error(problem, compiled_solve(problem, "forward")(), expected, "forward")}
    )


def correct(smoke: bool) -> None:
    """Value and gradients of every case; the same bits in repeated runs."""
    import jax
    import numpy as np

    from experiments.support import problems

    tiny = (("kernel_solve", 40, 1, 16, "float32", None), ("delta_solve", 260, 1, 16, "bfloat16", 20))
    for op, length, heads, head_dim, dtype, window in tiny if smoke else CORRECT:
        problem = problems.Problem(op, problems.Shape(1, length, heads, head_dim, dtype, window))
        expected = problem.reference(length) if length <= 256 else in_float32(problem)
        run = compiled_solve(problem, "forward+backward")
        out = jax.device_get(run())
        record = dataclasses.asdict(problem.shape) | {
            "op": op,
            "error_over_limit": problems.worst_error(problem, out, expected, "forward+backward"),
        }
        record["same_bits_in_every_run"] = all(
            jax.tree.all(jax.tree.map(np.array_equal, out, jax.device_get(run()))) for _ in range(1 if smoke else 20)
        )
        if dtype == "float32":
            with jax.default_matmul_precision("highest"):
                highest = jax.device_get(compiled_solve(problem, "forward+backward")())
            record["same_bits_at_highest_precision"] = jax.tree.all(jax.tree.map(np.array_equal, out, highest))
        write_line(record)


def benchmark(smoke: bool) -> None:
    """Times beside XLA and attention."""
    from experiments.support import cases, problems

    for length, heads, head_dim in ((40, 1, 16),) if smoke else BENCHMARK:
        shape = problems.Shape(1, length, heads, head_dim, "bfloat16")
        group = cases.run_group(
            ("kernel_solve", "delta_solve", "attention"),
            ("pallas", "xla"),
            problems.PASSES,
            shape,
            rounds=2 if smoke else 10,
            check_rows=256,
            matrix_size=64 if smoke else 8192,
            seconds=0.0 if smoke else 0.01,
        )
        records = cases.finish(group)
        print(cases.table(records), flush=True)
        for record in records:
            write_line(record)


def sizes(smoke: bool) -> None:
    """Times with other block sizes."""
    from experiments.support import cases, problems
    from pallas_kernels.kernel_solve_gpu import BlockSizes

    shape = problems.Shape(1, 40, 1, 16, "bfloat16") if smoke else problems.Shape(1, 8192, 16, 128, "bfloat16")
    problem, chosen = problems.Problem("kernel_solve", shape), BlockSizes.best
    candidates = {"chosen": chosen(shape.length, shape.head_dim)}
    candidates |= {str(sizes): BlockSizes(*sizes) for sizes in (((16, 4, 4, 4, 2),) if smoke else SIZES)}
    timed, expected = {}, problem.reference(min(shape.length, 256))
    try:
        for name, candidate in candidates.items():
            BlockSizes.best = lambda *_, candidate=candidate: candidate
            for direction in problems.PASSES:
                timed[name, direction] = cases.prepare(problem, "pallas", direction, expected)
    finally:
        BlockSizes.best = chosen
    cases.time_cases(list(timed.values()), 2 if smoke else 7, 0.0 if smoke else 0.01)
    for (name, _), case in timed.items():
        write_line({"sizes": name} | dataclasses.asdict(candidates[name]) | case.record())


def fla(smoke: bool) -> None:
    """DeltaFormer's u by flash-linear-attention. Its batch dimension is a loop, so B = 1; bfloat16, as above."""
    try:
        import torch
        from fla.ops.deltaformer.parallel import ParallelDeltaformerFunction
    except ImportError as error:
        write_line({"not_run": f"{error}; pip install torch flash-linear-attention to compare with its DeltaFormer"})
        return
    for length, heads, head_dim in () if smoke else BENCHMARK[:3]:
        key, value = (
            torch.randn(1, length, heads, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2)
        )
        beta = torch.rand(1, length, heads, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        cotangent = torch.randn_like(value)
        for direction in ("forward", "forward+backward"):
            times = []
            for _ in range(12):
                torch.cuda.synchronize()
                start = time.perf_counter()
                u = ParallelDeltaformerFunction.apply(key, key, value, beta, min(512, length), None)
                if direction == "forward+backward":
                    u.backward(cotangent)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            write_line(
                {
                    "op": "delta_solve",
                    "implementation": "flash-linear-attention",
                    "pass": direction,
                    "length": length,
                    "num_heads": heads,
                    "head_dim": head_dim,
                    "times": times[2:],
                }
            )


def run_stage(name: str, smoke: bool) -> None:
    """One stage, in the child process."""
    from cubit_jax.ops import dispatch

    stage = {"first": first, "correct": correct, "benchmark": benchmark, "sizes": sizes, "fla": fla}[name]
    if smoke:
        with dispatch.interpret("gpu"):
            stage(smoke)
    else:
        stage(smoke)


def start_stage(name: str, seconds: float, smoke: bool) -> dict:
    """Runs a stage as a child for at most `seconds`: {"seconds", "failure", "results"}."""
    environment = os.environ | ({"JAX_PLATFORMS": "cpu"} if smoke else {})
    command = [sys.executable, "-m", "experiments.gpu_check", f"--stage={name}"] + ["--smoke"] * smoke
    start, failure = time.monotonic(), None
    with tempfile.TemporaryFile("w+") as log:
        try:
            code = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            code, failure = None, f"stopped after {seconds:.0f} seconds"
        log.seek(0)
        text = log.read()
    lines = text.splitlines()
    if code:
        failure = " | ".join([line for line in lines if line.strip()][-3:])
    results = [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
    print("\n".join(line for line in lines if not line.startswith("RESULT ")), flush=True)
    return {"seconds": round(time.monotonic() - start, 1), "failure": failure, "results": results}


def describe() -> dict:
    """The device and versions, asked in a child: the parent must not hold the GPU's memory."""
    code = (
        "import json, jax; d = jax.devices()[0]; print(json.dumps({'device': d.device_kind, 'platform': d.platform,"
        "'jax': jax.__version__, 'jaxlib': jax.lib.__version__, 'runtime': d.client.platform_version}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if found.returncode:
        raise UserError(f"jax finds no device: {found.stderr.strip().splitlines()[-1]}")
    return json.loads(found.stdout.strip().splitlines()[-1])


def main() -> int | None:
    options = flags.FLAGS
    if options.stage:
        run_stage(options.stage, options.smoke)
        return
    only = known("only", options.only, STAGES)
    output = output_path(options.output)
    deadline = time.monotonic() + options.seconds
    report = {"environment": describe(), "smoke": options.smoke, "stages": {}}
    if not options.smoke and report["environment"]["platform"] not in ("gpu", "cuda"):
        raise UserError(f"the device is {report['environment']['device']}, not a GPU: see --smoke")
    works = True
    for name, limit in STAGES.items():
        if name not in only:
            continue
        left = deadline - time.monotonic()
        if not works and name != "fla":
            stage = {"seconds": 0.0, "failure": "skipped: the first solve failed", "results": []}
        elif left < 5:
            stage = {"seconds": 0.0, "failure": "skipped: no time is left", "results": []}
        else:
            stage = start_stage(name, min(limit, left), options.smoke)
        if name == "first":
            works = stage["failure"] is None and stage["results"][0]["error_over_limit"] <= 1
        report["stages"][name] = stage
        output.write_text(json.dumps(report, indent=1) + "\n")
        remark = stage["failure"] or "".join(f"not run: {r['not_run']}" for r in stage["results"] if "not_run" in r)
        print(
            f"{name}: {stage['seconds']} s, {len(stage['results'])} results" + (f", {remark}" if remark else ""),
            flush=True,
        )
    wrong = [
        result
        for stage in report["stages"].values()
        for result in stage["results"]
        if (result.get("error_over_limit") or 0) > 1
        or not result.get("same_bits_in_every_run", True)
        or not result.get("same_bits_at_highest_precision", True)
    ]
    for result in wrong:
        print(f"WRONG {json.dumps({key: value for key, value in result.items() if key != 'times'})}")
    print(f"wrote {output}")
    return 1 if wrong or any(stage["failure"] for stage in report["stages"].values()) else 0


if __name__ == "__main__":
    define_flags()
    cli.run(main)
