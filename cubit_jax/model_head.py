"""The output side of the language model: the projection to logits, and the loss in chunks of positions."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from cubit_jax.layers.common import at_least_float32
from cubit_jax.model_config import ModelConfig
from cubit_jax.partitioning import constrain

_LOSS_CHUNK = 128  # positions per step of the loss: float32 logits of [B, 128, V] exist at a time


class Head(nn.Module):
    """Holds the kernel [D, V] of the output projection, which the loss reads in chunks."""

    config: ModelConfig

    @nn.compact
    def __call__(self) -> jax.Array:
        shape = (self.config.model_dim, self.config.vocab_size)
        return self.param("kernel", nn.initializers.normal(0.02), shape, jnp.dtype(self.config.param_dtype))


def logits_of(x: jax.Array, kernel: jax.Array, num_ids: int | None = None) -> jax.Array:
    """Logits [B, L, V] of x [B, L, D] and kernel [D, V]: operands in x's dtype, the sum at least float32.

    num_ids: columns from there on are -inf, which gives them no probability and no gradient. None: all are used.
    """
    dtype = at_least_float32(x.dtype)
    logits = jnp.einsum("bld,dv->blv", x, kernel.astype(x.dtype), preferred_element_type=dtype)
    if num_ids is not None and num_ids < kernel.shape[1]:
        logits = jnp.where(jnp.arange(kernel.shape[1]) < num_ids, logits, -jnp.inf)
    return constrain(logits, "BLV")


def chunked_loss(
    x: jax.Array, kernel: jax.Array, *, targets: jax.Array, weights: jax.Array, num_ids: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """(sum of weights * nll, sum of weights), both float32, of x [B, L, D] and kernel [D, V] by chunks of positions.

    The backward pass computes the logits of a chunk again, so that [B, L, V] is never held. A chunk takes every n-th
    position: a sequence axis that is split over devices in contiguous parts stays split within each chunk.

    num_ids: as of `logits_of`; targets are below it.
    """
    kernel = constrain(kernel, "DV")  # one exchange, and one of its gradient, instead of one per chunk
    length = x.shape[1]
    count = max(-(-length // _LOSS_CHUNK), min(length, 4))
    pad = -length % count

    def chunks(array):
        padded = jnp.pad(array, [(0, 0), (0, pad)] + [(0, 0)] * (array.ndim - 2))
        split = padded.reshape(padded.shape[0], -1, count, *padded.shape[2:])
        return jnp.moveaxis(split, 2, 0)

    @jax.checkpoint
    def step(total, chunk):
        x, targets, weights = chunk
        logits = logits_of(x, kernel, num_ids)
        # A masked sum and not a gather: a vocabulary that is split over devices needs no exchange of logits.
        is_target = jnp.arange(kernel.shape[1]) == targets[..., None]
        target = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
        nll = jax.nn.logsumexp(logits, axis=-1) - target
        return total + jnp.sum(nll * weights), None

    zero = jnp.zeros((), at_least_float32(x.dtype))
    total, _ = jax.lax.scan(step, zero, (chunks(x), chunks(targets), chunks(weights)))
    return total, jnp.sum(weights)
