"""The language model: Llama's logits, parameter counts, the loss in chunks, lifted transformations, depth."""

import dataclasses
import functools
import importlib
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from cubit_jax.layers import MIXERS
from cubit_jax.layers.mixer import Rows
from cubit_jax.model import (
    Group,
    LanguageModel,
    ModelConfig,
    count_parameters,
    expected_parameters,
    stack_layers,
    unstack_layers,
)

SMALL = ModelConfig(
    vocab_size=31,
    num_layers=2,
    model_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=16,
    seq_len=20,
    mixers=("cubit",),
    implementation="reference",
)


def small(**changes):
    return dataclasses.replace(SMALL, **changes)


@functools.cache
def init(config):
    return jax.jit(LanguageModel(config).init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]


def shapes_of(config):
    return jax.eval_shape(LanguageModel(config).init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]


def random_batch(config, rows=2, length=20):
    tokens, targets = np.random.default_rng(0).integers(0, config.vocab_size, (2, rows, length)).astype(np.int32)
    weights = np.ones((rows, length), np.float32)
    weights[-1, length // 2 :] = 0
    return {
        "tokens": tokens,
        "targets": targets,
        "weights": weights,
        "segment_ids": weights.astype(np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape),
    }


def full_batch(config, rows, length):
    ones = np.ones((rows, length), np.int32)
    return random_batch(config, rows, length) | {"weights": ones.astype(np.float32), "segment_ids": ones}


def loss_and_gradient(config, params, batch, dropout_key=None):
    value, gradient = jax.device_get(compiled_loss(config)(params, batch, dropout_key))
    return value[()], gradient


@functools.cache
def compiled_loss(config):
    @jax.jit
    @jax.value_and_grad
    def loss(params, batch, key):
        return LanguageModel(config).apply(
            {"params": params},
            batch,
            deterministic=key is None,
            method="loss",
            rngs={} if key is None else {"dropout": key},
        )[0]

    return loss


def llama_parameters(weights, num_layers, num_heads):
    """Our tree of the weights of a Hugging Face Llama, whose matrices are [out, in]."""

    def matrix(name):
        return weights[f"{name}.weight"].T

    def layer(i):
        prefix = f"model.layers.{i}"

        def heads(name):
            kernel = matrix(f"{prefix}.self_attn.{name}")
            return {"kernel": kernel.reshape(kernel.shape[0], num_heads, -1)}

        o_proj = matrix(f"{prefix}.self_attn.o_proj")
        return {
            "mixer_norm": {"scale": weights[f"{prefix}.input_layernorm.weight"]},
            "mixer": {
                **{name: heads(name) for name in ("q_proj", "k_proj", "v_proj")},
                "o_proj": {"kernel": o_proj.reshape(num_heads, -1, o_proj.shape[1])},
            },
            "mlp_norm": {"scale": weights[f"{prefix}.post_attention_layernorm.weight"]},
            "mlp": {name: {"kernel": matrix(f"{prefix}.mlp.{name}")} for name in ("gate_proj", "up_proj", "down_proj")},
        }

    return {
        "embed": {"embedding": weights["model.embed_tokens.weight"]},
        "final_norm": {"scale": weights["model.norm.weight"]},
        "lm_head": {"kernel": matrix("lm_head")},
        **{f"layer_{i}": layer(i) for i in range(num_layers)},
    }


@pytest.mark.parametrize(
    "dtype, implementation, limit", [("float32", "xla", 1e-4), ("float32", "reference", 1e-4), ("float64", "xla", 1e-6)]
)  # the other implementation computes norms and rotary angles in float32
def test_transformer_is_llama(dtype, implementation, limit, golden, error):
    case = golden("llama_logits")
    size = {name.removeprefix("config_"): value for name, value in case.items() if name.startswith("config_")}
    config = ModelConfig(
        vocab_size=int(size["vocab_size"]),
        num_layers=int(size["num_hidden_layers"]),
        model_dim=int(size["hidden_size"]),
        num_heads=int(size["num_attention_heads"]),
        head_dim=int(size["hidden_size"]) // int(size["num_attention_heads"]),
        mlp_dim=int(size["intermediate_size"]),
        seq_len=case["tokens"].shape[1],
        norm_eps=float(size["rms_norm_eps"]),
        rope_theta=float(size["rope_theta"]),
        dtype=dtype,
        param_dtype=dtype,
        implementation=implementation,
    )
    weights = {name.removeprefix("hf_"): value for name, value in case.items() if name.startswith("hf_")}
    with jax.enable_x64(dtype == "float64"):
        params = stack_layers(llama_parameters(weights, config.num_layers, config.num_heads), config)
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)
        logits = jax.jit(LanguageModel(config).apply)({"params": params}, jnp.asarray(case["tokens"], jnp.int32))
        assert logits.dtype == dtype
        assert error(logits, case["logits"]) <= limit


@pytest.mark.parametrize("size", base.SIZES)
@pytest.mark.parametrize("family", ["transformer", "deltaformer", "cubit"])
def test_parameter_count_is_the_closed_form(family, size):
    config = ModelConfig.from_config(importlib.import_module(f"configs.{family}").get_config(size))
    params = shapes_of(config)
    layers, width, heads, head_dim, mlp = base.SIZES[size]
    square = width * heads * head_dim
    mixer = {
        "transformer": 4 * square,
        "deltaformer": 5 * square + width * heads + heads,
        "cubit": 5 * square + width * heads + 4 * heads,
    }[family]
    total = 2 * config.vocab_size * width + width + layers * (mixer + 3 * width * mlp + 2 * width)
    assert count_parameters(params) == expected_parameters(config) == total


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_embeddings": True},
        {"scan_layers": False},
        {"mixers": ("cubit",), "options": {"lrr": False}},
        {"mixers": ("cubit", "deltaformer"), "options": {"reference": "shared", "projection": "shared"}},
    ],
)
def test_parameter_count_with_options(changes):
    config = small(**changes)
    params = shapes_of(config)
    assert count_parameters(params) == expected_parameters(config)


@pytest.mark.parametrize("length, tie", [(1, False), (20, True), (150, False)])
def test_loss_in_chunks_is_that_of_the_logits(length, tie, error):
    config = small(mixers=("attention",), num_layers=1, tie_embeddings=tie)
    params, batch = jax.device_get(init(config)), random_batch(config, length=length)
    batch["weights"] = np.random.default_rng(1).random(batch["weights"].shape).astype(np.float32)

    @jax.jit
    @jax.value_and_grad
    def whole(params):
        logits = LanguageModel(config).apply({"params": params}, batch["tokens"], segment_ids=batch["segment_ids"])
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)[..., 0]
        return jnp.sum(nll * batch["weights"])

    value, gradient = loss_and_gradient(config, params, batch)
    expected, expected_gradient = jax.device_get(whole(params))
    assert error(value, expected) <= 1e-5
    jax.tree.map(lambda a, b: np.testing.assert_array_less(error(a, b), 1e-4), gradient, expected_gradient)


def test_logits_of_a_batch_never_exist_whole():
    config = small(vocab_size=4001, mixers=("attention",), num_layers=1)
    compiled = compiled_loss(config).lower(shapes_of(config), random_batch(config, rows=3, length=132), None).compile()
    shapes = re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert largest == 3 * 132 * 4001 // 4  # the logits of one chunk


@functools.cache
def unrolled_reference():
    """(parameters of an unrolled model, its loss and gradient), without remat or dropout."""
    config = small(scan_layers=False, mixers=("attention",))
    params = init(config)
    value, gradient = loss_and_gradient(config, params, random_batch(config))
    return params, value, gradient


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize("scan", [False, True])
def test_scan_remat_and_dropout(scan, remat, dropout, error):
    config = small(scan_layers=scan, remat=remat, dropout=dropout, mixers=("attention",))
    params, expected, expected_gradient = unrolled_reference()
    if scan:
        params, expected_gradient = stack_layers(params, config), stack_layers(expected_gradient, config)
    assert jax.tree.map(jnp.shape, shapes_of(config)) == jax.tree.map(jnp.shape, params)
    key = jax.random.key(5) if dropout else None
    value, gradient = loss_and_gradient(config, params, random_batch(config), key)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    if dropout:
        assert error(value, expected) > 1e-4
    else:
        assert error(value, expected) <= 1e-6
        jax.tree.map(lambda a, b: np.testing.assert_array_less(error(a, b), 1e-4), gradient, expected_gradient)


@pytest.mark.parametrize("scan", [False, True])
def test_dropout_masks(scan):
    # With one token, the gradient of a column of W_down is exactly zero if its output was dropped.
    config = small(scan_layers=scan, dropout=0.5, mixers=("attention",), num_layers=3)
    params, batch = init(config), full_batch(config, rows=1, length=1)

    def masks(key):
        _, gradient = loss_and_gradient(config, params, batch, key)
        gradient = unstack_layers(gradient, config) if scan else gradient
        return np.stack([np.any(gradient[f"layer_{i}"]["mlp"]["down_proj"]["kernel"], axis=0) for i in range(3)])

    first, again, other = (masks(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert len({row.tobytes() for row in first}) == 3
    assert 0.2 < first.mean() < 0.8
    assert masks(None).all()


@pytest.mark.parametrize("scan", [False, True])
def test_layers_do_not_share_initial_values(scan):
    config = small(scan_layers=scan, mixers=("attention",), num_layers=4)
    params = jax.device_get(init(config))
    params = unstack_layers(params, config) if scan else params
    for name in ("q_proj", "v_proj", "o_proj"):
        kernels = [params[f"layer_{i}"]["mixer"][name]["kernel"] for i in range(4)]
        assert all(np.abs(kernels[i] - kernels[j]).mean() > 0.01 for i in range(4) for j in range(i))


def test_hybrid_stacks_and_unstacks(error):
    config = small(mixers=("attention", "cubit"), num_layers=4)
    params, tokens = jax.device_get(init(config)), random_batch(config)["tokens"]
    unrolled = unstack_layers(params, config)
    assert set(unrolled) == {"embed", "final_norm", "lm_head", "layer_0", "layer_1", "layer_2", "layer_3"}
    jax.tree.map(np.testing.assert_array_equal, params, stack_layers(unrolled, config))
    logits = jax.jit(LanguageModel(config).apply)({"params": params}, tokens)
    again = jax.jit(LanguageModel(small(mixers=config.mixers, num_layers=4, scan_layers=False)).apply)(
        {"params": unrolled}, tokens
    )
    assert error(logits, again) <= 1e-6


def test_bfloat16_compute_with_float32_parameters():
    config = small(dtype="bfloat16", remat="full", implementation="xla", mixers=("deltaformer", "cubit"), num_layers=2)
    params, batch = init(config), random_batch(config)
    value, gradient = loss_and_gradient(config, params, batch)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((params, gradient))} == {"float32"}
    assert value.dtype == jnp.float32
    wide, _ = loss_and_gradient(dataclasses.replace(config, dtype="float32"), params, batch)
    assert value == pytest.approx(wide, rel=2e-2)
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_diagnostics_pass_scan_and_remat():
    config = small(mixers=("attention", "cubit"), num_layers=4, remat="full")

    @jax.jit
    def diagnostics(params, batch):
        return LanguageModel(config).apply({"params": params}, batch, method="loss", mutable=["diagnostics"])[1]

    layers = diagnostics(init(config), random_batch(config))["diagnostics"]["layers"]
    assert set(layers) == {"block_1"}
    recorded = layers["block_1"]["mixer"]
    assert {name: value.shape for name, value in recorded.items()} == dict.fromkeys(
        ("ridge_min", "ridge_max", "rescale_min", "rescale_max", "diagonal_min"), (2,)
    )
    assert recorded["rescale_min"][0] != recorded["rescale_min"][1]


@pytest.mark.parametrize(
    "mixer", [pytest.param(name, marks=[] if name in ("cubit", "cem") else pytest.mark.full) for name in MIXERS]
)
def test_depth_at_initialisation(mixer):
    config = small(mixers=(mixer,), num_layers=32, model_dim=32, mlp_dim=48, head_dim=16, mlp="gated")
    params, batch = init(config), full_batch(config, rows=2, length=64)
    _, gradient = loss_and_gradient(config, params, batch)
    norms = np.sqrt(
        sum(np.sum(np.square(leaf), axis=tuple(range(1, leaf.ndim))) for leaf in jax.tree.leaves(gradient["layers"]))
    )
    assert norms.shape == (32,)
    assert np.isfinite(norms).all() and norms.min() > 0
    ratio = norms[1:] / norms[:-1]
    assert max(ratio.max(), 1 / ratio.min()) < 10

    def layer(x, layer_params):
        x, _ = Group(config, True, False).apply(
            {"params": layer_params}, x, Rows(batch["positions"], batch["segment_ids"]), None, None
        )
        return x, jnp.sqrt(jnp.mean(x**2))

    _, rms = jax.jit(
        lambda params: jax.lax.scan(layer, params["embed"]["embedding"][batch["tokens"]], params["layers"])
    )(params)
    assert rms.min() > 0.5 and rms.max() < 20


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mixers": ("cubbit",)}, "model.mixers: 'cubbit' is not one of .*; did you mean 'cubit'?"),
        ({"mixers": ("cubit",) * 3}, "has 3 names, which must divide num_layers=2"),
        ({"mlp": "gate"}, "model.mlp: 'gate' is not one of .*; did you mean 'gated'?"),
        ({"options": {"refrence": "shared"}}, "model.options: 'refrence' is not one of .*; did you mean 'reference'?"),
        ({"options": {"reference": "own"}}, "model.options: reference='own' must be independent or shared"),
        ({"remat": "ful"}, "did you mean 'full'?"),
        ({"dtype": "float"}, "model.dtype: 'float' is not one of"),
        ({"implementation": "palas"}, "did you mean 'pallas'?"),
        ({"head_dim": 7}, "model.head_dim=7 must be even"),
        ({"window": 0}, "model.window=0 must be at least 1"),
        ({"dropout": 1.0}, "model.dropout=1.0 must be"),
        ({"num_layers": 0}, "model.num_layers=0 must be an integer of at least 1"),
        ({"vocab_size": 3.5}, "model.vocab_size=3.5 must be an integer"),
    ],
)
def test_bad_configs_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")) as caught:
        small(**changes)
    assert "\n" not in str(caught.value)


def test_unknown_field_of_a_config_names_the_nearest():
    config = base.get_config("tiny")
    config.model.num_layer = 3
    with pytest.raises(ValueError, match=r"'num_layer' is not one of .*did you mean 'num_layers'"):
        ModelConfig.from_config(config)


def test_an_option_reaches_every_layer_that_has_it():
    config = small(mixers=("attention", "deltaformer"), options={"projection": "shared"})
    params = shapes_of(config)
    assert "w_proj" not in params["layers"]["block_1"]["mixer"]
    assert hash(config) == hash(small(mixers=["attention", "deltaformer"], options={"projection": "shared"}))
