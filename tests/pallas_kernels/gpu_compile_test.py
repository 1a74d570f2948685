"""The GPU kernels through the compiler, without a GPU: lowered always, compiled for Hopper where the CUDA plugin is.

pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt     (the versions of jax)
python -m pytest tests/pallas_kernels/gpu_compile_test.py -m '' -s     the whole matrix, with registers and spills
"""

import importlib.util
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from pallas_kernels.kernel_solve_gpu import kernel_solve

KERNELS = ("kernel_solve_gpu_forward", "kernel_solve_gpu_adjoint", "kernel_solve_gpu_query")

# What the compiler wants to know of the target: an H100, written by hand from its published limits.
H100 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda12") is None,
    reason="needs jax-cuda12-plugin",
)


def forward_and_backward(head_dim, dtype, *, strict=False, segmented=False, window=None, length=1024, sharding=None):
    """(function, argument shapes) of a solve and all of its gradients."""

    def run(query, key, rhs, coefficient, segment_ids, cotangent):
        def solve(*args):
            return kernel_solve(
                *args[:3],
                **{"beta" if strict else "ridge": args[3]},
                segment_ids=segment_ids if segmented else None,
                window=window,
            )

        u, vjp = jax.vjp(solve, query, key, rhs, coefficient)
        return u, vjp(cotangent)

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    x = (1, length, 2, head_dim)
    shapes = [array(x, dtype)] * 3 + [
        array(x[:3] if strict else x[2:3], jnp.float32),
        array(x[:2], jnp.int32),
        array(x, jnp.float32),
    ]
    return run, shapes


@pytest.mark.parametrize(
    "head_dim, dtype, options",
    [
        (64, jnp.bfloat16, {}),
        (128, jnp.float32, {"strict": True}),
        (48, jnp.float16, {"strict": True, "segmented": True, "window": 300, "length": 1000}),
        (256, jnp.bfloat16, {"segmented": True}),
    ],
)
def test_lowers_for_cuda(head_dim, dtype, options):
    run, shapes = forward_and_backward(head_dim, dtype, **options)
    # jax 0.11 asks for which device; 0.10 takes compute capability 9.0 where there is none.
    device = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"@(?:__gpu\$xla\.gpu\.triton|triton_kernel_call)", text)) == len(KERNELS)
    for name in KERNELS:
        assert f'name = "{name}"' in text


def compile_for_hopper(head_dim, dtype, dump, **options):
    """[(kernel, its PTX)] of a solve and its gradients; the compiler refuses a kernel that exceeds shared memory."""
    topology = topologies.get_topology_desc("", "cuda", target_config=H100, topology="1x1x1")
    run, shapes = forward_and_backward(head_dim, dtype, sharding=SingleDeviceSharding(topology.devices[0]), **options)
    jax.jit(run).lower(*shapes).compile(compiler_options={"xla_gpu_autotune_level": "0", "xla_dump_to": str(dump)})
    ptx = "".join(path.read_text() for path in dump.glob("*.ptx"))
    assert ".target sm_90a" in ptx
    entries = re.split(r"(?=\.visible \.entry )", ptx)
    found = {name: [e for e in entries if e.startswith(f".visible .entry {name}(")] for name in KERNELS}
    assert all(len(bodies) == 1 for bodies in found.values()), {name: len(bodies) for name, bodies in found.items()}
    return {name: bodies[0] for name, bodies in found.items()}


def check_ptx(bodies, dtype):
    for name in KERNELS[:2]:
        # Ticket, polls and publication order memory; u is never read through the cache that no other program updates.
        assert bodies[name].count("atom.global.gpu.acq_rel") == 5, name
        assert "ld.global.nc" not in bodies[name], name
        assert bodies[name].index("atom.global.gpu.acq_rel") < bodies[name].index("cp.async")
    for name, body in bodies.items():
        assert "wgmma.mma_async" in body, name
        if dtype == jnp.float32:
            # Three-term TF32: one product is never made of a single rounded one.
            assert body.count("f32.tf32.tf32") % 3 == 0, name


@needs_plugin
def test_compiles_for_hopper(tmp_path):
    check_ptx(compile_for_hopper(64, jnp.bfloat16, tmp_path), jnp.bfloat16)


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("strict", [False, True])
def test_compile_matrix(head_dim, dtype, strict, tmp_path):
    if head_dim == 256 and dtype == jnp.float32:
        with pytest.raises(NotImplementedError, match="head_dim"):
            compile_for_hopper(head_dim, dtype, tmp_path)
        return
    bodies = compile_for_hopper(head_dim, dtype, tmp_path, strict=strict, segmented=strict)
    check_ptx(bodies, dtype)
    if shutil.which("ptxas"):
        for path in tmp_path.glob("*.ptx"):
            if "kernel_solve" not in path.read_text():
                continue  # XLA's own, one of them empty
            report = subprocess.run(
                ["ptxas", "-v", "-arch=sm_90a", path, "-o", tmp_path / "cubin"],
                check=True,
                capture_output=True,
                text=True,
            ).stderr
            pattern = r"entry function '(kernel_solve\w*)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
            for name, spilled, registers in re.findall(pattern, report, re.S):
                print(
                    f"\n{name} K={head_dim} {jnp.dtype(dtype).name} {strict=}: {registers} registers, "
                    f"{spilled} bytes spilled",
                    end="",
                )
