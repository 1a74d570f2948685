"""Pure functions of arrays: the mathematics of every mixer and energy, without Flax, a config or a mesh.

The dimensions of arrays have the same letters everywhere: B batch, L length, H heads, K head dimension, V value
dimension (of the model also its vocabulary), D model width, F MLP width, R rank, C rows and columns of a tile, N tiles,
M capacity of a decode cache. Arrays are sequence-first, [B, L, H, K], as in jax.nn.dot_product_attention. Scores are
what the softmax is taken of, weights its result, the system what is solved, the ridge its regulariser.
"""

from cubit_jax.ops.attention import attention
from cubit_jax.ops.context_parallel.layout import Layout
from cubit_jax.ops.decode import attention_cached, kernel_solve_cached, write_cache
from cubit_jax.ops.energy import descent_direction, elementwise_energy, interaction_energy
from cubit_jax.ops.energy_step import (
    elementwise_gate,
    elementwise_step,
    elementwise_step_from_gate,
    interaction_keys,
    interaction_step,
    interaction_step_cached,
    interaction_step_from_keys,
    minimize,
    precondition,
    preconditioner_margin,
)
from cubit_jax.ops.kernel_solve import kernel_solve, system_diagonal
from cubit_jax.ops.rotary import rotary

__all__ = [
    "Layout",
    "attention",
    "attention_cached",
    "descent_direction",
    "elementwise_energy",
    "elementwise_gate",
    "elementwise_step",
    "elementwise_step_from_gate",
    "interaction_energy",
    "interaction_keys",
    "interaction_step",
    "interaction_step_cached",
    "interaction_step_from_keys",
    "kernel_solve",
    "kernel_solve_cached",
    "minimize",
    "precondition",
    "preconditioner_margin",
    "rotary",
    "system_diagonal",
    "write_cache",
]
