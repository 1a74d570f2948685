"""One update: weighted by tokens, the same over micro-batches and devices, left out where a number is not finite."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import config_dict

from cubit_jax import partitioning
from cubit_jax.model import LanguageModel, ModelConfig
from cubit_jax.training import step as train_step


def make_batch(config, real=None, seed=0):
    """A batch of random tokens; `real[i]` tokens of row i count, the rest is padding."""
    random = np.random.default_rng(seed)
    shape = (config.batch_size, config.seq_len)
    tokens = random.integers(0, config.model.vocab_size, (shape[0], shape[1] + 1), dtype=np.int32)
    real = np.full(shape[0], shape[1]) if real is None else np.asarray(real)
    mask = np.arange(shape[1]) < real[:, None]
    return {
        "tokens": tokens[:, :-1] * mask,
        "targets": tokens[:, 1:] * mask,
        "weights": mask.astype(np.float32),
        "segment_ids": mask.astype(np.int32),
        "positions": np.arange(shape[1], dtype=np.int32) * mask,
    }


@functools.lru_cache(maxsize=2)
def compiled(config_json, sizes=()):
    """The compiled step, the shardings of its state, the mesh and the sharding of a batch."""
    config = config_dict.ConfigDict(json.loads(config_json))
    model = LanguageModel(ModelConfig.from_config(config))
    sizes = {**dict.fromkeys(partitioning.AXES, 1), **dict(sizes)}
    mesh = partitioning.make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    with jax.set_mesh(mesh):
        shapes, shardings = train_step.state_shapes(model, config, mesh)
        rows = partitioning.batch_sharding(mesh)
        return train_step.compile_train_step(model, config, shapes, shardings, rows), shardings, mesh, rows


@functools.lru_cache(maxsize=2)
def initial(config_json):
    """The state before the first step, on the host; how it is split over devices and micro-batches does not matter."""
    config = config_dict.ConfigDict(json.loads(config_json))
    model = LanguageModel(ModelConfig.from_config(config))
    return jax.device_get(jax.jit(lambda: train_step.init_state(model, config))())


def run(config, batches, **sizes):
    """The state after these batches and the metrics of every step, on one device or a mesh of these sizes."""
    step, shardings, mesh, rows = compiled(config.to_json(), tuple(sizes.items()))
    start = config.copy_and_resolve_references()
    start.accumulation_steps = 1
    state, history = jax.device_put(initial(start.to_json()), shardings), []
    with jax.set_mesh(mesh):
        for batch in batches:
            state, metrics = step(state, jax.device_put(batch, rows))
            history.append(jax.device_get(metrics))
    return state, history


def assert_same_params(actual, expected, limit=1e-6):
    """Every parameter equal, and the comparison not empty: training has moved them."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected)):
        assert np.max(np.abs(np.asarray(a) - np.asarray(b))) <= limit, jax.tree_util.keystr(path)


@pytest.fixture(scope="module")
def uneven(micro_config):
    """A config, batches whose rows have 10 and 90 real tokens, and the result of three steps of the whole batch."""
    # An epsilon above the rounding of tiny gradients, which Adam would otherwise turn into steps of full size.
    config = micro_config(
        "cubit", **{"seq_len": 96, "batch_size": 8, "optimizer.eps": 1e-4, "optimizer.warmup_steps": 0}
    )
    batches = [make_batch(config, real=[10, 90] * 4, seed=seed) for seed in range(3)]
    return config, batches, run(config, batches)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.full)])
def test_accumulation_is_weighted_by_tokens(uneven, count):
    config, batches, (expected, expected_history) = uneven
    config = config.copy_and_resolve_references()
    config.accumulation_steps = count
    state, history = run(config, batches)
    assert_same_params(state["params"], expected["params"])
    for actual, whole in zip(history, expected_history):
        assert actual["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        assert actual["learning_rate"] == whole["learning_rate"]
        assert actual["tokens"] == 400


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        *(pytest.param(sizes, marks=pytest.mark.full) for sizes in ({"data": 8}, {"fsdp": 8})),
    ],
    ids=str,
)
def test_devices_do_not_change_the_result(uneven, sizes):
    config, batches, (expected, expected_history) = uneven
    state, history = run(config, batches, **sizes)
    assert_same_params(state["params"], expected["params"])
    assert history[-1]["loss"] == pytest.approx(expected_history[-1]["loss"], rel=1e-6)
    kernel = state["params"]["layers"]["block_0"]["mixer"]["q_proj"]["kernel"]
    moments = state["opt_state"][1].mu["layers"]["block_0"]["mixer"]["q_proj"]["kernel"]
    share = kernel.size // (sizes.get("fsdp", 1) * sizes.get("tensor", 1))
    assert kernel.addressable_shards[0].data.size == moments.addressable_shards[0].data.size == share


@pytest.mark.full
def test_temporary_memory_falls_with_accumulation(micro_config):
    memory = {}
    for count in (1, 8):
        config = micro_config("transformer", **{"batch_size": 64, "seq_len": 64, "accumulation_steps": count})
        memory[count] = compiled(config.to_json())[0].memory_analysis().temp_size_in_bytes
    assert memory[8] < 0.3 * memory[1]


def test_update_that_is_not_finite_is_left_out_and_counted(micro_config):
    config = micro_config("transformer")
    batches = [make_batch(config, seed=seed) for seed in range(4)]
    bad = make_batch(config)
    bad["weights"][0, 0] = np.inf
    before, _ = run(config, batches[:2])
    during, history = run(config, [*batches[:2], bad, bad])
    for name in ("params", "opt_state"):
        assert all(map(np.array_equal, jax.tree.leaves(before[name]), jax.tree.leaves(during[name])))
    assert int(during["step"]) == 4 and int(during["opt_state"][1].count) == 2
    after, history = run(config, [*batches[:2], bad, bad, *batches[2:]])
    straight, straight_history = run(config, batches)
    assert [int(metrics["skipped_in_a_row"]) for metrics in history] == [0, 0, 1, 2, 0, 0]
    assert int(after["skipped"]) == 2
    assert history[-1]["learning_rate"] == straight_history[-1]["learning_rate"]
    assert all(map(np.array_equal, jax.tree.leaves(after["params"]), jax.tree.leaves(straight["params"])))


@pytest.mark.full
def test_bfloat16_compute_keeps_float32_weights_that_move_at_a_small_rate(micro_config):
    config = micro_config(
        "cubit",
        **{
            "model.dtype": "bfloat16",
            "model.remat": "full",
            "num_steps": 100,
            "optimizer.learning_rate": 1e-5,
            "optimizer.warmup_steps": 0,
            "batch_size": 4,
        },
    )
    batches = [make_batch(config, seed=seed) for seed in range(100)]
    start, _ = run(config, [])
    state, history = run(config, batches)
    assert all(
        leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((state["params"], state["opt_state"])) if leaf.ndim
    )
    assert all(np.isfinite(metrics["loss"]) for metrics in history)
    moved = sum(int((a != b).sum()) for a, b in zip(*map(jax.tree.leaves, (start["params"], state["params"]))))
    assert moved > 0.99 * sum(leaf.size for leaf in jax.tree.leaves(state["params"]))


def test_dropout_depends_on_the_step_only(micro_config):
    config = micro_config("transformer", **{"model.dropout": 0.3, "optimizer.learning_rate": 1e-9})
    batch = make_batch(config)
    losses = [[float(metrics["loss"]) for metrics in run(config, [batch] * 3)[1]] for _ in range(2)]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3  # the same rows and, to rounding, the same weights: another mask a step


def test_diagnostics_of_every_layer(micro_config):
    config = micro_config("cubit")
    model = LanguageModel(ModelConfig.from_config(config))
    params = jax.jit(lambda: train_step.init_state(model, config)["params"])()
    values = train_step.make_diagnostics(model)(params, make_batch(config))
    for name in ("ridge_min", "ridge_max", "rescale_min", "rescale_max", "diagonal_min"):
        assert values[f"layers/block_0/mixer/{name}"].shape == (2,)
    np.testing.assert_allclose(values["layers/block_0/mixer/ridge_max"], 1e-10, rtol=1e-4)
