"""The CEM configs: every variant builds a model, matched to its Llama baseline in everything but its layers."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from configs import base, cem, transformer
from cubit_jax.model import LanguageModel, count_parameters
from cubit_jax.model_config import ModelConfig, expected_parameters


def model_of(variant):
    return ModelConfig.from_config(cem.get_config(variant))


@pytest.mark.parametrize("size", (*base.SIZES, *cem.SIZES))
def test_variants_of_a_size_differ_in_their_layers_only(size):
    configs = [
        cem.get_config(f"{size},attention={attention},mlp={mlp}").to_dict()
        for attention, mlp in itertools.product(("cem", "attention"), ("cem", "gated"))
    ]
    for config in configs:
        for name in ("mixers", "mlp", "options"):
            config["model"].pop(name)
    assert all(config == configs[0] for config in configs)
    if size in base.SIZES:
        llama = transformer.get_config(size).to_dict()
        assert cem.get_config(f"{size},attention=attention,mlp=gated").to_dict() == llama


def test_sizes_are_named_by_their_baseline():
    for size, millions in {"86m": 86, "162m": 162}.items():
        variant = f"{size},attention=attention,mlp=gated"
        count = expected_parameters(model_of(variant))
        assert abs(count / 1e6 - millions) < 1
        assert count == cem.llama_parameters(cem.get_config(variant).model)


def test_tied_weights_halve_attention_and_take_a_third_off_the_mlp():
    def layers(variant):
        config = model_of(f"162m,{variant}")
        return expected_parameters(config) - 2 * config.vocab_size * config.model_dim - 25 * config.model_dim

    llama = layers("attention=attention,mlp=gated")
    attention, mlp = 12 * 4 * 768**2, 12 * 3 * 768 * 2048
    assert llama == attention + mlp
    assert layers("mlp=gated,interaction=lowrank,learn_step_size=false") == attention / 2 + mlp
    assert layers("attention=attention,learn_step_size=false") == attention + mlp * 2 / 3
    assert layers("mlp=gated,interaction=shared_diagonal") == attention / 2 + mlp + 12 * (768 + 1)
    assert layers("mlp=gated,interaction=diagonal") == attention / 2 + mlp + 12 * (12 * 768 + 1)


@pytest.mark.parametrize(
    "variant, parameters",
    (  # the table of experiments/README.md
        ("86m,attention=attention,mlp=gated", 85_340_672),
        ("86m,mlp=gated", 79_055_372),
        ("86m,attention=attention", 78_262_796),
        ("86m", 71_977_496),
        ("162m,attention=attention,mlp=gated", 162_220_800),
        ("162m,mlp=gated,interaction=lowrank", 148_065_036),
        ("162m,mlp=gated", 148_074_252),
        ("162m,mlp=gated,interaction=diagonal", 148_175_628),
        ("162m,attention=attention", 143_346_444),
        ("162m", 129_199_896),
        ("162m,steps=4", 129_199_896),
        ("162m,preconditioner=diagonal_lowrank", 129_513_240),
    ),
)
def test_number_of_parameters_made(variant, parameters):
    config = model_of(variant)
    shapes = jax.eval_shape(LanguageModel(config).init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    assert count_parameters(shapes) == expected_parameters(config) == parameters


def test_every_option_reaches_the_model():
    options = cem.get_config(
        "tiny,interaction=lowrank,activation=gelu,preconditioner=diagonal_lowrank,rank=3,steps=4,"
        "step_size=0.2,learn_step_size=false"
    ).model.options.to_dict()
    assert options == {
        "interaction": "lowrank",
        "activation": "gelu",
        "preconditioner": "diagonal_lowrank",
        "precondition_rank": 3,
        "num_recursions": 4,
        "step_size": 0.2,
        "learn_step_size": False,
    }
    assert cem.get_config("tiny,steps=4").model.options.step_size == 0.25
    for variant in ("tiny", "tiny,mlp=gated,steps=2", "tiny,attention=attention", "tiny,steps=0"):
        model_of(variant)


def test_chinchilla_is_twenty_tokens_a_parameter_of_the_baseline():
    config = cem.get_config("162m,steps=2,tokens=chinchilla")
    tokens = config.num_steps * config.batch_size * config.seq_len
    count = cem.llama_parameters(config.model)
    assert 20 <= tokens / count < 20.2
    assert config.num_steps == cem.get_config("162m,attention=attention,mlp=gated,tokens=chinchilla").num_steps


@pytest.mark.parametrize(
    "variant, words",
    [
        ("giant", "unknown size 'giant'.*tiny.*162m"),
        ("tiny,step=2", "'step=2' must be name=value with one of the names attention"),
        ("tiny,steps", "'steps' must be name=value"),
        ("tiny,steps=two", r"steps=two must be a number \(int\)"),
        ("tiny,mlp=swiglu", "mlp=swiglu must be one of cem, gated"),
        ("tiny,attention=attention,interaction=lowrank", "interaction=lowrank has no effect without attention=cem"),
        ("tiny,mlp=gated,activation=gelu", "activation=gelu has no effect without mlp=cem"),
        ("tiny,attention=attention,mlp=gated,steps=2", "steps=2 has no effect without"),
    ],
)
def test_mistakes_are_named(variant, words):
    with pytest.raises(ValueError, match=words):
        cem.get_config(variant)
