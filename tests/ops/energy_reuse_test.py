"""What the steps of a layer share is computed once."""

import jax
import jax.numpy as jnp

from cubit_jax import ops


def test_keys_and_gate_are_made_once():
    """Three recursions multiply by W_k (or W_gate) as often as one does: what depends on the state is scanned."""
    context, w_q, w_k = jnp.ones((2, 8, 6)), jnp.ones((6, 3, 4)), jnp.ones((6, 3, 4))
    w_up, w_gate = jnp.ones((6, 7)), jnp.ones((6, 7))

    def attention(h, num_steps):
        keys = ops.interaction_keys(h, w_k, positions=jnp.arange(8))
        return ops.minimize(
            lambda x: ops.interaction_step_from_keys(x, h, keys, w_q), h, num_steps=num_steps, step_size=0.1
        )

    def mlp(h, num_steps):
        gate = ops.elementwise_gate(h, w_gate)
        return ops.minimize(
            lambda x: ops.elementwise_step_from_gate(x, gate, w_up), h, num_steps=num_steps, step_size=0.1
        )

    def outer_products(layer, num_steps):
        jaxpr = jax.make_jaxpr(lambda h: layer(h, num_steps))(context)
        return sum(equation.primitive.name == "dot_general" for equation in jaxpr.eqns)

    for layer in (attention, mlp):
        assert outer_products(layer, 1) == outer_products(layer, 3) == 1
