"""ModelConfig: the shape of a model, checked up front, and the layers, parameters and cache that follow from it."""

import dataclasses
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import FrozenDict

from cubit_jax.layers import MIXERS, MLPS
from cubit_jax.layers.common import Layer
from cubit_jax.layers.mixer import Mixer
from cubit_jax.partitioning.parameters import Rules
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
    """The fields of `config.model` (configs/base.py), the sequence length and the ids a model is trained with.

    num_ids: ids of the tokenizer, which are those from 0 to num_ids - 1. Larger ones pad the vocabulary to a size that
    devices divide: they get no probability and no gradient. None: all of vocab_size.

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
    num_ids: int | None = None

    def __post_init__(self):
        names = (self.mixers,) if isinstance(self.mixers, str) else self.mixers
        object.__setattr__(self, "mixers", tuple(names))
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in self.options.items()}
        object.__setattr__(self, "options", FrozenDict(options))
        for name in ("vocab_size", "num_layers", "model_dim", "num_heads", "head_dim", "mlp_dim", "seq_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"model.{name}={value!r} must be an integer of at least 1")
        if self.num_ids is not None and not 1 <= self.num_ids <= self.vocab_size:
            raise ValueError(f"num_ids={self.num_ids} must be from 1 to model.vocab_size={self.vocab_size}")
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim} must be even: rotary embedding turns pairs")
        if self.window is not None and self.window < 1:
            raise ValueError(f"model.window={self.window} must be at least 1, or None to see everything")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout={self.dropout} must be at least 0 and below 1")
        if not 0 < self.rope_theta < float("inf"):
            raise ValueError(f"model.rope_theta={self.rope_theta} must be above 0 and finite")
        if not 0 <= self.norm_eps < float("inf"):
            raise ValueError(f"model.norm_eps={self.norm_eps} must be at least 0 and finite")
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
        self._check_options()
        for build in (
            *(lambda name=name: build_mixer(self, name, parent=None) for name in self.mixers),
            lambda: build_mlp(self, parent=None),
        ):
            try:
                build()
            except ValueError as error:
                raise ValueError(f"model.options: {error}") from error

    def _check_options(self):
        """Each option is one of a layer of this model, and of the kind that the layer's field has."""
        here = ", ".join((*dict.fromkeys(self.mixers), self.mlp))
        layers = [MIXERS[name] for name in self.mixers] + [MLPS[self.mlp]]
        known = sorted(set().union(*map(option_names, layers)))
        for name, value in self.options.items():
            flags = [
                f"--config.model.{field}={owner}"
                for field, table in (("mixers", MIXERS), ("mlp", MLPS))
                for owner, layer in table.items()
                if name in option_names(layer)
            ]
            if flags and name not in known:
                raise ValueError(
                    f"model.options.{name}={value!r}: no layer of this model ({here}) has this option; leave it out, "
                    f"or choose a layer that has it: {' or '.join(flags)}"
                )
            _check_name("model.options", name, known, f"the options of {here}")
            for layer in layers:
                for field in dataclasses.fields(layer):
                    if field.name == name and not _is_of(value, field.type):
                        kind = getattr(field.type, "__name__", field.type)
                        raise ValueError(f"model.options.{name}={value!r} must be of type {kind}")

    @classmethod
    def from_config(cls, config: Any) -> "ModelConfig":
        """The model of a whole run configuration: `config.model` and `config.seq_len`."""
        given = dict(config.model)
        known = [field.name for field in dataclasses.fields(cls) if field.name not in ("seq_len", "num_ids")]
        for name in given:
            _check_name("config.model", name, known)
        given["options"] = dict(given.get("options", {}))
        return cls(seq_len=config.seq_len, **given)

    @property
    def num_groups(self) -> int:
        """How often the pattern of mixers is repeated."""
        return self.num_layers // len(self.mixers)

    def layer_mixers(self) -> tuple[str, ...]:
        """The mixer's name of every layer."""
        return self.mixers * self.num_groups

    def layers(self) -> list[Layer]:
        """The mixer and the MLP of every layer, as modules of their own."""
        of_pattern = [layer for name in self.mixers for layer in (build_mixer(self, name, parent=None), self._mlp())]
        return of_pattern * self.num_groups

    def _mlp(self):
        return build_mlp(self, parent=None)


def option_names(layer: type[Layer]) -> set[str]:
    """The fields of a mixer or MLP that a config may set under `model.options`."""
    return {field.name for field in dataclasses.fields(layer)} - _FILLED


def drop_replaced_options(config: Any, given: Collection[str]) -> None:
    """Removes from `config.model.options` what a config's file set for layers that the model does not have.

    A family's file states the options of its own layers; flags may put other layers in their place.

    Args:
      config: of a run, changed in place. given: names of the options that flags set; they stay, and are checked with
        the model.
    """
    model = config.model
    mixers = (model.mixers,) if isinstance(model.mixers, str) else model.mixers
    layers = [*map(MIXERS.get, mixers), MLPS.get(model.mlp)]
    if None in layers:
        return  # ModelConfig names it
    known = set().union(*map(option_names, layers))
    with model.options.unlocked():
        for name in set(model.options) - known - set(given):
            del model.options[name]


def build_mixer(config: ModelConfig, mixer: str, **module: Any) -> Mixer:
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


def build_mlp(config: ModelConfig, **module: Any) -> Layer:
    """The Linen module of the MLP; `module` is name or parent."""
    layer = MLPS[config.mlp]
    return layer(
        mlp_dim=config.mlp_dim,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        **_options(config, layer),
        **module,
    )


def expected_parameters(config: ModelConfig) -> int | None:
    """The number of parameters in closed form, from the config alone; None where a layer does not state its own."""
    of_layers = [layer.expected_parameters(config.model_dim) for layer in config.layers()]
    if None in of_layers:
        return None
    norms = (2 * config.num_layers + 1) * config.model_dim
    embeddings = (1 if config.tie_embeddings else 2) * config.vocab_size * config.model_dim
    return embeddings + norms + sum(of_layers)


def partition_rules(config: ModelConfig) -> Rules:
    """The sharding rules that the layers of a model state for their own parameters, each for its own layers' paths."""
    period = len(config.mixers)

    def own(owner, layer):
        return [(rf"\b{owner}/(?:{pattern})$", spec) for pattern, spec in layer.partition_rules]

    rules = own("mlp", MLPS[config.mlp])
    for i, name in enumerate(config.mixers):
        unrolled = "|".join(str(number) for number in range(i, config.num_layers, period))
        rules += own(rf"(?:block_{i}|layer_(?:{unrolled}))/mixer", MIXERS[name])
    return tuple(rules)


def can_decode(config: ModelConfig) -> bool:
    """Whether every mixer of the model keeps a cache, so that it can generate."""
    return not _without_cache(config)


def init_cache(config: ModelConfig, batch: int, max_len: int) -> dict[str, Any]:
    """An empty decode cache for `batch` rows of at most `max_len` tokens, prompt included.

    Returns:
      {"length": int32 [batch], the tokens each row holds; "layers": {layer name: arrays [batch, max_len, ...]}}, with
      a leading axis of repeats of the mixer pattern where the layers are scanned.

    Raises:
      NotImplementedError: a mixer keeps no cache.
    """
    if missing := _without_cache(config):
        raise NotImplementedError(
            f"this model cannot generate: {' and '.join(map(repr, missing))} keeps no cache "
            f"({MIXERS[missing[0]].__name__}.cache_dtypes says None)"
        )
    caches = [_layer_cache(config, name, batch, max_len) for name in config.layer_mixers()]
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


def _layer_cache(config, mixer, batch, max_len):
    layer = build_mixer(config, mixer, parent=None)
    return layer.init_cache(batch, max_len, jnp.dtype(config.dtype), config.model_dim)


def _without_cache(config):
    """The mixers of the model that keep no cache."""
    return [
        name
        for name in dict.fromkeys(config.mixers)
        if jax.eval_shape(lambda name=name: _layer_cache(config, name, 1, 1)) is None
    ]


def _options(config, layer):
    return {name: value for name, value in config.options.items() if name in option_names(layer)}


def _is_of(value, annotation):
    """Whether an option's value fits the annotation of its field; an integer is a float, a bool is no number."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_is_of(value, one) for one in typing.get_args(annotation))
    kind = typing.get_origin(annotation) or annotation
    if not isinstance(kind, type):  # Any, and annotations that are not read
        return True
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind)


def _check_name(field: str, name: str, known: Iterable[str], what: str = "the known names") -> None:
    if name not in known:
        hint = did_you_mean(name, known)
        raise ValueError(f"{field}: {name!r} is not one of {what}: {', '.join(known) or '(none)'}{hint}")
