"""Softmax attention: Nadaraya-Watson regression of the values on the keys."""

from typing import Any

import jax
from flax import linen as nn

from cubit_jax import ops
from cubit_jax.layers.mixer import Cache, Mixer, Rows, write_cache


class Attention(Mixer):
    """Multi-head softmax attention with rotary embedding, as in Llama; the cache holds k and v."""

    def cache_dtypes(self, dtype: Any) -> dict[str, Any]:
        return {"k": dtype, "v": dtype}

    def expected_parameters(self, model_dim: int) -> int:
        return 4 * model_dim * self.num_heads * self.head_dim

    def multiply_adds(self, model_dim: int, seq_len: int) -> float:
        return 2 * self.attention_multiply_adds(seq_len)  # scores, and weights times values

    @nn.compact
    def mix(self, x: jax.Array, rows: Rows, cache: Cache | None = None, prefill: bool = False):
        q = self.rotate(self.project(x, "q_proj"), rows.positions)
        k = self.rotate(self.project(x, "k_proj"), rows.positions)
        v = self.project(x, "v_proj")
        if cache is not None:
            new_cache = write_cache(cache, prefill, k=k, v=v)
        if cache is None or prefill:
            o = self.attend(q, k, v, rows.segment_ids)
        else:
            o = ops.attention_cached(q, new_cache["k"], new_cache["v"], cache["length"], window=self.window)
        y = self.project_out(o, x.shape[-1])
        return y if cache is None else (y, new_cache)
