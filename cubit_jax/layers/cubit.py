"""The Cubit mixer: kernel ridge regression over the tokens (arXiv 2605.06501)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from cubit_jax import ops
from cubit_jax.layers.common import at_least_float32, check_choice, record, records_diagnostics
from cubit_jax.layers.mixer import Cache, Mixer, Rows, write_cache
from cubit_jax.partitioning import per_shard

_MIN_NORM = 1e-6


def normalize_reference(r: jax.Array, scale: jax.Array) -> jax.Array:
    """max(gamma, 0) * r / max(||r||, 1e-6): r [B, L, H, K], scale gamma [H] -> the same shape and dtype as r.

    A gamma below 0 would make each diagonal entry the smallest of its row and the solution explode, hence the floor.
    The norm is clipped before the root is taken: the gradient at r = 0 is then 0 and not NaN.
    """
    wide = r.astype(at_least_float32(r.dtype))
    square = jnp.maximum(jnp.sum(jnp.square(wide), axis=-1, keepdims=True), _MIN_NORM**2)
    scale = jnp.maximum(scale, 0.0).astype(wide.dtype)[:, None]
    return (scale * wide * jax.lax.rsqrt(square)).astype(r.dtype)


def _rescaled(v, rescale):
    """The right-hand side s * v: v [B, L, H, K], rescale [B, L, H], at least float32, or None for s = 1."""
    return v if rescale is None else rescale[..., None] * v


class CubitMixer(Mixer):
    """o = A u with (P + lambda I) u = s * v; A is the attention of q and k (arXiv 2605.06501, eq. 13, appendix H).

    P is the row softmax of r_i . rn_j over the visible j, rn the reference embedding scaled to a learned norm. s is
    the Limited-Range Rescale, in (low, low + range). The cache holds k, u and rn (with reference="shared" k and u):
    u of a token depends only on the tokens before it, so that it never changes.

    Learned per head: reference_scale, log_ridge and, with the rescale, lrr_low and lrr_range.
    """

    lrr: bool = True  # Limited-Range Rescale; False is s = 1
    reference: str = "independent"  # r has its own projection | shared: r is k
    ridge_init: float = 1e-10
    lrr_low_init: float = 0.5
    lrr_range_init: float = 1.5
    reference_scale_init: float = 1.0

    def __post_init__(self):
        check_choice("reference", self.reference, ("independent", "shared"))
        if not self.ridge_init > 0:
            raise ValueError(f"ridge_init={self.ridge_init} must be above 0: it is learned as its logarithm")
        super().__post_init__()

    def cache_dtypes(self, dtype: Any) -> dict[str, Any]:
        # u can be a thousand times as large as v and is subtracted from: it stays float32.
        dtypes = {"k": dtype, "u": at_least_float32(dtype)}
        return dtypes if self.reference == "shared" else dtypes | {"rn": dtype}

    def expected_parameters(self, model_dim: int) -> int:
        projections = 5 if self.reference == "independent" else 4
        rescale = (model_dim + 2) * self.num_heads if self.lrr else 0
        return projections * model_dim * self.num_heads * self.head_dim + 2 * self.num_heads + rescale

    def multiply_adds(self, model_dim: int, seq_len: int) -> float:
        return 4 * self.attention_multiply_adds(seq_len)  # attention's two, and two of the solve

    @nn.compact
    def mix(self, x: jax.Array, rows: Rows, cache: Cache | None = None, prefill: bool = False):
        positions, segment_ids = rows
        q = self.rotate(self.project(x, "q_proj"), positions)
        k = self.rotate(self.project(x, "k_proj"), positions)
        v = self.project(x, "v_proj")
        # Rotation keeps norms, so the reference is rotated once and scaled afterwards.
        r = k if self.reference == "shared" else self.rotate(self.project(x, "r_proj"), positions)
        gamma = self._per_head("reference_scale", self.reference_scale_init)
        rn = normalize_reference(r, gamma)
        ridge = jnp.exp(self._per_head("log_ridge", math.log(self.ridge_init)).astype(at_least_float32(self.dtype)))
        rescale = self._rescale(x, rows) if self.lrr else None
        self._diagnose(r, rn, ridge, rows)

        if cache is None or prefill:
            o, u = per_shard(self._aggregate, "BLHK,BLHK,BLHK,BLHK,BLH,H,H,BL->BLHK,BLHK")(
                q, k, None if self.reference == "shared" else r, v, rescale, gamma, ridge, segment_ids
            )
            if cache is not None:
                shared = self.reference == "shared"
                new_cache = write_cache(cache, prefill, k=k, u=u, **({} if shared else {"rn": rn}))
        else:
            start = cache["length"]
            if self.reference == "shared":
                new_cache = write_cache(cache, prefill, k=k)
                references = normalize_reference(new_cache["k"], gamma)
            else:
                new_cache = write_cache(cache, prefill, k=k, rn=rn)
                references = new_cache["rn"]
            rhs = _rescaled(v, rescale)
            u = ops.kernel_solve_cached(r, references, cache["u"], rhs, start, ridge=ridge, window=self.window)
            new_cache |= write_cache(cache, prefill, u=u)
            o = ops.attention_cached(q, new_cache["k"], new_cache["u"], start, window=self.window)
        y = self.project_out(o, x.shape[-1])
        return y if cache is None else (y, new_cache)

    def _aggregate(self, q, k, r, v, rescale, gamma, ridge, segment_ids, layout=None):
        """o, u of one device's share. In one call: in training no float32 array of the size of v is exchanged."""
        options = {
            "segment_ids": segment_ids,
            "window": self.window,
            "implementation": self.implementation,
            "layout": layout,
        }
        r = k if r is None else r
        u = ops.kernel_solve(r, normalize_reference(r, gamma), _rescaled(v, rescale), ridge=ridge, **options)
        return ops.attention(q, k, u, **options), u

    def _per_head(self, name, value):
        return self.param(name, nn.initializers.constant(value), (self.num_heads,), self.param_dtype)

    def _rescale(self, x, rows):
        """s [B, L, H] in (low, low + range)."""
        low = self._per_head("lrr_low", self.lrr_low_init)
        span = self._per_head("lrr_range", self.lrr_range_init)
        rescale = low + span * nn.sigmoid(self.project_to_heads(x, "lrr_proj"))
        if records_diagnostics(self):
            real = rows.real[..., None]
            record(self, "rescale_min", jnp.min(rescale, where=real, initial=jnp.inf))
            record(self, "rescale_max", jnp.max(rescale, where=real, initial=-jnp.inf))
        return rescale

    def _diagnose(self, r, rn, ridge, rows):
        """Records what tells whether the solve is healthy: the ridge and the smallest diagonal of the system."""
        if not records_diagnostics(self):
            return
        record(self, "ridge_min", jnp.min(ridge))
        record(self, "ridge_max", jnp.max(ridge))
        diagonal = per_shard(
            lambda r, rn, ridge, segment_ids, layout=None: ops.system_diagonal(
                r, rn, ridge, segment_ids=segment_ids, window=self.window, scale=1.0, layout=layout
            ),
            "BLHK,BLHK,H,BL->BLH",
        )(r, rn, ridge, rows.segment_ids)
        record(self, "diagonal_min", jnp.min(diagonal, where=rows.real[..., None], initial=jnp.inf))
