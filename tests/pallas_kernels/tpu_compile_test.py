"""Ahead-of-time compilation of the TPU kernels, forward and backward, by libtpu: no TPU is needed.

The interpreters accept much that a TPU does not (unaligned slices, primitives without a lowering, too much memory).
"""

import itertools
import os

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels.kernel_solve_tpu import BlockSizes, kernel_solve

pytest.importorskip("libtpu", reason="libtpu is not installed: the extra `test` brings it")

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


@pytest.fixture(scope="module", autouse=True)
def environment():
    """libtpu looks for a TPU's metadata server, and lets one process at a time load it, unless told otherwise."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def compile_for(chip, dtype, dim, length, *, heads=8, strict=False, segments=False, window=None):
    device = topologies.get_topology_desc(topology_name=CHIPS[chip], platform="tpu").devices[0]

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    sizes = BlockSizes.best(device.device_kind, length, heads, dim, dtype == "float32")
    shape = (1, length, heads, dim)
    diagonal = array(shape[:3] if strict else (heads,), "float32")

    def both(query, key, rhs, diagonal, segment_ids, cotangent):
        def solve(query, key, rhs, diagonal):
            name = "beta" if strict else "ridge"
            options = {name: diagonal, "segment_ids": segment_ids, "window": window, "block_size": sizes}
            return kernel_solve(query, key, rhs, **options)

        u, back = jax.vjp(solve, query, key, rhs, diagonal)
        return u, back(cotangent)

    arrays = [array(shape, dtype)] * 3 + [diagonal, array(shape[:2], "int32") if segments else None]
    compiled = jax.jit(both).lower(*arrays, array(shape, "float32")).compile()
    text = compiled.as_text()
    assert "kernel_solve_tpu_forward" in text
    assert "kernel_solve_tpu_backward" in text


# Every pair of values of two parameters meets in one of these.
PAIRWISE = [
    ("v5e", "float32", 64, 8192),
    ("v5e", "bfloat16", 128, 1024),
    ("v5p", "float32", 64, 1024),
    ("v5p", "bfloat16", 128, 8192),
    ("v6e", "float32", 128, 1024),
    ("v6e", "bfloat16", 64, 8192),
    ("tpu7x", "float32", 128, 8192),
    ("tpu7x", "bfloat16", 64, 1024),
]
EVERY = list(itertools.product(CHIPS, ("float32", "bfloat16"), (64, 128), (1024, 8192)))


def mostly_full(cases, usual):
    """The cases as parameters, all but the usual one for the full tier: a case takes libtpu about 10 seconds."""
    assert usual in cases
    return [case if case == usual else pytest.param(*case, marks=pytest.mark.full) for case in cases]


@pytest.mark.parametrize(
    ("chip", "dtype", "dim", "length"), mostly_full(PAIRWISE, usual=("v5p", "bfloat16", 128, 8192))
)
def test_compiles(chip, dtype, dim, length):
    compile_for(chip, dtype, dim, length)


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "dtype", "dim", "length"), [case for case in EVERY if case not in PAIRWISE])
def test_compiles_every_combination(chip, dtype, dim, length):
    compile_for(chip, dtype, dim, length)


def test_every_pair_is_compiled():
    for first, second in itertools.combinations(range(4), 2):
        pairs = [{(case[first], case[second]) for case in cases} for cases in (PAIRWISE, EVERY)]
        assert pairs[0] == pairs[1]


@pytest.mark.parametrize(
    "chip", ["v5p", *(pytest.param(chip, marks=pytest.mark.slow) for chip in ("v5e", "v6e", "tpu7x"))]
)
@pytest.mark.parametrize(
    ("strict", "length"), mostly_full([(False, 2048), (True, 4096), (True, 8192)], usual=(True, 8192))
)
def test_compiles_with_every_mask(chip, strict, length):
    """DeltaFormer's residuals beside everything else: the most that has to fit, at 4096 with four heads a program."""
    compile_for(chip, "bfloat16", 128, length, strict=strict, segments=True, window=700)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "chip", ["tpu7x", *(pytest.param(chip, marks=pytest.mark.slow) for chip in ("v5e", "v5p", "v6e"))]
)
def test_compiles_a_long_sequence(chip, dtype):
    compile_for(chip, dtype, 128, 32768, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_compiles_the_longest_sequence(chip):
    """Of chips with 128 MiB of vector memory, as docs/launch.md says."""
    compile_for(chip, "bfloat16", 128, 65536, strict=True, segments=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_compiles_the_largest_head(dtype):
    compile_for("tpu7x", dtype, 256, 8192)


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "heads", "length"), [(64, 8, 4608), (64, 3, 2048), (256, 4, 4096)])
def test_compiles_other_block_sizes(dim, heads, length):
    """An odd number of 512 rows, heads that no group of two or four divides, two wide heads at a time."""
    compile_for("v6e", "bfloat16", dim, length, heads=heads)


@pytest.mark.slow
def test_compiles_a_short_strict_sequence():
    compile_for("v5p", "bfloat16", 128, 512, strict=True, segments=True, window=100)
