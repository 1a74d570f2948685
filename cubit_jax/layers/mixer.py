"""The base class of token mixers: fields, projections, rotary embedding, attention, the decode cache."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from cubit_jax import ops
from cubit_jax.layers.common import Layer, at_least_float32, kernel_init
from cubit_jax.partitioning import constrain, per_shard

Cache = dict[str, jax.Array]


class Rows(NamedTuple):
    """Where the tokens of a batch stand.

    Attributes:
      positions: int32 [B, L], counted from 0 in each document; rotary embedding turns by it.
      segment_ids: int32 [B, L], the document of each token, 0 is padding; None: one document per row.
    """

    positions: jax.Array
    segment_ids: jax.Array | None = None

    @property
    def real(self) -> jax.Array:
        """bool [B, L]: False for padding."""
        return jnp.ones_like(self.positions, bool) if self.segment_ids is None else self.segment_ids != 0


def token_positions(x: jax.Array, positions: jax.Array | None, cache: Cache | None, prefill: bool) -> jax.Array:
    """int32 [B, L]: as given, or counted from 0, or from the length of each row of a cache that is appended to.

    x: tokens [B, L] or activations [B, L, D].
    """
    if positions is not None:
        return positions
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    return positions if cache is None or prefill else positions + cache["length"][:, None]


class Mixer(Layer):
    """A token mixer. A subclass defines `mix`, and says what it keeps for decoding in `cache_dtypes`, if it can decode.

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

    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: Cache | None = None,
        prefill: bool = False,
    ) -> jax.Array | tuple[jax.Array, Cache]:
        """The update [B, L, D] of x [B, L, D]; with a cache the pair (update, new cache)."""
        rows = Rows(token_positions(x, positions, cache, prefill), segment_ids)
        return self.mix(x, rows) if cache is None else self.mix(x, rows, cache, prefill)

    def mix(self, x: jax.Array, rows: Rows, cache: Cache | None = None, prefill: bool = False):
        """What `__call__` returns. A mixer without a cache needs the first two arguments alone."""
        raise NotImplementedError(f"{type(self).__name__} must define mix(x, rows)")

    def cache_dtypes(self, dtype: Any) -> dict[str, Any] | None:
        """{name: dtype} of the arrays [B, max_len, H, K] that decoding keeps; None: the mixer cannot decode.

        dtype: of the activations.
        """
        return None

    def init_cache(self, batch: int, max_len: int, dtype: Any, model_dim: int | None = None) -> Cache | None:
        """Empty arrays for `batch` rows of at most `max_len` tokens; None: the mixer cannot decode.

        The length of the rows is not among them: the model keeps it once. model_dim: D, for a mixer that keeps its
        input.
        """
        dtypes = self.cache_dtypes(dtype)
        shape = (batch, max_len, self.num_heads, self.head_dim)
        return None if dtypes is None else {name: jnp.zeros(shape, kind) for name, kind in dtypes.items()}

    def attention_multiply_adds(self, seq_len: int) -> float:
        """Multiply-adds a token of one product with a causal [L, L] matrix: K columns a head."""
        columns = seq_len / 2 if self.window is None else min(self.window, seq_len / 2)
        return columns * self.num_heads * self.head_dim

    def project(self, x: jax.Array, name: str) -> jax.Array:
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

    def project_to_heads(self, x: jax.Array, name: str, use_bias: bool = False, init=kernel_init) -> jax.Array:
        """[B, L, D] -> [B, L, H], one number per head, at least float32 because the solve reads it."""
        dtype = at_least_float32(self.dtype)
        return nn.Dense(
            self.num_heads, use_bias=use_bias, dtype=dtype, param_dtype=self.param_dtype, kernel_init=init, name=name
        )(x)

    def project_out(self, o: jax.Array, model_dim: int) -> jax.Array:
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

    def rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotary embedding of x [B, L, H, K] at positions [B, L]."""
        return ops.rotary(x, positions, self.rope_theta)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """Softmax attention of whole rows on each device's share of batch and heads; the dtype of q."""
        return per_shard(
            lambda q, k, v, segment_ids, layout=None: ops.attention(
                q, k, v, segment_ids=segment_ids, window=self.window, implementation=self.implementation, layout=layout
            ),
            "BLHK,BLHK,BLHK,BL->BLHK",
        )(q, k, v, segment_ids)


def write_cache(cache: Cache, prefill: bool, **new: jax.Array) -> Cache:
    """The arrays of `cache` named in `new` with `new` [B, n, ...] written at the end of each row."""
    start = jnp.zeros_like(cache["length"]) if prefill else cache["length"]
    return {name: ops.write_cache(cache[name], value, start) for name, value in new.items()}
