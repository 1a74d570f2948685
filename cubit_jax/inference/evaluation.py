"""Held-out loss of a model: every target once, whatever the size of the batches."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Results over the whole held-out part, every target counted once.

    Attributes:
      loss: mean negative log-likelihood of a token, in nats. perplexity: e to that power.
      bits_per_byte: total negative log-likelihood in bits over the bytes of the text, which does not depend on the
        tokenizer; None where the bytes are not known.
      tokens: number of targets.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int


def heldout_loss(model: Any, params: Any, batches: Iterable[dict[str, Any]], num_bytes: int) -> Evaluation:
    """Evaluates without dropout; under `jax.set_mesh` on all its devices.

    Args:
      model: LanguageModel. params: its parameters.
      batches: iterable of batches as `LanguageModel.loss` takes them, arrays of numpy or global ones on the devices;
        padding has weight 0.
      num_bytes: bytes of text in them, the denominator of bits per byte; None leaves those out.

    Returns:
      Evaluation. The same for every size of batch, up to rounding.
    """
    step = _loss_step(model)
    sums = jax.device_get([step(params, batch) for batch in batches])
    nll, tokens = (math.fsum(map(float, column)) for column in zip(*sums))
    loss = nll / tokens
    bits_per_byte = None if num_bytes is None else nll / math.log(2) / num_bytes
    return Evaluation(loss, math.exp(min(loss, 700.0)), bits_per_byte, round(tokens))


def nonfinite_parameters(params: Any) -> list[str]:
    """Paths of the parameters that hold a NaN or an infinity, as layers/block_0/mixer/q_proj/kernel."""
    finite = jax.device_get(jax.jit(lambda tree: jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), tree))(params))
    leaves = jax.tree_util.tree_leaves_with_path(finite)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, good in leaves if not good]


@functools.cache
def _loss_step(model):
    return jax.jit(functools.partial(_sums, model))


def _sums(model, params, batch):
    return model.apply({"params": params}, batch, method="loss")
