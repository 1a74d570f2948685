"""The device mesh, where every parameter lives on it, and how layers run an op on each device's share."""

from cubit_jax.partitioning.mesh import (
    AXES,
    BATCH_AXES,
    batch_sharding,
    check,
    make_mesh,
    mesh_sizes,
    process_share,
    put_batch,
)
from cubit_jax.partitioning.parameters import RULES, parameter_spec, state_shardings
from cubit_jax.partitioning.shards import constrain, per_shard

__all__ = [
    "AXES",
    "BATCH_AXES",
    "RULES",
    "batch_sharding",
    "check",
    "constrain",
    "make_mesh",
    "mesh_sizes",
    "parameter_spec",
    "per_shard",
    "process_share",
    "put_batch",
    "state_shardings",
]
