"""The device mesh: its axes and sizes, which rows of a batch each process and device holds.

A mesh has five axes: replica (across slices: gradients only), data, fsdp (batch, and parameters sharded), tensor
(heads, MLP width, vocabulary) and context (sequence).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cubit_jax.ops.context_parallel.layout import Layout, choose_head_shares

AXES = ("replica", "data", "fsdp", "tensor", "context")
BATCH_AXES = ("replica", "data", "fsdp")


def mesh_sizes(sizes: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Sizes of the mesh axes for a number of devices.

    Args:
      sizes: mapping from every name in AXES to its size; at most one may be -1, "whatever is left".
      num_devices: how many devices the mesh must cover.

    Returns:
      dict of axis name -> size, in the order of AXES.

    Raises:
      ValueError: unknown axis, a size below 1, two sizes of -1, or sizes whose product is not the number of devices.
    """
    for name in sizes:
        if name not in AXES:
            raise ValueError(f"unknown mesh axis {name!r}: the axes are {', '.join(AXES)}")
    result = {name: int(sizes.get(name, 1)) for name in AXES}
    for name, size in result.items():
        if size < 1 and size != -1:
            raise ValueError(f"mesh.{name}={size} must be a positive number, or -1 for what is left")
    free = [name for name, size in result.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"mesh.{free[0]} and mesh.{free[1]} are both -1: only one can take what is left")
    fixed = math.prod(size for size in result.values() if size != -1)
    if free:
        if num_devices % fixed:
            raise ValueError(f"the fixed mesh sizes multiply to {fixed}, which does not divide {num_devices} devices")
        result[free[0]] = num_devices // fixed
    elif fixed != num_devices:
        raise ValueError(f"the mesh sizes multiply to {fixed}, but there are {num_devices} devices")
    return result


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of these sizes (see mesh_sizes) over all devices, or over those given. Use it with `jax.set_mesh`.

    Devices of several slices (groups with a slow network between them: TPU slices, GPU hosts): the slices are dealt to
    the outermost batch axes, replica first, so that tensor, context and, where the sizes allow it, fsdp stay inside
    one.

    Raises:
      ValueError: from mesh_sizes, or the slices cannot be dealt to the batch axes.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(sizes, len(devices))
    # Explicit axes, JAX's default, would make every Dense layer state the sharding of its result.
    axis_types = (AxisType.Auto,) * len(AXES)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=axis_types, devices=devices)
    inside, across = dict(sizes), dict.fromkeys(AXES, 1)
    for axis in BATCH_AXES:
        across[axis] = math.gcd(sizes[axis], slices // math.prod(across.values()))
        inside[axis] //= across[axis]
    if math.prod(across.values()) != slices:
        raise ValueError(
            f"{slices} slices cannot be dealt to mesh replica x data x fsdp = "
            f"{' x '.join(str(sizes[axis]) for axis in BATCH_AXES)}: set mesh.replica={slices}"
        )
    layout = mesh_utils.create_hybrid_device_mesh(
        tuple(inside.values()), tuple(across.values()), devices=devices, allow_split_physical_axes=True
    )
    return Mesh(layout, AXES, axis_types=axis_types)


def check(mesh: Mesh, *, batch_size: int, accumulation_steps: int, model: Any) -> None:
    """Raises ValueError naming the two numbers where a size of the run is no multiple of the mesh axis that splits it.

    Args:
      mesh: the device mesh.
      batch_size: rows per step over all devices. accumulation_steps: how many micro-batches they are cut into.
      model: has num_heads, mlp_dim, vocab_size, model_dim, mixers, seq_len.
    """
    rows = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if batch_size % (accumulation_steps * rows):
        raise ValueError(
            f"batch_size={batch_size} must be a multiple of {accumulation_steps * rows} = "
            f"accumulation_steps={accumulation_steps} x {rows} devices sharing the batch (mesh replica, data, fsdp)"
        )
    split = {"num_heads": "tensor", "mlp_dim": "tensor", "vocab_size": "tensor", "model_dim": "fsdp"}
    for field, axis in split.items():
        size = getattr(model, field)
        if size % mesh.shape[axis]:
            raise ValueError(f"model.{field}={size} must be a multiple of mesh.{axis}={mesh.shape[axis]}")
    # The diagonal of Causal Energy Minimization may be shared by the heads, so that devices share its rows alone.
    heads = 1 if "cem" in model.mixers else model.num_heads // mesh.shape["tensor"]
    Layout("context", mesh.shape["context"], choose_head_shares(mesh.shape["context"], heads), model.seq_len)


def batch_sharding(mesh: Mesh, ndim: int = 2) -> NamedSharding:
    """Of arrays [B, L, ...]: rows over every batch axis, the sequence over context."""
    return NamedSharding(mesh, P(BATCH_AXES, "context", *(None,) * (ndim - 2)))


def process_share(mesh: Mesh) -> tuple[int, int]:
    """(index, count): this process reads part `index` of `count` equal parts of a batch's rows.

    Processes that hold parts of the same rows (a tensor or context axis across hosts) have the same index.

    Raises:
      ValueError: the parts of two processes overlap without being the same.
    """
    rows = mesh.devices.reshape(math.prod(mesh.shape[axis] for axis in BATCH_AXES), -1)
    held = {}
    for row, devices in enumerate(rows):
        for device in devices:
            held.setdefault(device.process_index, set()).add(row)
    parts = sorted({tuple(sorted(rows)) for rows in held.values()})
    if sum(map(len, parts)) != len(rows):
        raise ValueError(
            f"the rows of {len(held)} processes overlap: mesh.tensor x mesh.context must divide the "
            "devices of a process, or be a multiple of them"
        )
    return parts.index(tuple(sorted(held[jax.process_index()]))), len(parts)


def put_batch(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """The global batch on the devices, from this process's rows (see process_share) as a dict of arrays [b, L]."""
    sharding, (_, count) = batch_sharding(mesh), process_share(mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, array, (count * len(array), *array.shape[1:]))
        for name, array in batch.items()
    }
