"""Pure functions of arrays."""

from cubit_jax.ops.attention import attention
from cubit_jax.ops.kernel_solve import kernel_solve
from cubit_jax.ops.rotary import rotary

__all__ = ["attention", "kernel_solve", "rotary"]
