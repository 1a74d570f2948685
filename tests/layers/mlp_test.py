"""The gated MLP is SwiGLU."""

import jax
import numpy as np

from cubit_jax.layers import GatedMLP


def test_is_swiglu(error):
    module = GatedMLP(mlp_dim=12)
    x = jax.random.normal(jax.random.key(0), (2, 3, 8))
    params = module.init(jax.random.key(1), x)["params"]
    up, gate, down = (np.asarray(params[name]["kernel"], np.float64) for name in ("up_proj", "gate_proj", "down_proj"))
    wide = np.asarray(x, np.float64)
    expected = (wide @ gate / (1 + np.exp(-wide @ gate)) * (wide @ up)) @ down
    assert error(module.apply({"params": params}, x), expected) <= 1e-6
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == module.expected_parameters(8)
