"""Gradient steps on an energy, as the CEM layers take them: number, size, preconditioner (arXiv 2605.07588)."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from cubit_jax import ops
from cubit_jax.layers.common import Layer, at_least_float32, check_choice, record, records_diagnostics

PRECONDITIONERS = ("none", "diagonal", "diagonal_lowrank")

# softplus of it is 1, so that training starts at the plain gradient step.
_UNIT_SOFTPLUS = math.log(math.e - 1)
# Of the low-rank part's rows, over sqrt(D): its eigenvalues start near +-0.1, far from those that make P indefinite.
_LOWRANK_SCALE = 0.3


class Descent(Layer):
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

    def descent_parameters(self, model_dim: int) -> int:
        """The number of parameters of the step size and the preconditioner."""
        of_preconditioner = {"none": 0, "diagonal": 1, "diagonal_lowrank": 1 + 2 * self.precondition_rank}
        return int(self.learn_step_size) + of_preconditioner[self.preconditioner] * model_dim

    def descend(
        self,
        step: Callable[[jax.Array], jax.Array],
        x: jax.Array,
        energy: Callable[[jax.Array], jax.Array] | None,
        real: jax.Array | None = None,
    ) -> jax.Array:
        """The update x_T - x [B, L, D], in the layer's dtype.

        Args:
          step: state -> minus the gradient.
          x: [B, L, D].
          energy: state -> [B, L], evaluated before and after when diagnostics are asked for; None records nothing.
          real: bool [B, L], the positions that the recorded means are over; None: all.
        """
        start = x.astype(at_least_float32(x.dtype))
        step_size = self._step_size()
        factors = self._preconditioner(x.shape[-1])
        precondition = (lambda vector: ops.precondition(vector, *factors)) if factors else None
        end = ops.minimize(step, start, num_steps=self.num_recursions, step_size=step_size, precondition=precondition)
        if energy is not None and records_diagnostics(self):
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


def _mean(energy, real):
    """The mean over the real positions, 0 if there are none."""
    if real is None:
        return jnp.mean(energy)
    return jnp.sum(energy, where=real) / jnp.maximum(jnp.sum(real), 1)
