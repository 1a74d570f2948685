"""The compiler's static cycle estimates of the TPU kernels beside jax's flash attention. Needs no TPU, only libtpu.

    python -m experiments.estimate_tpu                                # every chip, L=4096, bfloat16
    python -m experiments.estimate_tpu --chips=v5p,v6e --lengths=4096,8192 --cases=flash,cubit,cubit+segments
    python -m experiments.estimate_tpu --chips=v5p --flash=search     # flash attention's block sizes, one by one

Estimates, not times: the estimator sees schedules, transfers and loops, but no hardware. "kernels" are the Pallas
kernels, "all" adds what XLA does around them: changes of layout, because arrays are [B, L, H, K] and lie as XLA likes
it best when nothing else asks; inside a model XLA can choose. (flash attention takes [B, H, L, K] and needs none.)
"forward" is the forward kernel that runs before a backward pass and saves what it needs. Ratios are to the kernels of
flash attention for the same chip and shape: "x" with blocks of 512, "x best" at the best of the block sizes tried, each
followed by that of "all". Its backward pass is two kernels, ours is one. Every case compiles in a process of its own,
because the estimator may end the process; such a case prints its last words.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile

from absl import flags

from cubit_jax.runtime import cli
from cubit_jax.runtime.errors import UserError
from experiments.support.options import integers, known, output_path

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
CASES = ("flash", "cubit", "deltaformer", "cubit+segments", "deltaformer+segments", "cubit+window")
FLASH_SIZES = {
    "default": [(512, 512), (512, 1024), (1024, 1024)],
    "search": list(itertools.product((256, 512, 1024, 2048), repeat=2)),
}
YARDSTICK = (512, 512)
WINDOW = 1024

PASSES = ("forward", "backward")


def define_flags() -> None:
    """In a function, so that several of these programs can be imported into one process."""
    flags.DEFINE_list("chips", list(CHIPS), f"Chips, of {', '.join(CHIPS)}.")
    flags.DEFINE_list("lengths", ["4096"], "Sequence lengths.")
    flags.DEFINE_list("cases", list(CASES), f"What to estimate, of {', '.join(CASES)}.")
    flags.DEFINE_list("passes", list(PASSES), "forward, backward or both.")
    flags.DEFINE_integer("batch", 1, "Batch size.", lower_bound=1)
    flags.DEFINE_integer("heads", 8, "Number of heads.", lower_bound=1)
    flags.DEFINE_integer("head_dim", 128, "Head dimension.", lower_bound=1)
    flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Type of query, key and right side.")
    flags.DEFINE_string(
        "blocks", None, "Our block sizes: rows,columns,heads for forward and again for backward; default: those in use."
    )
    flags.DEFINE_enum("flash", "default", list(FLASH_SIZES), "Which block sizes of flash attention to try.")
    flags.DEFINE_string("json", None, "Also append every estimate to this file, one JSON object a line.")
    flags.DEFINE_integer("timeout", 1200, "Seconds that one case may take.", lower_bound=1)
    flags.DEFINE_string("case", None, "For the program itself: compile this one case.")


def compile_case(case: dict) -> None:
    """Compiles one case for its chip and prints {operation: cycles}."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.experimental.pallas.ops.tpu import flash_attention
    from jax.sharding import SingleDeviceSharding

    from pallas_kernels import kernel_solve_tpu

    device = topologies.get_topology_desc(topology_name=CHIPS[case["chip"]], platform="tpu").devices[0]

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    batch, length, heads, dim = case["batch"], case["length"], case["heads"], case["head_dim"]
    name, _, option = case["name"].partition("+")
    if name == "flash":
        query, key = case["blocks"]
        sizes = flash_attention.BlockSizes(query, key, key, 1, query, key, key, query, key, key, query)
        arrays = [array((batch, heads, length, dim), case["dtype"])] * 3

        def forward(q, k, v):
            return flash_attention.flash_attention(q, k, v, causal=True, block_sizes=sizes)
    else:
        sizes = kernel_solve_tpu.BlockSizes.best(device.device_kind, length, heads, dim, case["dtype"] == "float32")
        if case["blocks"]:
            sizes = kernel_solve_tpu.BlockSizes(*case["blocks"])
        arrays = [array((batch, length, heads, dim), case["dtype"])] * 3
        if name == "cubit":
            arrays.append(array((heads,), jnp.float32))
        else:
            arrays.append(array((batch, length, heads), jnp.float32))
        segment_ids = [array((batch, length), jnp.int32)] if option == "segments" else []

        def forward(query, key, rhs, diagonal, segment_ids=None):
            return kernel_solve_tpu.kernel_solve(
                query,
                key,
                rhs,
                **{"ridge" if name == "cubit" else "beta": diagonal},
                segment_ids=segment_ids,
                window=WINDOW if option == "window" else None,
                scale=1.0 if name == "cubit" else dim**-0.5,
                block_size=sizes,
            )

        if case["pass"] == "forward":
            arrays += segment_ids
    if case["pass"] == "forward":
        print(json.dumps(operations(jax.jit(forward).lower(*arrays).compile().as_text())))
        return
    extra = [] if name == "flash" else segment_ids
    output = jax.eval_shape(forward, *arrays, *extra)

    def both(cotangent, *arguments):
        inputs, extra = arguments[: len(arrays)], arguments[len(arrays) :]
        return jax.vjp(lambda *inputs: forward(*inputs, *extra), *inputs)[1](cotangent)

    compiled = jax.jit(both).lower(array(output.shape, output.dtype), *arrays, *extra).compile()
    print(json.dumps(operations(compiled.as_text())))


def operations(text: str) -> dict[str, int]:
    """{operation: estimated cycles} of the entry computation of a compiled module's text."""
    entry = text[text.index("\nENTRY ") :]
    return {name: int(cycles) for name, cycles in re.findall(r'%?([\w.-]+) = .*?"estimated_cycles":"(\d+)"', entry)}


def estimate(case: dict, timeout: int) -> dict[str, int] | str:
    """{operation: cycles} of one case, or the error that ended its process."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_static_llo_profile_to={folder}",
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", "experiments.estimate_tpu", f"--case={json.dumps(case)}"],
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            return f"more than {timeout} s"
        if done.returncode:
            reasons = r"RESOURCE_EXHAUSTED|Check failed|profiling of .* failed|^error:|^[\w.]*Error:"
            lines = [line for line in done.stderr.splitlines() if re.search(reasons, line)]
            return (lines or [f"exit code {done.returncode}"])[-1][:300]
        return json.loads(done.stdout.splitlines()[-1])


def parts(case: dict, cycles: dict[str, int]) -> tuple[int, int, int]:
    """(cycles of the kernels of the pass, of everything in the pass, of the kernels of the other pass)."""
    kernels, others, rest = 0, 0, 0
    for operation, count in cycles.items():
        backward = "backward" in operation or "transpose" in operation or "bwd" in operation
        if not re.search("kernel_solve|flash|mha", operation):
            rest += count
        elif backward == (case["pass"] == "backward"):
            kernels += count
        else:
            others += count
    return kernels, kernels + rest, others


def row(case: dict, cycles: dict[str, int] | str, flash: dict) -> str:
    """A line of the table; flash: {block sizes: cycles of its kernels} as far as they are estimated."""
    blocks = ",".join(map(str, case["blocks"])) if case["blocks"] else "in use"
    line = f"{case['chip']:6} {case['length']:6} {case['name']:22} {case['pass']:9} {blocks:22}"
    if isinstance(cycles, str):
        return f"{line} {cycles}"
    kernels, everything, others = parts(case, cycles)
    line += f" {kernels:10,} {everything:10,} {f'{others:,}' if others else '':>10}"
    for yardstick in (flash.get(YARDSTICK), min(flash.values(), default=None)):
        line += f" {kernels / yardstick:6.2f} {everything / yardstick:6.2f}" if yardstick else f" {'':6} {'':6}"
    return line.rstrip()


def main() -> None:
    options = flags.FLAGS
    if options.case:
        compile_case(json.loads(options.case))
        return
    chips = known("chips", options.chips, CHIPS)
    output = output_path(options.json, "json") if options.json else None
    lengths = integers("lengths", options.lengths)
    passes, names = known("passes", options.passes, PASSES), known("cases", options.cases, CASES)
    ours = None
    if options.blocks:
        if not re.fullmatch(r"\d+(,\d+){5}", options.blocks):
            raise UserError(f"--blocks={options.blocks}: give rows,columns,heads twice, six integers")
        ours = [int(n) for n in options.blocks.split(",")]
    titles = f"{'kernels':>10} {'all':>10} {'forward':>10} {'x':>6} {'all x':>6} {'x best':>6} {'all x':>6}"
    print(f"{'chip':6} {'L':>6} {'case':22} {'pass':9} {'blocks':22} {titles}", flush=True)
    for chip, length, which in itertools.product(chips, lengths, passes):
        flash = {}
        for name in names:
            for blocks in FLASH_SIZES[options.flash] if name == "flash" else [ours]:
                case = {
                    "chip": chip,
                    "length": length,
                    "pass": which,
                    "name": name,
                    "blocks": blocks,
                    "batch": options.batch,
                    "heads": options.heads,
                    "head_dim": options.head_dim,
                    "dtype": options.dtype,
                }
                cycles = estimate(case, options.timeout)
                if name == "flash" and not isinstance(cycles, str):
                    flash[blocks] = parts(case, cycles)[0]
                print(row(case, cycles, flash), flush=True)
                if output:
                    with output.open("a") as file:
                        file.write(json.dumps({**case, "cycles": cycles}) + "\n")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
