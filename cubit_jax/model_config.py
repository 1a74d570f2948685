"""ModelConfig: the shape of a model, checked up front, and the layers and the parameter count that follow from it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax.core import FrozenDict

from cubit_jax.layers import MIXERS, MLPS
from cubit_jax.runtime.names import did_you_mean

DTYPES = ("float32", "bfloat16", "float16", "float64")
IMPLEMENTATIONS = ("reference", "xla", "pallas")
REMAT = ("none", "full", "dots")
# The fields of a mixer or MLP that the model fills in; every other field is an option of that layer.
_FILLED = {
    "num_heads",
    "head_dim",
    "mlp_dim",
    "window",
    "rope_theta",
    "dtype",
    "param_dtype",
    "implementation",
    "parent",
    "name",
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The fields of `config.model` (configs/base.py) and the sequence length a model is trained with.

    Raises ValueError with one line that names the field, its value and what is allowed.
    """

    vocab_size: int
    num_layers: int
    model_dim: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    seq_len: int
    mixers: tuple[str, ...] = ("attention",)
    mlp: str = "gated"
    window: int | None = None
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    dropout: float = 0.0
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: str = "none"
    scan_layers: bool = True
    implementation: str | None = None
    options: Mapping[str, Any] = FrozenDict()

    def __post_init__(self):
        names = (self.mixers,) if isinstance(self.mixers, str) else self.mixers
        object.__setattr__(self, "mixers", tuple(names))
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in self.options.items()}
        object.__setattr__(self, "options", FrozenDict(options))
        for name in ("vocab_size", "num_layers", "model_dim", "num_heads", "head_dim", "mlp_dim", "seq_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"model.{name}={value!r} must be an integer of at least 1")
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim} must be even: rotary embedding turns pairs")
        if self.window is not None and self.window < 1:
            raise ValueError(f"model.window={self.window} must be at least 1, or None to see everything")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout={self.dropout} must be at least 0 and below 1")
        if not self.mixers or self.num_layers % len(self.mixers):
            raise ValueError(
                f"model.mixers={self.mixers} has {len(self.mixers)} names, which must divide "
                f"num_layers={self.num_layers}: the pattern is repeated over the layers"
            )
        for name in self.mixers:
            _check_name("model.mixers", name, MIXERS)
        _check_name("model.mlp", self.mlp, MLPS)
        _check_name("model.remat", self.remat, REMAT)
        _check_name("model.dtype", self.dtype, DTYPES)
        _check_name("model.param_dtype", self.param_dtype, DTYPES)
        if self.implementation is not None:
            _check_name("model.implementation", self.implementation, IMPLEMENTATIONS)
        layers = [MIXERS[name] for name in self.mixers] + [MLPS[self.mlp]]
        known = sorted(set().union(*map(option_names, layers)))
        for name in self.options:
            owners = [owner for owner, layer in (MIXERS | MLPS).items() if name in option_names(layer)]
            if owners and name not in known:
                raise ValueError(
                    f"model.options.{name} is an option of {' and '.join(owners)}, which this model of "
                    f"{', '.join((*self.mixers, self.mlp))} does not have: leave it out, or begin with "
                    f"configs/{owners[0]}.py"
                )
            _check_name("model.options", name, known, f"the options of {', '.join((*self.mixers, self.mlp))}")
        for build in (
            *(lambda name=name: build_mixer(self, name, parent=None) for name in self.mixers),
            lambda: build_mlp(self, parent=None),
        ):
            try:
                build()
            except ValueError as error:
                raise ValueError(f"model.options: {error}") from error

    @classmethod
    def from_config(cls, config):
        """The model of a whole run configuration: `config.model` and `config.seq_len`."""
        given = dict(config.model)
        known = [field.name for field in dataclasses.fields(cls) if field.name != "seq_len"]
        for name in given:
            _check_name("config.model", name, known)
        given["options"] = dict(given.get("options", {}))
        return cls(seq_len=config.seq_len, **given)

    @property
    def num_groups(self):
        """How often the pattern of mixers is repeated."""
        return self.num_layers // len(self.mixers)

    def layer_mixers(self):
        """The mixer's name of every layer."""
        return self.mixers * self.num_groups


def option_names(layer):
    """The fields of a mixer or MLP that a config may set under `model.options`."""
    return {field.name for field in dataclasses.fields(layer)} - _FILLED


def build_mixer(config, mixer, **module):
    """The Linen module of one mixer; `module` is name or parent."""
    layer = MIXERS[mixer]
    return layer(
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        window=config.window,
        rope_theta=config.rope_theta,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        implementation=config.implementation,
        **_options(config, layer),
        **module,
    )


def build_mlp(config, **module):
    """The Linen module of the MLP; `module` is name or parent."""
    layer = MLPS[config.mlp]
    return layer(
        mlp_dim=config.mlp_dim,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        **_options(config, layer),
        **module,
    )


def expected_parameters(config):
    """The number of parameters in closed form, from the config alone."""
    mlp = build_mlp(config, parent=None).expected_parameters(config.model_dim)
    mixers = sum(
        build_mixer(config, name, parent=None).expected_parameters(config.model_dim) for name in config.layer_mixers()
    )
    norms = (2 * config.num_layers + 1) * config.model_dim
    embeddings = (1 if config.tie_embeddings else 2) * config.vocab_size * config.model_dim
    return embeddings + norms + mixers + config.num_layers * mlp


def init_cache(config, batch, max_len):
    """An empty decode cache for `batch` rows of at most `max_len` tokens, prompt included.

    Returns:
      {"length": int32 [batch], the tokens each row holds; "layers": {layer name: arrays [batch, max_len, ...]}}, with
      a leading axis of repeats of the mixer pattern where the layers are scanned.
    """
    caches = [
        build_mixer(config, name, parent=None).init_cache(batch, max_len, jnp.dtype(config.dtype), config.model_dim)
        for name in config.layer_mixers()
    ]
    if config.scan_layers:
        layers = {
            f"block_{i}": {
                name: jnp.zeros((config.num_groups, *array.shape), array.dtype) for name, array in caches[i].items()
            }
            for i in range(len(config.mixers))
        }
    else:
        layers = {f"layer_{i}": cache for i, cache in enumerate(caches)}
    return {"length": jnp.zeros((batch,), jnp.int32), "layers": layers}


def _options(config, layer):
    return {name: value for name, value in config.options.items() if name in option_names(layer)}


def _check_name(field, name, known, what="the known names"):
    if name not in known:
        hint = did_you_mean(name, known)
        raise ValueError(f"{field}: {name!r} is not one of {what}: {', '.join(known) or '(none)'}{hint}")
