"""Softmax attention: Nadaraya-Watson regression of the values on the keys."""

from flax import linen as nn

from cubit_jax import ops
from cubit_jax.layers.common import Mixer, token_positions, write_cache


class Attention(Mixer):
    """Multi-head softmax attention with rotary embedding, as in Llama; the cache holds k and v."""

    def cache_dtypes(self, dtype):
        return {"k": dtype, "v": dtype}

    def expected_parameters(self, model_dim):
        """The number of parameters in closed form."""
        return 4 * model_dim * self.num_heads * self.head_dim

    @nn.compact
    def __call__(self, x, *, positions=None, segment_ids=None, cache=None, prefill=False):
        positions = token_positions(x, positions, cache, prefill)
        q = self.rotate(self.project(x, "q_proj"), positions)
        k = self.rotate(self.project(x, "k_proj"), positions)
        v = self.project(x, "v_proj")
        if cache is not None:
            new_cache = write_cache(cache, prefill, k=k, v=v)
        if cache is None or prefill:
            o = self.attend(q, k, v, segment_ids)
        else:
            o = ops.attention_cached(q, new_cache["k"], new_cache["v"], cache["length"], window=self.window)
        y = self.project_out(o, x.shape[-1])
        return y if cache is None else (y, new_cache)
