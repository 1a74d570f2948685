"""What the layers share: projections, the fields every mixer has, writing a cache, diagnostics."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from cubit_jax import ops
from cubit_jax.partitioning import constrain, per_shard

# The standard deviation is 1/sqrt(fan in), so a normalised input gives queries, keys and references of variance one at
# every width. For Cubit this is also what keeps the diagonal of the system away from zero at the start of training.
kernel_init = nn.initializers.lecun_normal()


def record(module, name, value):
    """Sows `value` into the "diagnostics" collection: one array a layer, the last call wins."""
    module.sow("diagnostics", name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)


def records_diagnostics(module):
    """True when the caller asked for diagnostics; computing them only then makes them free otherwise."""
    return module.is_mutable_collection("diagnostics") and not module.is_initializing()


class Mixer(nn.Module):
    """The fields and steps that every token mixer has; a subclass says what is aggregated.

    Input and output are [B, L, D]. positions and segment_ids are int32 [B, L] or None (counting from 0, one segment);
    segment 0 is padding.

    With a cache, of which every row holds cache["length"] tokens, the call returns (output, new cache): prefill=True
    says that every row is empty, so that the parallel form runs; otherwise the L tokens are appended to each row.
    The new cache has the arrays of `init_cache`; counting its tokens is the model's part.
    """

    num_heads: int
    head_dim: int
    window: int | None = None  # sliding window in tokens; None sees everything
    rope_theta: float = 10_000.0
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    implementation: str | None = None  # of the ops: None | reference | xla | pallas

    def cache_dtypes(self, dtype):
        """{name: dtype} of the arrays [B, max_len, H, K] that decoding keeps."""
        raise NotImplementedError(f"{type(self).__name__} must say what it keeps for decoding")

    def init_cache(self, batch, max_len, dtype, model_dim=None):
        """Empty arrays for `batch` rows of at most `max_len` tokens, without the length, which the model keeps once.

        model_dim: D, for a mixer that keeps its input.
        """
        shape = (batch, max_len, self.num_heads, self.head_dim)
        return {name: jnp.zeros(shape, kind) for name, kind in self.cache_dtypes(dtype).items()}

    def project(self, x, name):
        """[B, L, D] -> [B, L, H, K]."""
        heads = nn.DenseGeneral(
            (self.num_heads, self.head_dim),
            use_bias=False,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=kernel_init,
            name=name,
        )(x)
        return constrain(heads, "BLHK")

    def project_to_heads(self, x, name, use_bias=False, init=kernel_init):
        """[B, L, D] -> [B, L, H], one number a head, at least float32 because the solve reads it."""
        dtype = at_least_float32(self.dtype)
        return nn.Dense(
            self.num_heads, use_bias=use_bias, dtype=dtype, param_dtype=self.param_dtype, kernel_init=init, name=name
        )(x)

    def project_out(self, o, model_dim):
        """[B, L, H, K] -> [B, L, D]."""
        return nn.DenseGeneral(
            model_dim,
            axis=(-2, -1),
            use_bias=False,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=kernel_init,
            name="o_proj",
        )(o)

    def rotate(self, x, positions):
        return ops.rotary(x, positions, self.rope_theta)

    def attend(self, q, k, v, segment_ids):
        """Softmax attention of whole rows on each device's share of batch and heads; the dtype of q."""
        return per_shard(
            lambda q, k, v, segment_ids, layout=None: ops.attention(
                q, k, v, segment_ids=segment_ids, window=self.window, implementation=self.implementation, layout=layout
            ),
            "BLHK,BLHK,BLHK,BL->BLHK",
        )(q, k, v, segment_ids)


def token_positions(x, positions, cache, prefill):
    """int32 [B, L]: as given, or counted from 0, or from the length of each row of a cache that is appended to."""
    if positions is not None:
        return positions
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    return positions if cache is None or prefill else positions + cache["length"][:, None]


def write_cache(cache, prefill, **new):
    """The arrays of `cache` named in `new` with `new` [B, n, ...] written at the end of each row."""
    start = jnp.zeros_like(cache["length"]) if prefill else cache["length"]
    return {name: ops.write_cache(cache[name], value, start) for name, value in new.items()}


def at_least_float32(dtype):
    return jnp.promote_types(dtype, jnp.float32)
