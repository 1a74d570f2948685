"""The vocabulary's side of the model: tied embeddings at the start, and ids that no tokenizer gives."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cubit_jax import partitioning, train
from cubit_jax.inference.evaluation import heldout_loss
from cubit_jax.inference.generation import generate_tokens
from cubit_jax.layers import MIXERS
from cubit_jax.model import LanguageModel, ModelConfig
from cubit_jax.training.run import open_run
from cubit_jax.training.trained import load_run

IDS, VOCAB = 25, 32
PADDED = ModelConfig(
    vocab_size=VOCAB, num_ids=IDS, num_layers=1, model_dim=16, num_heads=2, head_dim=8, mlp_dim=16, seq_len=12
)


def random_batch(config, rows=2, length=12):
    tokens = np.random.default_rng(0).integers(0, config.num_ids or config.vocab_size, (rows, length + 1))
    ones = np.ones((rows, length), np.int32)
    return {
        "tokens": tokens[:, :-1].astype(np.int32),
        "targets": tokens[:, 1:].astype(np.int32),
        "weights": ones.astype(np.float32),
        "segment_ids": ones,
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), ones.shape),
    }


def init(config):
    return jax.jit(LanguageModel(config).init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]


def loss(config, params, batch):
    nll, weight = LanguageModel(config).apply({"params": params}, batch, method="loss")
    return nll / weight


@pytest.mark.parametrize(
    "mixer, mlp, width",
    [*((mixer, "gated", 512) for mixer in MIXERS), ("cem", "cem", 512), ("cubit", "gated", 16), ("cem", "cem", 16)],
)
def test_untrained_loss_with_tied_embeddings_is_that_of_guessing(mixer, mlp, width):
    config = ModelConfig(
        vocab_size=2048,
        num_layers=2,
        model_dim=width,
        num_heads=2,
        head_dim=8,
        mlp_dim=32,
        seq_len=64,
        mixers=(mixer,),
        mlp=mlp,
        tie_embeddings=True,
        implementation="reference",
    )
    params = init(config)
    assert "lm_head" not in params
    value = jax.jit(functools.partial(loss, config))(params, random_batch(config, rows=4, length=64))
    assert value == pytest.approx(math.log(2048), abs=0.3)


def with_padded_ids(params, value):
    """The parameters with what only ids of no token use set to `value`."""
    if "lm_head" in params:
        return params | {"lm_head": {"kernel": params["lm_head"]["kernel"].at[:, IDS:].set(value)}}
    return params | {"embed": {"embedding": params["embed"]["embedding"].at[IDS:].set(value)}}


@pytest.mark.parametrize("tie", [False, True])
def test_ids_of_no_token_get_no_probability_and_no_gradient(tie, error):
    config = dataclasses.replace(PADDED, tie_embeddings=tie)
    params, batch = with_padded_ids(init(config), 100.0), random_batch(config)
    value, gradient = jax.jit(jax.value_and_grad(functools.partial(loss, config)))(params, batch)
    whole = LanguageModel(dataclasses.replace(config, num_ids=None))
    logits = jax.jit(whole.apply)({"params": params}, batch["tokens"])[..., :IDS]
    expected = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1))
    assert error(value, expected) < 1e-6
    rows = gradient["embed"]["embedding"] if tie else gradient["lm_head"]["kernel"].T
    assert not np.any(rows[IDS:]) and np.all(np.any(rows[:IDS], axis=1))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    seen = jax.jit(LanguageModel(config).apply)({"params": params}, batch["tokens"])
    np.testing.assert_array_equal(seen[..., :IDS], logits)
    assert np.all(seen[..., IDS:] == -np.inf)
    new, count = generate_tokens(
        LanguageModel(config), params, batch["tokens"], [12, 12], max_new_tokens=8, end_id=None, temperature=5.0
    )
    assert count.tolist() == [8, 8] and new.max() < IDS


@pytest.mark.parametrize("tie", [False, True])
def test_padded_vocabulary_that_devices_share(tie, error):
    config = dataclasses.replace(PADDED, tie_embeddings=tie)
    params, batch = with_padded_ids(init(config), 100.0), random_batch(config)
    step = jax.value_and_grad(functools.partial(loss, config))
    value, gradient = jax.jit(step)(params, batch)
    mesh = partitioning.make_mesh({"tensor": 2}, jax.devices()[:2])
    with jax.set_mesh(mesh):
        shardings = partitioning.state_shardings(mesh, {"params": params})["params"]
        spread = jax.jit(step, out_shardings=(None, shardings))(jax.device_put(params, shardings), batch)
    assert error(spread[0], value) < 1e-6
    jax.tree.map(lambda a, b: np.testing.assert_array_less(error(a, b), 1e-5), spread[1], gradient)


@pytest.mark.parametrize("number", [0, VOCAB + 1])
def test_number_of_ids_is_checked(number):
    with pytest.raises(ValueError, match=f"num_ids={number} must be from 1 to model.vocab_size=32"):
        dataclasses.replace(PADDED, num_ids=number)


def test_programs_use_the_ids_of_the_tokenizer(micro_config, corpus, tmp_path):
    fields = {"data.source": "files", "data.path": f"{corpus}/*.txt", "data.heldout_fraction": 0.2, "num_steps": 1}
    config = micro_config("transformer", **fields, **{"model.vocab_size": 512, "model.implementation": "reference"})
    train.train(config, tmp_path)
    run = load_run(tmp_path)
    size = run.tokenizer.vocab_size
    assert run.model.config.num_ids == size < 512
    kernel = run.params["lm_head"]["kernel"]
    poisoned = run.params | {"lm_head": {"kernel": kernel.at[:, size:].set(100.0)}}
    with open_run(config, tmp_path) as training, jax.set_mesh(training.mesh):
        assert training.model_config == run.model.config
        first, second = (training.evaluate(params)["eval/loss"] for params in (run.params, poisoned))
        assert first == second < 10
        unmasked = LanguageModel(dataclasses.replace(training.model_config, num_ids=None))
        batches = map(training.put, training._heldout_batches)
        assert heldout_loss(unmasked, poisoned, batches, 1).loss > 20
