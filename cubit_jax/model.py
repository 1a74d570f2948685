"""The language model: embedding, pre-norm blocks with any mixer and MLP, head, decode cache."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from cubit_jax.layers.mixer import Cache, Rows, token_positions
from cubit_jax.model_config import ModelConfig, build_mixer, build_mlp, can_decode, expected_parameters, init_cache
from cubit_jax.model_head import Head, chunked_loss, logits_of
from cubit_jax.partitioning import constrain

__all__ = [
    "LanguageModel",
    "ModelConfig",
    "can_decode",
    "count_parameters",
    "expected_parameters",
    "init_cache",
    "stack_layers",
    "unstack_layers",
]

# The standard deviation of a tied table is this over sqrt(D). That of the logits is then this, and the loss starts at
# about ln V, at every width; entries of standard deviation 1, as of a table that is not tied, would give logits of
# sqrt(D). The token's own row in the residual stream adds little to them: the layers' updates are larger.
_TIED_SCALE = 0.5


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)); dropout on what is added."""

    config: ModelConfig
    mixer: str
    deterministic: bool
    prefill: bool

    @nn.compact
    def __call__(self, x: jax.Array, rows: Rows, length: jax.Array | None, cache: Cache | None):
        config = self.config
        hidden = _norm(config, "mixer_norm")(x)
        mixer = build_mixer(config, self.mixer, name="mixer")
        if cache is None:
            update = mixer(hidden, **rows._asdict())
        else:
            cache = {**cache, "length": length}
            update, cache = mixer(hidden, **rows._asdict(), cache=cache, prefill=self.prefill)
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
    def __call__(self, x: jax.Array, rows: Rows, length: jax.Array | None, cache: dict[str, Cache] | None):
        new_cache = {}
        for i, mixer in enumerate(self.config.mixers):
            name = f"block_{i}"
            block = _remat(self.config, cache)(self.config, mixer, self.deterministic, self.prefill, name=name)
            x, new_cache[name] = block(x, rows, length, None if cache is None else cache[name])
        return x, None if cache is None else new_cache


class LanguageModel(nn.Module):
    """A causal language model; parameters: embed, layers (scanned) or layer_0.., final_norm, lm_head.

    With tied embeddings there is no lm_head: the logits are products with the embedding table. Tying changes the
    table's initial values alone, so that parameters trained from others mean what they did.

    Parameters are plain arrays: how they lie on a mesh goes by their paths (cubit_jax/partitioning), so that
    scanning and recomputation have no metadata to lose.

    Arrays: tokens int32 [B, L]; positions int32 [B, L], None counts from 0 (or from the cache's length); segment_ids
    int32 [B, L], 0 is padding, None is one segment a row.
    """

    config: ModelConfig

    @property
    def can_decode(self) -> bool:
        """Whether the model can generate: every mixer of it keeps a cache."""
        return can_decode(self.config)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: dict[str, Any] | None = None,
        prefill: bool = False,
        deterministic: bool = True,
    ) -> jax.Array | tuple[jax.Array, dict[str, Any]]:
        """Logits [B, L, V], at least float32; with a cache (`init_cache`) the pair (logits, new cache).

        prefill=True fills an empty cache from prompts, right-padded with segment id 0; otherwise the tokens are
        appended to what each row holds. deterministic=False turns dropout on and needs the "dropout" key.
        """
        rows = Rows(token_positions(tokens, positions, cache, prefill), segment_ids)
        head = functools.partial(logits_of, num_ids=self.config.num_ids)
        logits, cache_out = self._run(head, tokens, rows, cache, prefill, deterministic)
        return logits if cache is None else (logits, cache_out)

    def next_logits(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        cache: dict[str, Any],
        prefill: bool = False,
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Logits [B, V] of the last real token of each row, and the new cache: what generation needs of a prompt."""

        def head(x, kernel):
            count = token_count(tokens, segment_ids)
            last = jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
            return logits_of(last, kernel, self.config.num_ids)[:, 0]

        rows = Rows(token_positions(tokens, None, cache, prefill), segment_ids)
        return self._run(head, tokens, rows, cache, prefill, True)

    def loss(self, batch: Mapping[str, jax.Array], *, deterministic: bool = True) -> tuple[jax.Array, jax.Array]:
        """The sum of the weighted negative log-likelihoods and the sum of the weights, both float32 scalars.

        batch: tokens, targets, segment_ids, positions int32 [B, L]; weights float32 [B, L]. Logits exist for one chunk
        of positions at a time, forward and backward.
        """
        head = functools.partial(
            chunked_loss, targets=batch["targets"], weights=batch["weights"], num_ids=self.config.num_ids
        )
        rows = Rows(batch["positions"], batch["segment_ids"])
        return self._run(head, batch["tokens"], rows, None, False, deterministic)[0]

    @nn.compact
    def _run(self, head, tokens, rows, cache, prefill, deterministic):
        """head(normalised activations [B, L, D], kernel [D, V]) and the new cache."""
        config = self.config
        embed = nn.Embed(
            config.vocab_size,
            config.model_dim,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            embedding_init=nn.initializers.normal(
                _TIED_SCALE / math.sqrt(config.model_dim) if config.tie_embeddings else 1.0
            ),
            name="embed",
        )
        # With D whole: looked up in a table whose D is split, the activations of the whole batch would be exchanged.
        table = constrain(embed.embedding, "VD").astype(embed.dtype)
        x = constrain(jnp.take(table, tokens, axis=0), "BLD")
        length, layers = (None, None) if cache is None else (cache["length"], cache["layers"])
        run = self._scanned if config.scan_layers else self._unrolled
        x, layers = run(x, rows, length, layers, prefill, deterministic)
        x = _norm(config, "final_norm")(x)
        kernel = embed.embedding.T if config.tie_embeddings else Head(config, name="lm_head")()
        if cache is not None:
            before = jnp.zeros_like(length) if prefill else length
            cache = {"length": before + token_count(tokens, rows.segment_ids), "layers": layers}
        return head(x, kernel), cache

    def _scanned(self, x, rows, length, layers, prefill, deterministic):
        group = nn.scan(
            Group,
            variable_axes={"params": 0, "diagnostics": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(nn.broadcast, nn.broadcast, 0),
            length=self.config.num_groups,
        )
        return group(self.config, deterministic, prefill, name="layers")(x, rows, length, layers)

    def _unrolled(self, x, rows, length, layers, prefill, deterministic):
        new_layers = {}
        for i, mixer in enumerate(self.config.layer_mixers()):
            name = f"layer_{i}"
            block = _remat(self.config, layers)(self.config, mixer, deterministic, prefill, name=name)
            x, new_layers[name] = block(x, rows, length, None if layers is None else layers[name])
        return x, None if layers is None else new_layers


def token_count(tokens: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """int32 [B]: the real tokens of each right-padded row."""
    if segment_ids is None:
        return jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    return jnp.sum(segment_ids != 0, axis=1, dtype=jnp.int32)


def count_parameters(params: Any) -> int:
    """The number of parameters in a tree of arrays (or of shapes)."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def stack_layers(params: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """The parameters of layer_0.. as the scanned model `config` holds them, under `layers`."""
    period = len(config.mixers)
    rest = {name: value for name, value in params.items() if not name.startswith("layer_")}
    groups = [
        {f"block_{i}": params[f"layer_{g * period + i}"] for i in range(period)} for g in range(config.num_groups)
    ]
    return {**rest, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *groups)}


def unstack_layers(params: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
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
