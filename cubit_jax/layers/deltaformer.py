"""The DeltaFormer mixer: the delta rule in the kernel's feature space (arXiv 2505.19488)."""

from typing import Any

import jax
from flax import linen as nn

from cubit_jax import ops
from cubit_jax.layers.common import at_least_float32, check_choice
from cubit_jax.layers.mixer import Cache, Mixer, Rows, write_cache
from cubit_jax.partitioning import per_shard


class DeltaFormerMixer(Mixer):
    """o = A u with u_i = v_i - beta_i sum_{j<i} P_ij u_j, where A is the attention of q and k (arXiv 2505.19488).

    P is the row softmax of w_i . k_j / sqrt K over the visible j < i; beta is linear in x, one per head, not squashed.
    The cache holds k and u.
    """

    projection: str = "own"  # w has its own projection | shared: w is k

    def __post_init__(self):
        check_choice("projection", self.projection, ("own", "shared"))
        super().__post_init__()

    def cache_dtypes(self, dtype: Any) -> dict[str, Any]:
        return {"k": dtype, "u": at_least_float32(dtype)}

    def expected_parameters(self, model_dim: int) -> int:
        projections = 5 if self.projection == "own" else 4
        return projections * model_dim * self.num_heads * self.head_dim + (model_dim + 1) * self.num_heads

    def multiply_adds(self, model_dim: int, seq_len: int) -> float:
        return 4 * self.attention_multiply_adds(seq_len)  # attention's two, and two of the solve

    @nn.compact
    def mix(self, x: jax.Array, rows: Rows, cache: Cache | None = None, prefill: bool = False):
        positions, segment_ids = rows
        q = self.rotate(self.project(x, "q_proj"), positions)
        k = self.rotate(self.project(x, "k_proj"), positions)
        v = self.project(x, "v_proj")
        w = k if self.projection == "shared" else self.rotate(self.project(x, "w_proj"), positions)
        # Beyond -1..1 beta lets u grow along the row: it starts mostly inside.
        init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        beta = self.project_to_heads(x, "beta_proj", use_bias=True, init=init)

        if cache is None or prefill:
            o, u = per_shard(self._aggregate, "BLHK,BLHK,BLHK,BLHK,BLH,BL->BLHK,BLHK")(
                q, k, None if self.projection == "shared" else w, v, beta, segment_ids
            )
            if cache is not None:
                new_cache = write_cache(cache, prefill, k=k, u=u)
        else:
            start = cache["length"]
            new_cache = write_cache(cache, prefill, k=k)
            u = ops.kernel_solve_cached(
                w, new_cache["k"], cache["u"], v, start, beta=beta, window=self.window, scale=self.head_dim**-0.5
            )
            new_cache |= write_cache(cache, prefill, u=u)
            o = ops.attention_cached(q, new_cache["k"], new_cache["u"], start, window=self.window)
        y = self.project_out(o, x.shape[-1])
        return y if cache is None else (y, new_cache)

    def _aggregate(self, q, k, w, v, beta, segment_ids, layout=None):
        """o, u of one device's share. In one call: in training u does not leave the layout they work in."""
        options = {
            "segment_ids": segment_ids,
            "window": self.window,
            "implementation": self.implementation,
            "layout": layout,
        }
        u = ops.kernel_solve(k if w is None else w, k, v, beta=beta, scale=self.head_dim**-0.5, **options)
        return ops.attention(q, k, u, **options), u
