"""Causal Energy Minimization: layers that take gradient steps on conditional energies (arXiv 2605.07588)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from cubit_jax import ops
from cubit_jax.layers.common import check_choice
from cubit_jax.layers.descent import PRECONDITIONERS, Descent
from cubit_jax.layers.mixer import Cache, Mixer, Rows, write_cache
from cubit_jax.layers.mlp import GatedMLP
from cubit_jax.ops.potential import ACTIVATIONS, lookup
from cubit_jax.partitioning import constrain, per_shard

__all__ = ["CEMMLP", "INTERACTIONS", "PRECONDITIONERS", "CEMAttention"]

INTERACTIONS = ("lowrank", "diagonal", "shared_diagonal")

# Small beside the low-rank scores: these are near 1, the diagonal's near 0.02 sqrt(D / K).
_DIAGONAL_SCALE = 0.02


class CEMAttention(Descent, Mixer):
    """Descent on the interaction energy: attention with tied weights, two matrices where attention has four.

    A head's bilinear form is W_q^T W_k (lowrank), plus diag(d) of its own (diagonal) or of all heads (shared_diagonal,
    the paper's best). Keys come from h, once for all steps; the cache holds k, and h where a diagonal reads it.
    """

    interaction: str = "shared_diagonal"  # lowrank | diagonal | shared_diagonal

    def __post_init__(self):
        check_choice("interaction", self.interaction, INTERACTIONS)
        super().__post_init__()

    def init_cache(self, batch: int, max_len: int, dtype: Any, model_dim: int | None = None) -> Cache:
        """Empty arrays; model_dim is needed where the cache holds h."""
        shape = (batch, max_len, self.num_heads, self.head_dim)
        cache = {"k": jnp.zeros(shape, dtype)}
        if self.interaction == "lowrank":
            return cache
        if model_dim is None:
            raise ValueError(f"interaction={self.interaction!r} keeps its input in the cache: give model_dim")
        return cache | {"h": jnp.zeros((batch, max_len, model_dim), dtype)}

    def expected_parameters(self, model_dim: int) -> int:
        diagonals = {"lowrank": 0, "diagonal": self.num_heads, "shared_diagonal": 1}[self.interaction]
        return model_dim * (2 * self.num_heads * self.head_dim + diagonals) + self.descent_parameters(model_dim)

    def multiply_adds(self, model_dim: int, seq_len: int) -> float:
        # Each step uses the query projection twice, and two products with a causal matrix.
        projections = (2 * self.num_recursions - 1) * model_dim * self.num_heads * self.head_dim
        return projections + 2 * self.num_recursions * self.attention_multiply_adds(seq_len)

    @nn.compact
    def mix(self, x: jax.Array, rows: Rows, cache: Cache | None = None, prefill: bool = False):
        positions, segment_ids = rows
        x = x.astype(self.dtype)
        shape = (x.shape[-1], self.num_heads, self.head_dim)
        w_q, w_k = (Kernel(shape, self.param_dtype, name=name)() for name in ("q_proj", "k_proj"))
        diag = self._diagonal(x.shape[-1])
        keys = constrain(ops.interaction_keys(x, w_k, positions=positions, theta=self.rope_theta), "BLHK")
        if cache is not None:
            new_cache = write_cache(cache, prefill, k=keys, **({} if diag is None else {"h": x}))
        if cache is None or prefill:
            heads = "D" if self.interaction == "shared_diagonal" else "HD"
            whole_rows = per_shard(self._step, f"BLD,BLD,BLHK,DHK,{heads},BL,BL->BLD")

            def step(state):
                return whole_rows(state, None if diag is None else x, keys, w_q, diag, positions, segment_ids)
        else:

            def step(state):
                return ops.interaction_step_cached(
                    state,
                    new_cache.get("h"),
                    new_cache["k"],
                    w_q,
                    diag,
                    cache["length"],
                    positions=positions,
                    theta=self.rope_theta,
                    window=self.window,
                )

        def energy(state):
            return ops.interaction_energy(
                state,
                x,
                w_q,
                w_k,
                diag,
                positions=positions,
                theta=self.rope_theta,
                segment_ids=segment_ids,
                window=self.window,
            )

        y = self.descend(step, x, energy if cache is None else None, rows.real)
        return y if cache is None else (y, new_cache)

    def _step(self, state, x, keys, w_q, diag, positions, segment_ids, layout=None):
        """One device's share of a step."""
        return ops.interaction_step_from_keys(
            state,
            x,
            keys,
            w_q,
            diag,
            positions=positions,
            theta=self.rope_theta,
            segment_ids=segment_ids,
            window=self.window,
            implementation=self.implementation,
            layout=layout,
        )

    def _diagonal(self, model_dim):
        if self.interaction == "lowrank":
            return None
        shape = (model_dim,) if self.interaction == "shared_diagonal" else (self.num_heads, model_dim)
        return self.param("diag", nn.initializers.normal(_DIAGONAL_SCALE), shape, self.param_dtype)


class CEMMLP(Descent, GatedMLP):
    """Descent on the element-wise energy: a gated MLP whose down projection is its up projection transposed."""

    activation: str = "silu"  # silu | gelu | relu

    def __post_init__(self):
        lookup(ACTIVATIONS, self.activation)
        super().__post_init__()

    def expected_parameters(self, model_dim: int) -> int:
        return 2 * model_dim * self.mlp_dim + self.descent_parameters(model_dim)

    def multiply_adds(self, model_dim: int, seq_len: int) -> float:
        return (2 * self.num_recursions - 1) * model_dim * self.mlp_dim  # each step uses the up projection twice

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(self.dtype)
        shape = (x.shape[-1], self.mlp_dim)
        w_up, w_gate = (Kernel(shape, self.param_dtype, name=name)() for name in ("up_proj", "gate_proj"))
        gate = constrain(ops.elementwise_gate(x, w_gate), "BLF")

        def step(state):
            return ops.elementwise_step_from_gate(state, gate, w_up, activation=self.activation)

        def energy(state):
            return ops.elementwise_energy(state, x, w_up, w_gate, activation=self.activation)

        return self.descend(step, x, energy)


class Kernel(nn.Module):
    """The kernel of a projection from D, as Dense would name and initialise it, for one that is used both ways."""

    shape: tuple[int, ...]
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self) -> jax.Array:
        init = nn.initializers.lecun_normal(in_axis=0, out_axis=tuple(range(1, len(self.shape))))
        return self.param("kernel", init, self.shape, self.param_dtype)
