"""The gated MLP of Llama."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from cubit_jax.layers.common import Layer, kernel_init
from cubit_jax.partitioning import constrain


class GatedMLP(Layer):
    """SwiGLU: W_down (silu(W_gate x) * W_up x), [B, L, D] -> [B, L, D] (arXiv 2002.05202)."""

    mlp_dim: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def expected_parameters(self, model_dim: int) -> int:
        return 3 * model_dim * self.mlp_dim

    def multiply_adds(self, model_dim: int, seq_len: int) -> float:
        return 0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def dense(features, name):
            return nn.Dense(
                features,
                use_bias=False,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                kernel_init=kernel_init,
                name=name,
            )

        hidden = nn.silu(dense(self.mlp_dim, "gate_proj")(x)) * dense(self.mlp_dim, "up_proj")(x)
        return dense(x.shape[-1], "down_proj")(constrain(hidden, "BLF"))
