"""Every family on every mesh axis of eight fake devices: the loss and every gradient are those of one device."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cubit_jax import partitioning
from cubit_jax.layers import MIXERS
from cubit_jax.model import LanguageModel, ModelConfig
from cubit_jax.training import step as train_step

FAMILIES = ("transformer", "deltaformer", "cubit", "cem")
LENGTH = 192  # no other dimension of these models is a multiple or a part of it


def _batch():
    """Rows of packed documents whose scales, ends and weights differ, with padding."""
    random = np.random.default_rng(0)
    index = np.broadcast_to(np.arange(LENGTH), (8, LENGTH))
    second = 30 + 15 * np.arange(8)[:, None]
    end = LENGTH - 10 * (np.arange(8)[:, None] % 3)
    segments = np.where(index < second, 1, 2) * (index < end)
    batch = {
        "tokens": random.integers(0, 304, (8, LENGTH)),
        "targets": random.integers(0, 304, (8, LENGTH)),
        "segment_ids": segments,
        "positions": np.where(index < second, index, index - second),
    }
    return {name: array.astype(np.int32) for name, array in batch.items()} | {
        "weights": ((segments != 0) * (1 + 0.1 * np.arange(8)[:, None])).astype(np.float32)
    }


def _model(micro_config, family, num_heads=8):
    config = micro_config(
        family, **{"model.num_heads": num_heads, "model.head_dim": 4, "model.vocab_size": 304, "seq_len": LENGTH}
    )
    return LanguageModel(ModelConfig.from_config(config))


def _loss_and_gradients(model, params, sizes=None):
    """On one device, or compiled for a mesh of these sizes; and the compiled program."""

    def loss(params, batch):
        nll, weight = model.apply({"params": params}, batch, method="loss")
        return nll / weight

    sizes = sizes or {}
    mesh = partitioning.make_mesh(
        {**dict.fromkeys(partitioning.AXES, 1), **sizes}, jax.devices()[: math.prod(sizes.values())]
    )
    with jax.set_mesh(mesh):
        partitioning.check(mesh, batch_size=8, accumulation_steps=1, model=model.config)
        shardings = partitioning.state_shardings(mesh, {"params": params})["params"]
        arguments = jax.device_put(params, shardings), jax.device_put(_batch(), partitioning.batch_sharding(mesh))
        step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings)).lower(*arguments).compile()
        return *jax.device_get(step(*arguments)), step.as_text()


@pytest.fixture(scope="module")
def one_device(micro_config):
    """one_device(family, num_heads) -> model, params, loss, gradients; each computed once."""
    known = {}

    def get(family, num_heads=8):
        if (family, num_heads) not in known:
            model = _model(micro_config, family, num_heads)
            params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
            # Heads and channels that all differ: one that a shard takes for another shows.
            params = jax.tree.map(lambda x: x * (1 + 0.2 * np.sin(np.arange(x.size)).reshape(x.shape)), params)
            known[family, num_heads] = model, params, *_loss_and_gradients(model, params)[:2]
        return known[family, num_heads]

    return get


def _activation_gathers(program):
    """The all-gathers whose result has a dimension that only the sequence, or a device's part of it, can have."""
    results = re.findall(r"= \S*?\[([\d,]*)\]\S* all-gather(?:-start)?\(", program)
    parts = {LENGTH // n for n in (1, 2, 4, 8)}  # 4: a chunk of the loss
    return [shape for shape in results if parts & set(map(int, filter(None, shape.split(","))))]


MESHES = [
    ({"fsdp": 2, "tensor": 2, "context": 2}, 2),
    ({"context": 8}, 2),  # four devices share the rows of a head
    ({"data": 2, "tensor": 2, "context": 2}, 8),
    ({"fsdp": 4, "tensor": 2}, 8),
]


@pytest.mark.parametrize(
    "family, sizes, num_heads",
    [
        pytest.param(
            family,
            *mesh,
            marks=[] if mesh is MESHES[0] and family in ("cubit", "cem") else [pytest.mark.full],
            id=f"{family}-{mesh}",
        )
        for family in FAMILIES
        for mesh in MESHES
    ],
)
def test_loss_and_gradients_are_those_of_one_device(family, sizes, num_heads, one_device, error):
    model, params, loss, gradients = one_device(family, num_heads)
    actual_loss, actual, program = _loss_and_gradients(model, params, sizes)
    assert actual_loss == pytest.approx(loss, rel=1e-5)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(gradients), strict=True):
        assert error(a, b) < 1e-5, jax.tree_util.keystr(path)
    assert not _activation_gathers(program)


@pytest.mark.parametrize("family", FAMILIES)
def test_large_parameters_and_moments_are_sharded(family, micro_config):
    config = micro_config(
        family,
        **{
            "model.model_dim": 512,
            "model.num_heads": 8,
            "model.head_dim": 64,
            "model.mlp_dim": 1024,
            "model.vocab_size": 8192,
        },
    )
    model = LanguageModel(ModelConfig.from_config(config))
    mesh = partitioning.make_mesh({"fsdp": 4, "tensor": 2})
    state = jax.eval_shape(lambda: train_step.init_state(model, config))
    large = 0
    for leaf, sharding in zip(*map(jax.tree.leaves, (state, partitioning.state_shardings(mesh, state))), strict=True):
        if leaf.size * leaf.dtype.itemsize > 2**20:
            large += 1
            assert math.prod(sharding.shard_shape(leaf.shape)) * 8 == leaf.size
    # Each parameter and its two moments; CEM's tied projections are four in place of seven.
    assert large >= 3 * (6 if family == "cem" else 7)


@pytest.mark.parametrize("family", ["cubit", "deltaformer"])
def test_devices_exchange_16_bit_arrays(family):
    """Of what has the size of v only u is float32, and only a cache that is filled asks for it."""
    mixer = MIXERS[family](num_heads=8, head_dim=4, dtype=jnp.bfloat16)
    x = jnp.zeros((1, LENGTH, 48), jnp.bfloat16)
    params = jax.eval_shape(lambda: mixer.init(jax.random.key(0), x))
    with jax.set_mesh(partitioning.make_mesh({"context": 8})):
        program = str(jax.make_jaxpr(mixer.apply)(params, x))
    exchanged = re.findall(r":(\w+)\[([\d,]*)\]\S* = all_to_all", program)
    large = [dtype for dtype, shape in exchanged if math.prod(map(int, shape.split(","))) * 8 >= LENGTH * 8 * 4]
    assert sorted(large) == ["bf16"] * 5 + ["f32"]
