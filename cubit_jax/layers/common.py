"""What mixers and MLPs share: what the model asks of a layer, initial values, diagnostics."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from cubit_jax.partitioning.parameters import Rules

# The standard deviation is 1/sqrt(fan in), so a normalised input gives queries, keys and references of variance one at
# every width. For Cubit this is also what keeps the diagonal of the system away from zero at the start of training.
kernel_init = nn.initializers.lecun_normal()


class Layer(nn.Module):
    """What a model asks of a mixer or an MLP beside its output. Every answer may be left out.

    Attributes:
      partition_rules: pairs (regular expression, PartitionSpec) for parameters that no rule in
        cubit_jax/partitioning/parameters.py covers. The expression is the parameter's whole path within the layer
        ("decay", "gate_proj/kernel"); the spec names the mesh axes of one layer's array.
    """

    partition_rules: ClassVar[Rules] = ()

    def expected_parameters(self, model_dim: int) -> int | None:
        """The number of parameters in closed form; None where there is none."""
        return None

    def multiply_adds(self, model_dim: int, seq_len: int) -> float | None:
        """Multiply-adds a token, forward, beyond one for each parameter; None where the number is not known.

        Args:
          model_dim: D. seq_len: tokens in a row; a token sees half of them on average.
        """
        return None


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless the value is one of the choices."""
    if value not in choices:
        known = " or ".join(choices) if len(choices) == 2 else f"one of {', '.join(choices)}"
        raise ValueError(f"{name}={value!r} must be {known}")


def record(module: nn.Module, name: str, value: jax.Array) -> None:
    """Sows `value` into the "diagnostics" collection: one array per layer, the last call wins."""
    module.sow("diagnostics", name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)


def records_diagnostics(module: nn.Module) -> bool:
    """True when the caller asked for diagnostics; computing them only then makes them free otherwise."""
    return module.is_mutable_collection("diagnostics") and not module.is_initializing()


def at_least_float32(dtype: Any) -> jnp.dtype:
    """float32, or the dtype itself where it is wider."""
    return jnp.promote_types(dtype, jnp.float32)
