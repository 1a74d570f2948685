"""What the estimates are read from and what counts as whose. That kernels compile is tests/pallas_kernels'."""

import os
import subprocess
import sys

import pytest

from experiments import estimate_tpu

TEXT = """HloModule jit_both

%fused (p: f32[8]) -> f32[8] {
  ROOT %inside = f32[8] add(%p, %p), backend_config={"estimated_cycles":"1"}
}

ENTRY %main (q: bf16[1,8]) -> f32[8] {
  %copy.3 = bf16[8] copy(%q), backend_config={"flag":"x","estimated_cycles":"20"}
  %kernel_solve_tpu_forward.1 = f32[8] custom-call(%copy.3), backend_config={"estimated_cycles":"300"}
  ROOT %transpose.kernel_solve_tpu_backward.1 = f32[8] custom-call(%copy.3), backend_config={"estimated_cycles":"4000"}
}
"""


def test_cycles_of_the_entry_computation_by_pass():
    cycles = estimate_tpu.operations(TEXT)
    assert cycles == {"copy.3": 20, "kernel_solve_tpu_forward.1": 300, "transpose.kernel_solve_tpu_backward.1": 4000}
    assert estimate_tpu.parts({"pass": "backward"}, cycles) == (4000, 4020, 300)
    assert estimate_tpu.parts({"pass": "forward"}, cycles) == (300, 320, 4000)


def test_a_row_is_compared_with_flash_at_512_and_at_its_best():
    case = {"chip": "v5p", "length": 4096, "pass": "backward", "name": "cubit", "blocks": None}
    cycles = {"jvp_kernel_solve_tpu_forward.1": 300, "transpose.kernel_solve_tpu_backward.1": 4000, "copy": 1000}
    row = estimate_tpu.row(case, cycles, {(512, 512): 8000, (1024, 1024): 5000})
    assert row.split() == [
        "v5p",
        "4096",
        "cubit",
        "backward",
        "in",
        "use",
        "4,000",
        "5,000",
        "300",
        "0.50",
        "0.62",
        "0.80",
        "1.00",
    ]
    assert estimate_tpu.row(case, "more than 5 s", {}).endswith("more than 5 s")
    assert estimate_tpu.row(case, cycles, {}).endswith("300")


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--chips=v5q", "unknown --chips=v5q: did you mean v5"),
        ("--cases=cubit+segment", "did you mean cubit+segments?"),
        ("--blocks=512,1024", "--blocks=512,1024: give rows,columns,heads twice"),
    ],
)
def test_messages(argument, message):
    done = subprocess.run(
        [sys.executable, "-m", "experiments.estimate_tpu", argument],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ,
    )
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]
