"""Checkpoints that hold exactly what was saved, refuse another model, and never fail silently."""

import functools
import hashlib
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import config_dict

from cubit_jax import partitioning
from cubit_jax.model import LanguageModel, ModelConfig
from cubit_jax.runtime.errors import UserError
from cubit_jax.training import checkpoint
from cubit_jax.training import step as train_step
from cubit_jax.training.checkpoint import Checkpoints, SaveError, load_params

ONE_DEVICE = dict.fromkeys(partitioning.AXES, 1)


def make_model(config):
    return LanguageModel(ModelConfig.from_config(config))


@functools.lru_cache
def shapes_of(config_json, data=1, fsdp=1, tensor=1):
    """Shapes with shardings of the state on a mesh."""
    config = config_dict.ConfigDict(json.loads(config_json))
    mesh = partitioning.make_mesh(
        {**ONE_DEVICE, "data": data, "fsdp": fsdp, "tensor": tensor}, jax.devices()[: data * fsdp * tensor]
    )
    return train_step.state_shapes(make_model(config), config, mesh)[0]


def make_state(config, step, **sizes):
    """A state of random numbers, as after `step` updates."""
    random = np.random.default_rng(step)

    def one(leaf):
        array = random.normal(size=leaf.shape) if leaf.ndim else np.asarray(step)
        return jax.device_put(array.astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(one, shapes_of(config.to_json(), **sizes))


def assert_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert all(map(np.array_equal, jax.tree.leaves(actual), jax.tree.leaves(expected)))


def steps_on_disk(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())


@pytest.fixture
def config(micro_config):
    return micro_config("cubit")


def test_state_and_position_come_back_in_a_new_manager(config, tmp_path):
    first = Checkpoints(tmp_path, keep=2)
    assert first.latest_step is None
    for step in (10, 20, 30):
        first.save(step, make_state(config, step), json.dumps({"position": step}).encode())
    first.close()
    assert steps_on_disk(tmp_path) == [20, 30]
    second = Checkpoints(tmp_path, keep=2)
    assert second.latest_step == 30
    state, data_state = second.restore(shapes_of(config.to_json()))
    assert_equal(state, make_state(config, 30))
    assert json.loads(data_state) == {"position": 30}
    second.save(30, state, data_state)  # the end of a run whose last step was on the interval
    second.close()
    params, step = load_params(tmp_path, make_model(config))
    assert step == 30
    assert_equal(params, state["params"])


def test_save_goes_on_while_the_state_is_donated(config, tmp_path):
    state = make_state(config, 7)
    expected = jax.device_get(state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, state, b"{}")
    jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=0)(state)
    checkpoints.close()
    assert_equal(Checkpoints(tmp_path).restore(shapes_of(config.to_json()))[0], expected)


def test_another_mesh_restores_the_same_numbers(config, tmp_path):
    state = make_state(config, 5, data=2, fsdp=2, tensor=2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, state, b"{}")
    checkpoints.close()
    for sizes in ({}, {"fsdp": 2}, {"data": 8}):
        shapes = shapes_of(config.to_json(), **sizes)
        restored, _ = Checkpoints(tmp_path).restore(shapes)
        assert_equal(restored, state)
        assert all(a.sharding == b.sharding for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(shapes)))


_OTHER_DEVICES = """
import hashlib, json, sys
import jax
from ml_collections import config_dict
from cubit_jax import partitioning
from cubit_jax.training import step as train_step
from cubit_jax.training.checkpoint import Checkpoints
from cubit_jax.model import LanguageModel, ModelConfig

config = config_dict.ConfigDict(json.loads(sys.argv[1]))
mesh = partitioning.make_mesh({**dict.fromkeys(partitioning.AXES, 1), "fsdp": -1})
shapes = train_step.state_shapes(LanguageModel(ModelConfig.from_config(config)), config, mesh)[0]
state, position = Checkpoints(sys.argv[2]).restore(shapes)
print(jax.device_count(), json.loads(position)["row"],
      hashlib.sha256(b"".join(bytes(jax.device_get(leaf)) for leaf in jax.tree.leaves(state))).hexdigest())
"""


@pytest.mark.parametrize("devices", [1, 4])
def test_process_with_fewer_devices_restores_the_same_bits(config, tmp_path, devices):
    """Parameters and moments saved on 2 x 4 devices; unlike a mesh over some, the others do not exist."""
    state = make_state(config, 5, data=2, fsdp=4)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, state, b'{"row": 40}')
    checkpoints.close()
    expected = hashlib.sha256(b"".join(bytes(jax.device_get(leaf)) for leaf in jax.tree.leaves(state))).hexdigest()
    output = subprocess.run(
        [sys.executable, "-c", _OTHER_DEVICES, config.to_json(), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=pathlib.Path(__file__).parents[2],
        env=os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"},
    )
    assert output.stdout.split() == [str(devices), "40", expected], output.stderr


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"model.num_layers": 4}, ["layers/block_0", "[2, 16, 2, 8]", "[4, 16, 2, 8]"]),
        ({"model.model_dim": 32}, ["embed/embedding", "[300, 16]", "[300, 32]"]),
        ({"model.mixers": ("deltaformer",), "model.options": {}}, ["w_proj", "missing", "r_proj", "only"]),
        ({"model.scan_layers": False}, ["layer_0/mixer/k_proj/kernel is missing"]),
        ({"model.tie_embeddings": True}, ["lm_head/kernel is in the checkpoint only"]),
    ],
    ids=str,
)
def test_checkpoint_of_another_model_lists_what_differs(micro_config, config, tmp_path, fields, words):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(config, 1), b"{}")
    checkpoints.wait()
    other = micro_config("cubit", **{name: value for name, value in fields.items() if name != "model.options"})
    if "model.options" in fields:
        other.model.options = fields["model.options"]
    for restore in (
        lambda: checkpoints.restore(shapes_of(other.to_json())),
        lambda: load_params(tmp_path, make_model(other)),
    ):
        with pytest.raises(UserError, match="is of another model") as caught:
            restore()
        listed = str(caught.value)
        assert "\n" not in listed and len(listed) < 1500
    everything = "; ".join(
        checkpoint.differences(shapes_of(config.to_json())["params"], shapes_of(other.to_json())["params"])
    )
    assert all(word in everything for word in words), everything
    checkpoints.close()


def test_save_into_a_folder_that_is_gone_or_no_folder_fails_at_once(config, tmp_path):
    workdir = tmp_path / "run"
    checkpoints = Checkpoints(workdir)
    checkpoints.save(1, make_state(config, 1), b"{}")
    checkpoints.wait()
    shutil.rmtree(workdir / "checkpoints")
    (workdir / "checkpoints").write_text("in the way")
    with pytest.raises(
        SaveError, match=r"cannot write a checkpoint to .*run/checkpoints: .*xists.*; there is no earlier"
    ):
        checkpoints.save(2, make_state(config, 2), b"{}")
    shutil.rmtree(workdir)
    with pytest.raises(SaveError, match="No such file or directory"):
        checkpoints.save(2, make_state(config, 2), b"{}")


def test_failure_in_the_background_is_raised_before_the_next_save(config, tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(config, 1), b"{}")
    checkpoints.wait()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))  # stands for a full disk: larger files fail
    try:
        checkpoints.save(2, make_state(config, 2), b"{}")
        with pytest.raises(SaveError, match=r"File too large.*; the last good checkpoint is 1$"):
            for _ in range(600):  # what the training loop does after each step
                checkpoints.check()
                time.sleep(0.1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert steps_on_disk(tmp_path)[0] == 1


def test_missing_checkpoints_are_one_line(config, tmp_path):
    with pytest.raises(UserError, match="no checkpoint in"):
        load_params(tmp_path, make_model(config))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match=r"no checkpoint in .* is empty"):
        load_params(tmp_path, make_model(config))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot use"):
        Checkpoints(tmp_path / "file")


def test_bfloat16_checkpoint_is_not_taken_for_float32():
    saved = {"a": jnp.zeros(3, jnp.bfloat16)}
    assert checkpoint.differences(saved, {"a": jnp.zeros(3)}) == [
        "a is bfloat16[3] in the checkpoint and float32[3] in the model"
    ]
