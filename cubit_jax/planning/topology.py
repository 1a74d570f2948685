"""Devices of a machine that is not there, to compile for: slices of TPUs by libtpu, GPUs by JAX's CUDA plugin."""

import contextlib
import dataclasses
import importlib.metadata
import os
import re

import jax
from jax.experimental import topologies

from cubit_jax.runtime.devices import DEVICES, quiet_libtpu
from cubit_jax.runtime.errors import UserError

GIB = 2**30
_GPUS_PER_HOST = 8
KNOWN = (
    "v5e:2x4, 4x4, 4x8, 8x8, 8x16, 16x16; v6e: the same; v5p:2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, 4x4x8, 4x8x8, "
    "8x8x8; v4: the same as v5p; tpu7x:2x2x1, 2x2x2, 2x2x4, 4x4x4; gpu:a100x8, gpu:h100x8, gpu:h200x8 (x16, x24: "
    "of several hosts)"
)


@dataclasses.dataclass(frozen=True)
class Topology:
    """platform: "tpu" or "gpu". memory: bytes of one device that a program may use. compiler: name and version."""

    name: str
    platform: str
    devices: list[jax.Device]
    memory: int
    compiler: str

    def group(self, device: jax.Device) -> int:
        """Which slice a TPU belongs to, or which host a GPU: between them the network is slow."""
        return device.process_index if self.platform == "gpu" else getattr(device, "slice_index", 0)


def prepare() -> None:
    """Keeps JAX on the CPU and libtpu from looking for TPUs; before JAX or libtpu look at the environment."""
    jax.config.update("jax_platforms", "cpu")
    quiet_libtpu()


def open_topology(name: str, num_slices: int = 1) -> Topology:
    """The Topology of a name such as "v5e:16x16" or "gpu:h100x8", num_slices times.

    Raises UserError in one line: the name is unknown, or what compiles for it is not installed.
    """
    if num_slices < 1:
        raise UserError(f"--num_slices={num_slices} must be at least 1")
    chip, colon, shape = name.partition(":")
    if chip == "gpu" and colon:
        return _gpus(name, shape, num_slices)
    device = DEVICES.get(chip)
    if device is None or device.gpu or device.memory is None or not re.fullmatch(r"\d+(x\d+)+", shape):
        raise UserError(f"--topology={name} is not known: known are {KNOWN}")
    try:
        version = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "the compiler for TPUs, libtpu, is not installed: pip install -e '.[test]' or 'jax[tpu]'; "
            "neither needs a TPU"
        ) from None
    try:
        devices = topologies.get_topology_desc(topology_name=name, platform="tpu", num_slices=num_slices).devices
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"--topology={name} is not one that libtpu {version} has: {_first_line(error)}; known are {KNOWN}"
        ) from error
    return Topology(name, "tpu", devices, int(device.memory * GIB), f"libtpu {version}")


def _gpus(name, shape, num_slices):
    model, _, count = shape.rpartition("x")
    device = DEVICES.get(model)
    if device is None or device.gpu is None or not count.isdigit() or not int(count):
        raise UserError(f"--topology={name} is not known: known are {KNOWN}")
    count = int(count)
    if count > _GPUS_PER_HOST and count % _GPUS_PER_HOST:
        raise UserError(f"--topology={name}: {count} GPUs are no multiple of the {_GPUS_PER_HOST} of a host")
    if num_slices > 1:
        raise UserError(f"--num_slices={num_slices} is for TPUs: gpu:{model}x{count * num_slices} is several hosts")
    plugin = _cuda_plugin()
    # Kernels cannot be timed to choose among them. Read when JAX first looks for devices, which it has not done yet.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    hosts = max(1, count // _GPUS_PER_HOST)
    gpu, (major, minor) = device.gpu, device.gpu.compute_capability
    feature = " feature_extension: ACCELERATED_FEATURES" if major == 9 else ""
    target = f"""gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
        shared_memory_per_core: {gpu.shared_memory + 1024} threads_per_core_limit: 2048
        core_count: {gpu.cores} fpus_per_core: 128
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        memory_bandwidth: {int(gpu.bandwidth)} l2_cache_size: {gpu.cache * 2**20} clock_rate_ghz: {gpu.clock}
        device_memory_size: {int(device.memory * GIB)} shared_memory_per_block_optin: {gpu.shared_memory}
        cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}
        registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} runtime_version {{ major: 12 minor: 9 }}
        device_description_str: "{device.kinds[0]}" """
    try:
        devices = topologies.get_topology_desc(
            "", "cuda", target_config=target, topology=f"1x{hosts}x{count // hosts}"
        ).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as error:
        raise UserError(f"--topology={name}: {plugin} cannot compile for it: {_first_line(error)}") from error
    share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))  # what JAX takes of a GPU
    return Topology(name, "gpu", devices, int(device.memory * GIB * share), plugin)


def _cuda_plugin():
    for name in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    raise UserError(
        "the compiler for NVIDIA GPUs, JAX's CUDA plugin, is not installed: pip install -e '.[gpu]'; it needs no GPU"
    )


def _first_line(error):
    return str(error).strip().splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
