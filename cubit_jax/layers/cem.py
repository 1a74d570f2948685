"""Causal Energy Minimization: layers that take gradient steps on conditional energies (arXiv 2605.07588)."""

import math

import jax.numpy as jnp
from flax import linen as nn

from cubit_jax import ops
from cubit_jax.layers.common import Mixer, at_least_float32, record, records_diagnostics, token_positions, write_cache
from cubit_jax.layers.mlp import GatedMLP
from cubit_jax.ops.potential import ACTIVATIONS, lookup
from cubit_jax.partitioning import constrain, per_shard

INTERACTIONS = ("lowrank", "diagonal", "shared_diagonal")
PRECONDITIONERS = ("none", "diagonal", "diagonal_lowrank")

# softplus of it is 1, so that training starts at the plain gradient step.
_UNIT_SOFTPLUS = math.log(math.e - 1)
# Small beside the low-rank scores: these are near 1, the diagonal's near 0.02 sqrt(D / K).
_DIAGONAL_SCALE = 0.02
# Of the low-rank part's rows, over sqrt(D): its eigenvalues start near +-0.1, far from those that make P indefinite.
_LOWRANK_SCALE = 0.3


class Descent(nn.Module):
    """T times x <- x + step_size * P step(x) from x = h, for a layer that returns x_T - h; h is its normalised input.

    No parameter depends on T: the number of recursions of a trained layer may be changed. The state is at least float32
    whatever the layer's dtype, as small steps would be lost in 16 bits. Learned: step_size [] and those of P.
    """

    num_recursions: int = 1  # T; 0 is the identity (an update of 0)
    step_size: float | None = None  # None starts at 1 / num_recursions, and needs learn_step_size
    learn_step_size: bool = True
    preconditioner: str = "none"  # none | diagonal: diag(softplus(d)) | diagonal_lowrank: that plus U V^T + V U^T
    precondition_rank: int = 8  # R of U and V

    def __post_init__(self):
        check_choice("preconditioner", self.preconditioner, PRECONDITIONERS)
        if self.num_recursions < 0:
            raise ValueError(f"num_recursions={self.num_recursions} must be at least 0")
        if self.step_size is None and not self.learn_step_size:
            raise ValueError("step_size=None must be a number where learn_step_size is False")
        if self.precondition_rank < 1:
            raise ValueError(f"precondition_rank={self.precondition_rank} must be at least 1")
        super().__post_init__()

    def descent_parameters(self, model_dim):
        """The number of parameters of the step size and the preconditioner."""
        of_preconditioner = {"none": 0, "diagonal": 1, "diagonal_lowrank": 1 + 2 * self.precondition_rank}
        return int(self.learn_step_size) + of_preconditioner[self.preconditioner] * model_dim

    def descend(self, step, x, energy, segment_ids=None):
        """The update x_T - x [B, L, D], in the layer's dtype.

        Args:
          step: state -> minus the gradient.
          x: [B, L, D].
          energy: state -> [B, L], evaluated before and after when diagnostics are asked for; None records nothing.
          segment_ids: [B, L] or None; padding is left out of the recorded means.
        """
        start = x.astype(at_least_float32(x.dtype))
        step_size = self._step_size()
        factors = self._preconditioner(x.shape[-1])
        precondition = (lambda vector: ops.precondition(vector, *factors)) if factors else None
        end = ops.minimize(step, start, num_steps=self.num_recursions, step_size=step_size, precondition=precondition)
        if energy is not None and records_diagnostics(self):
            real = None if segment_ids is None else segment_ids != 0
            record(self, "energy_before", _mean(energy(start), real))
            record(self, "energy_after", _mean(energy(end), real))
            record(self, "step_size", jnp.asarray(step_size))
            if factors:
                record(self, "preconditioner_margin", ops.preconditioner_margin(*factors))
        return (end - start).astype(self.dtype)

    def _step_size(self):
        first = 1 / max(self.num_recursions, 1) if self.step_size is None else self.step_size
        if not self.learn_step_size:
            return first
        return self.param("step_size", nn.initializers.constant(first), (), self.param_dtype)

    def _preconditioner(self, model_dim):
        """(), (d,) or (d, u, v)."""
        if self.preconditioner == "none":
            return ()
        d = self.param("precond_d", nn.initializers.constant(_UNIT_SOFTPLUS), (model_dim,), self.param_dtype)
        if self.preconditioner == "diagonal":
            return (d,)
        init = nn.initializers.normal(_LOWRANK_SCALE / math.sqrt(model_dim))
        shape = (model_dim, self.precondition_rank)
        return d, *(self.param(name, init, shape, self.param_dtype) for name in ("precond_u", "precond_v"))


class CEMAttention(Descent, Mixer):
    """Descent on the interaction energy: attention with tied weights, two matrices where attention has four.

    A head's bilinear form is W_q^T W_k (lowrank), plus diag(d) of its own (diagonal) or of all heads (shared_diagonal,
    the paper's best). Keys come from h, once for all steps; the cache holds k, and h where a diagonal reads it.
    """

    interaction: str = "shared_diagonal"  # lowrank | diagonal | shared_diagonal

    def __post_init__(self):
        check_choice("interaction", self.interaction, INTERACTIONS)
        super().__post_init__()

    def init_cache(self, batch, max_len, dtype, model_dim=None):
        """Empty arrays; model_dim is needed where the cache holds h."""
        shape = (batch, max_len, self.num_heads, self.head_dim)
        cache = {"k": jnp.zeros(shape, dtype)}
        if self.interaction == "lowrank":
            return cache
        if model_dim is None:
            raise ValueError(f"interaction={self.interaction!r} keeps its input in the cache: give model_dim")
        return cache | {"h": jnp.zeros((batch, max_len, model_dim), dtype)}

    def expected_parameters(self, model_dim):
        """The number of parameters in closed form."""
        diagonals = {"lowrank": 0, "diagonal": self.num_heads, "shared_diagonal": 1}[self.interaction]
        return model_dim * (2 * self.num_heads * self.head_dim + diagonals) + self.descent_parameters(model_dim)

    @nn.compact
    def __call__(self, x, *, positions=None, segment_ids=None, cache=None, prefill=False):
        positions = token_positions(x, positions, cache, prefill)
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

        y = self.descend(step, x, energy if cache is None else None, segment_ids)
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

    def expected_parameters(self, model_dim):
        """The number of parameters in closed form."""
        return 2 * model_dim * self.mlp_dim + self.descent_parameters(model_dim)

    @nn.compact
    def __call__(self, x):
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
    def __call__(self):
        init = nn.initializers.lecun_normal(in_axis=0, out_axis=tuple(range(1, len(self.shape))))
        return self.param("kernel", init, self.shape, self.param_dtype)


def check_choice(name, value, choices):
    """Raises ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}")


def _mean(energy, real):
    """The mean over the real positions, 0 if there are none."""
    if real is None:
        return jnp.mean(energy)
    return jnp.sum(energy, where=real) / jnp.maximum(jnp.sum(real), 1)
