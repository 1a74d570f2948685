"""The language model: embedding, pre-norm blocks with any mixer and MLP, head, loss in chunks, decode cache."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from cubit_jax.layers.common import at_least_float32
from cubit_jax.model_config import ModelConfig, build_mixer, build_mlp, expected_parameters, init_cache
from cubit_jax.partitioning import constrain

__all__ = [
    "LanguageModel",
    "ModelConfig",
    "count_parameters",
    "expected_parameters",
    "init_cache",
    "stack_layers",
    "unstack_layers",
]

_LOSS_CHUNK = 128  # positions a step of the loss: float32 logits of [B, 128, V] exist at a time


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)); dropout on what is added."""

    config: ModelConfig
    mixer: str
    deterministic: bool
    prefill: bool

    @nn.compact
    def __call__(self, x, positions, segment_ids, length, cache):
        config = self.config
        hidden = _norm(config, "mixer_norm")(x)
        mixer = build_mixer(config, self.mixer, name="mixer")
        if cache is None:
            update = mixer(hidden, positions=positions, segment_ids=segment_ids)
        else:
            update, cache = mixer(
                hidden,
                positions=positions,
                segment_ids=segment_ids,
                cache={**cache, "length": length},
                prefill=self.prefill,
            )
        x = constrain(x + self._dropout(update, "mixer_dropout"), "BLD")
        update = build_mlp(config, name="mlp")(_norm(config, "mlp_norm")(x))
        return constrain(x + self._dropout(update, "mlp_dropout"), "BLD"), cache

    def _dropout(self, x, name):
        return nn.Dropout(self.config.dropout, name=name)(x, deterministic=self.deterministic)


class Group(nn.Module):
    """One repeat of the pattern of mixers, which is what the model scans over."""

    config: ModelConfig
    deterministic: bool
    prefill: bool

    @nn.compact
    def __call__(self, x, positions, segment_ids, length, cache):
        new_cache = {}
        for i, mixer in enumerate(self.config.mixers):
            name = f"block_{i}"
            block = _remat(self.config, cache)(self.config, mixer, self.deterministic, self.prefill, name=name)
            x, new_cache[name] = block(x, positions, segment_ids, length, None if cache is None else cache[name])
        return x, None if cache is None else new_cache


class Head(nn.Module):
    """Holds the kernel [D, V] of the output projection, which the loss reads in chunks."""

    config: ModelConfig

    @nn.compact
    def __call__(self):
        shape = (self.config.model_dim, self.config.vocab_size)
        return self.param("kernel", nn.initializers.normal(0.02), shape, jnp.dtype(self.config.param_dtype))


class LanguageModel(nn.Module):
    """A causal language model; parameters: embed, layers (scanned) or layer_0.., final_norm, lm_head.

    Parameters are plain arrays: how they lie on a mesh goes by their paths (cubit_jax/partitioning.py), so that
    scanning and recomputation have no metadata to lose.

    Arrays: tokens int32 [B, L]; positions int32 [B, L], None counts from 0 (or from the cache's length); segment_ids
    int32 [B, L], 0 is padding, None is one segment a row.
    """

    config: ModelConfig

    def __call__(self, tokens, *, positions=None, segment_ids=None, cache=None, prefill=False, deterministic=True):
        """Logits [B, L, V], at least float32; with a cache (`init_cache`) the pair (logits, new cache).

        prefill=True fills an empty cache from prompts, right-padded with segment id 0; otherwise the tokens are
        appended to what each row holds. deterministic=False turns dropout on and needs the "dropout" key.
        """
        logits, cache_out = self._run(logits_of, tokens, positions, segment_ids, cache, prefill, deterministic)
        return logits if cache is None else (logits, cache_out)

    def next_logits(self, tokens, *, segment_ids=None, cache, prefill=False):
        """Logits [B, V] of the last real token of each row, and the new cache: what generation needs of a prompt."""

        def head(x, kernel):
            count = token_count(tokens, segment_ids)
            last = jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
            return logits_of(last, kernel)[:, 0]

        return self._run(head, tokens, None, segment_ids, cache, prefill, True)

    def loss(self, batch, *, deterministic=True):
        """The sum of the weighted negative log-likelihoods and the sum of the weights, both float32 scalars.

        batch: tokens, targets, segment_ids, positions int32 [B, L]; weights float32 [B, L]. Logits exist for one chunk
        of positions at a time, forward and backward.
        """
        head = functools.partial(chunked_loss, targets=batch["targets"], weights=batch["weights"])
        return self._run(head, batch["tokens"], batch["positions"], batch["segment_ids"], None, False, deterministic)[0]

    @nn.compact
    def _run(self, head, tokens, positions, segment_ids, cache, prefill, deterministic):
        """head(normalised activations [B, L, D], kernel [D, V]) and the new cache."""
        config = self.config
        embed = nn.Embed(
            config.vocab_size,
            config.model_dim,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            embedding_init=nn.initializers.normal(1.0),
            name="embed",
        )
        length = None if cache is None else cache["length"]
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
            if cache is not None and not prefill:
                positions = positions + length[:, None]
        # With D whole: looked up in a table whose D is split, the activations of the whole batch would be exchanged.
        table = constrain(embed.embedding, "VD").astype(embed.dtype)
        x = constrain(jnp.take(table, tokens, axis=0), "BLD")
        layers = None if cache is None else cache["layers"]
        x, layers = (self._scanned if config.scan_layers else self._unrolled)(
            x, positions, segment_ids, length, layers, prefill, deterministic
        )
        x = _norm(config, "final_norm")(x)
        kernel = embed.embedding.T if config.tie_embeddings else Head(config, name="lm_head")()
        if cache is not None:
            before = jnp.zeros_like(length) if prefill else length
            cache = {"length": before + token_count(tokens, segment_ids), "layers": layers}
        return head(x, kernel), cache

    def _scanned(self, x, positions, segment_ids, length, layers, prefill, deterministic):
        group = nn.scan(
            Group,
            variable_axes={"params": 0, "diagnostics": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, 0),
            length=self.config.num_groups,
        )
        return group(self.config, deterministic, prefill, name="layers")(x, positions, segment_ids, length, layers)

    def _unrolled(self, x, positions, segment_ids, length, layers, prefill, deterministic):
        new_layers = {}
        for i, mixer in enumerate(self.config.layer_mixers()):
            name = f"layer_{i}"
            block = _remat(self.config, layers)(self.config, mixer, deterministic, prefill, name=name)
            x, new_layers[name] = block(x, positions, segment_ids, length, None if layers is None else layers[name])
        return x, None if layers is None else new_layers


def logits_of(x, kernel):
    """x [B, L, D] times kernel [D, V] with the operands in x's dtype and the sum at least float32."""
    dtype = at_least_float32(x.dtype)
    return constrain(jnp.einsum("bld,dv->blv", x, kernel.astype(x.dtype), preferred_element_type=dtype), "BLV")


def chunked_loss(x, kernel, *, targets, weights):
    """(sum of weights * nll, sum of weights), both float32, of x [B, L, D] and kernel [D, V] by chunks of positions.

    The backward pass computes the logits of a chunk again, so that [B, L, V] is never held. A chunk takes every n-th
    position: a sequence axis that is split over devices in contiguous parts stays split within each chunk.
    """
    kernel = constrain(kernel, "DV")  # one exchange, and one of its gradient, instead of one a chunk
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
        logits = logits_of(x, kernel)
        # A masked sum and not a gather: a vocabulary that is split over devices needs no exchange of logits.
        is_target = jnp.arange(kernel.shape[1]) == targets[..., None]
        target = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
        nll = jax.nn.logsumexp(logits, axis=-1) - target
        return total + jnp.sum(nll * weights), None

    zero = jnp.zeros((), at_least_float32(x.dtype))
    total, _ = jax.lax.scan(step, zero, (chunks(x), chunks(targets), chunks(weights)))
    return total, jnp.sum(weights)


def token_count(tokens, segment_ids):
    """int32 [B]: the real tokens of each right-padded row."""
    if segment_ids is None:
        return jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    return jnp.sum(segment_ids != 0, axis=1, dtype=jnp.int32)


def count_parameters(params):
    """The number of parameters in a tree of arrays (or of shapes)."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def stack_layers(params, config):
    """The parameters of layer_0.. as the scanned model `config` holds them, under `layers`."""
    period = len(config.mixers)
    rest = {name: value for name, value in params.items() if not name.startswith("layer_")}
    groups = [
        {f"block_{i}": params[f"layer_{g * period + i}"] for i in range(period)} for g in range(config.num_groups)
    ]
    return {**rest, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *groups)}


def unstack_layers(params, config):
    """The inverse of `stack_layers`."""
    period = len(config.mixers)
    layers = {
        f"layer_{g * period + i}": jax.tree.map(lambda leaf, g=g: leaf[g], params["layers"][f"block_{i}"])
        for g in range(config.num_groups)
        for i in range(period)
    }
    return {**{name: value for name, value in params.items() if name != "layers"}, **layers}


def _norm(config, name):
    return nn.RMSNorm(
        epsilon=config.norm_eps, dtype=jnp.dtype(config.dtype), param_dtype=jnp.dtype(config.param_dtype), name=name
    )


def _remat(config, cache):
    """Block, recomputed in the backward pass as config.remat says; decoding has no backward pass."""
    if config.remat == "none" or cache is not None:
        return Block
    policy = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}[config.remat]
    return nn.remat(Block, policy=policy, prevent_cse=not config.scan_layers)
