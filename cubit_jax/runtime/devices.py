"""Facts about accelerators, in one table: what a plan compiles for and what utilisation is measured against."""

import dataclasses
import glob
import os


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What XLA's compiler for GPUs chooses by, from the data sheets.

    cores: streaming multiprocessors. shared_memory: bytes that a block of threads may have. bandwidth: of the memory,
    bytes/s. clock: GHz. cache: L2, MiB.
    """

    compute_capability: tuple[int, int]
    cores: int
    shared_memory: int
    bandwidth: float
    clock: float
    cache: int


@dataclasses.dataclass(frozen=True)
class Device:
    """One device as JAX counts them.

    kinds: values of `jax.Device.device_kind`; the first is the one that JAX has today. flops: dense bfloat16 FLOP/s,
    from the data sheet. memory: GiB; of a TPU what its compiler lets one program use, the limit that its message names
    when it runs out; None where nothing here compiles for it.
    """

    kinds: tuple[str, ...]
    flops: float
    memory: float | None = None
    gpu: Gpu | None = None


DEVICES = {
    "v4": Device(("TPU v4",), 275e12, 15.25),
    "v5e": Device(("TPU v5 lite", "TPU v5e"), 197e12, 15.75),
    "v5p": Device(("TPU v5", "TPU v5p"), 459e12, 95.74),
    "v6e": Device(("TPU v6 lite", "TPU v6e"), 918e12, 31.25),
    "tpu7x": Device(("TPU7x",), 2307e12 / 2, 94.75),  # JAX sees a chip's two cores
    "a100": Device(
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB PCIe"),
        312e12,
        79.2,
        Gpu((8, 0), 108, 166_912, 2.04e12, 1.41, 40),
    ),
    "h100": Device(("NVIDIA H100 80GB HBM3",), 989e12, 79.1, Gpu((9, 0), 132, 232_448, 3.35e12, 1.98, 50)),
    "h100 pcie": Device(("NVIDIA H100 PCIe",), 756e12),
    "h200": Device(("NVIDIA H200",), 989e12, 139.8, Gpu((9, 0), 132, 232_448, 4.8e12, 1.98, 50)),
    "b200": Device(("NVIDIA B200",), 2250e12),
}


def peak_flops(kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device by its `jax.Device.device_kind`; None where it is not known."""
    return next((device.flops for device in DEVICES.values() if kind in device.kinds), None)


def has_tpu() -> bool:
    """Whether this machine has the device files of a TPU."""
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))


def quiet_libtpu() -> None:
    """Keeps libtpu, where it is installed, from asking the network about a TPU that is not there, and from warnings.

    To be called before JAX looks for devices, and not on a machine with a TPU: what is set here describes none.
    """
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_MIN_LOG_LEVEL": "4",
        "TPU_STDERR_LOG_LEVEL": "4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    }.items():
        os.environ.setdefault(name, value)
