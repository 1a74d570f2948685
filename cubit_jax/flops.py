"""Floating-point operations of a model, and the share of the devices' peak that a run reaches."""

from collections.abc import Sequence

import jax

from cubit_jax.runtime.devices import peak_flops


def flops_per_token(model, num_parameters: int) -> float | None:
    """Floating-point operations of the model itself a training token, forward and backward; recomputation not counted.

    6 for every use of a parameter in a matrix product (all but the embedding table; norms are too few to matter), and
    6 for each further multiply-add of the forward pass that a layer states (`Layer.multiply_adds`): its products with
    causal [L, L] matrices, and parameters that it uses more than once.

    Args:
      model: ModelConfig. num_parameters: how many parameters it has.

    Returns:
      The number; None where a layer does not state its part.
    """
    further = [layer.multiply_adds(model.model_dim, model.seq_len) for layer in model.layers()]
    if None in further:
        return None
    uses = num_parameters - (0 if model.tie_embeddings else model.vocab_size * model.model_dim)
    return 6 * (uses + sum(further))


def utilization(flops_per_token: float | None, tokens_per_second: float, devices: Sequence[jax.Device]) -> float | None:
    """Share of the devices' peak that the model's own operations reach; None where either number is not known."""
    peak = peak_flops(devices[0].device_kind)
    if peak is None or flops_per_token is None:
        return None
    return flops_per_token * tokens_per_second / (peak * len(devices))
