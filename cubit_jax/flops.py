"""Floating-point operations of a model, and the share of the devices' peak that a run reaches."""

from cubit_jax.runtime.devices import peak_flops


def flops_per_token(model, num_parameters):
    """Floating-point operations of the model itself a training token, forward and backward; recomputation not counted.

    6 for every use of a parameter in a matrix product (all but the embedding table; norms are too few to matter), and
    for each product with a causal [L, L] matrix and K columns a head L * K forward and twice that backward. Attention
    has two such products, the solve two more. A CEM layer uses its query or up projection twice a recursion.

    Args:
      model: ModelConfig. num_parameters: how many parameters it has.
    """
    attention_matrix = model.model_dim * model.num_heads * model.head_dim
    recursions = model.options.get("num_recursions", 1)
    uses = num_parameters - (0 if model.tie_embeddings else model.vocab_size * model.model_dim)
    uses += model.layer_mixers().count("cem") * (2 * recursions - 1) * attention_matrix
    uses += (model.mlp == "cem") * model.num_layers * (2 * recursions - 1) * model.model_dim * model.mlp_dim
    columns = model.seq_len / 2 if model.window is None else min(model.window, model.seq_len / 2)
    products = {"attention": 2, "cubit": 4, "deltaformer": 4, "cem": 2 * recursions}
    mixing = sum(products[name] for name in model.layer_mixers()) * columns * model.num_heads * model.head_dim
    return 6 * (uses + mixing)


def utilization(flops_per_token, tokens_per_second, devices):
    """Share of the devices' peak that the model's own operations reach; None where the peak is not known."""
    peak = peak_flops(devices[0].device_kind)
    return None if peak is None else flops_per_token * tokens_per_second / (peak * len(devices))
