"""A plan is made of the real training step, for devices that are not there; one line says what does not fit."""

import dataclasses
import importlib
import json
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from cubit_jax import partitioning, plan
from cubit_jax.model import LanguageModel, ModelConfig
from cubit_jax.planning import advice as plan_advice
from cubit_jax.planning import topology
from cubit_jax.planning.topology import GIB, Topology
from cubit_jax.runtime.errors import UserError
from cubit_jax.training import step as train_step
from pallas_kernels import kernel_solve_tpu


def run(*arguments, config="configs/cubit.py:tiny"):
    """The program in a process of its own, as a user starts it: (exit code, stdout, stderr)."""
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, "-m", "cubit_jax.plan", f"--config={config}", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    return done.returncode, done.stdout, done.stderr


def of_cpus(memory=GIB):
    """The test's own eight devices as a topology: the compiler for them is always there."""
    return Topology("cpu:8", "cpu", jax.devices(), memory, "XLA")


@pytest.fixture(scope="module")
def libtpu():
    pytest.importorskip("libtpu", reason="libtpu is not installed: the extra `test` brings it")
    topology.prepare()


@pytest.mark.usefixtures("libtpu")
def test_tiny_run_on_a_small_slice(tmp_path):
    path = tmp_path / "plan.json"
    code, out, _ = run(
        "--topology=v5e:2x4",
        "--config.model.num_layers=2",
        "--config.mesh.data=1",
        "--config.mesh.fsdp=-1",
        "--config.model.remat=full",
        f"--json={path}",
    )
    assert code == 0, out
    found = json.loads(path.read_text())
    assert found["fits"] and found["mesh"]["fsdp"] == found["num_devices"] == 8
    assert found["implementations"] == {"kernel_solve": ["pallas"], "attention": ["pallas"]}
    assert found["parameters"] < 4 * found["num_parameters"] / 7  # some of them are whole: norms and scalars a head
    assert 2 * found["parameters"] <= found["optimizer"] < 2.01 * found["parameters"] + 100
    assert found["parameters"] + found["optimizer"] < found["peak"] < found["available"] == 15.75 * GIB
    assert found["collectives"]["all-gather"]["sent"] > 4 * found["num_parameters"] / 2
    assert found["unknown_loops"] == []
    assert found["flops_executed"] == pytest.approx(found["flops"] * 4 / 3)
    assert found["seconds_at_peak"] == pytest.approx(found["flops_executed"] / 8 / 197e12)
    for word in ("v5e:2x4", "fsdp=8", "kernel_solve: pallas", "GiB of 15.75: it fits", "all-gather", "FLOPs"):
        assert word in out


@pytest.mark.usefixtures("libtpu")
def test_state_that_does_not_fit_is_one_line_and_exit_code_2():
    code, out, err = run(
        "--topology=v5e:2x4",
        "--tries=0",
        "--config.model.num_layers=60",
        "--config.mesh.data=-1",
        "--config.mesh.fsdp=1",
        config="configs/cubit.py:1p3b",
    )
    assert code == 2, err
    assert len(out.splitlines()) == 1
    numbers = re.fullmatch(
        r"does not fit: v5e:2x4 needs ([\d.]+) GiB a device for the state alone and a TPU v5 lite "
        r"has 15\.75 \(parameters ([\d.]+), optimizer state ([\d.]+), mesh data=8\); (.*)\n",
        out,
    )
    assert numbers, out
    assert float(numbers[1]) == pytest.approx(float(numbers[2]) + float(numbers[3]), abs=0.02)
    assert "--config.mesh.fsdp=8" in numbers[4] and "estimated" in numbers[4]


@pytest.mark.usefixtures("libtpu")
def test_refusal_of_the_compiler_becomes_numbers(micro_config):
    config = micro_config("transformer", **{"batch_size": 8 * 2**17, "model.remat": "none", "model.model_dim": 128})
    found = plan.make_plan(config, topology.open_topology("v5e:2x4"))
    assert not found.fits
    assert found.peak > found.available > 100 * (found.parameters + found.optimizer)
    assert found.suggestion["accumulation_steps"] > 1
    assert found.suggestion_peak < found.available


@pytest.mark.usefixtures("libtpu")
def test_slices_split_the_batch_and_share_only_gradients(micro_config):
    target = topology.open_topology("v5e:2x2", 2)
    assert [target.group(device) for device in target.devices] == [0] * 4 + [1] * 4
    mesh = partitioning.make_mesh({"replica": 2, "data": 1, "fsdp": 2, "tensor": 2}, target.devices)
    assert [{device.slice_index for device in part.flat} for part in mesh.devices] == [{0}, {1}]
    config = micro_config("transformer", **{"mesh.replica": 2, "mesh.data": 1, "mesh.fsdp": -1})
    found = plan.make_plan(config, target, 2)
    assert found.collectives["all-reduce"]["across"] > 0
    assert "between slices" in plan.describe(found)
    with pytest.raises(ValueError, match=r"2 slices cannot be dealt to .* 1 x 1 x 1: set mesh.replica=2"):
        partitioning.make_mesh({"data": 1, "tensor": 8}, target.devices)


@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize("name, kind", [("v6e:2x4", "TPU v6 lite"), ("v5p:2x2x2", "TPU v5")])
def test_kernels_are_planned_for_the_chips_of_the_topology(name, kind):
    seen = []

    def op(x):
        seen.append(kernel_solve_tpu._device_kind())
        return x

    mesh = partitioning.make_mesh({"data": -1}, topology.open_topology(name).devices)
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=partitioning.batch_sharding(mesh))
    with jax.set_mesh(mesh):
        jax.jit(partitioning.per_shard(op, "BL->BL")).lower(x)
    assert seen == [kind]
    assert kernel_solve_tpu._device_kind() == ""


@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize("family", ["transformer", "deltaformer", "cubit", "cem"])
def test_shipped_settings_shard_every_large_array(family):
    config = importlib.import_module(f"configs.{family}").get_config("1p3b")
    target = topology.open_topology("v5e:16x16")
    mesh = partitioning.make_mesh(config.mesh, target.devices)
    shapes, _ = train_step.state_shapes(LanguageModel(ModelConfig.from_config(config)), config, mesh)
    large = [leaf for leaf in jax.tree.leaves(shapes) if leaf.size * leaf.dtype.itemsize > 2**20]
    assert len(large) > 15
    assert all(math.prod(leaf.sharding.shard_shape(leaf.shape)) * 256 == leaf.size for leaf in large)


@pytest.mark.parametrize(
    "name, words",
    [
        ("v9:2x2", ["v9:2x2", "v5e:2x4", "v5p:2x2x1", "gpu:h100x8"]),
        ("v5e", ["is not known", "v5e:2x4"]),
        ("gpu:k80x8", ["is not known", "gpu:h100x8"]),
        ("a100:2x4", ["is not known", "gpu:a100x8"]),  # a GPU is no TPU, and no TPU is a GPU
        ("gpu:v5ex8", ["is not known", "v5e:2x4"]),
        ("gpu:b200x8", ["is not known", "gpu:h200x8"]),  # its peak is known, what its compiler needs is not
        ("gpu:h100x12", ["12 GPUs", "8 of a host"]),
    ],
)
def test_unknown_topology_lists_the_known_ones(name, words):
    with pytest.raises(UserError) as caught:
        topology.open_topology(name)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("libtpu")
def test_shape_that_the_chip_does_not_have():
    with pytest.raises(UserError, match=r"v5e:3x5 is not one that libtpu .* not divisible .*known are"):
        topology.open_topology("v5e:3x5")


@pytest.mark.parametrize(
    "name, what",
    [
        ("v5e:2x4", r"libtpu, is not installed: pip install -e '\.\[test\]'"),
        ("gpu:h100x8", r"CUDA plugin, is not installed: pip install -e '\.\[gpu\]'"),
    ],
)
def test_missing_compiler_says_what_to_install(name, what, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UserError, match=what):
        topology.open_topology(name)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--topology=v5e:2x4x"], "is not known"),
        (["--topology=v5e:2x4", "--json=/nowhere/plan.json"], "cannot write --json=/nowhere/plan.json"),
        (["--topology=v5e:2x4", "--json=/"], "cannot write --json=/: it is a folder"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_1(arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (1, "") and len(err.splitlines()) == 1 and message in err


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"mesh.data": 3}, r"mesh sizes multiply to 3, but there are 8 devices \(on cpu:8\)"),
        ({"batch_size": 12}, r"batch_size=12 must be a multiple of 8"),
        ({"accumulation_steps": 0}, "accumulation_steps=0 must be at least 1"),
        ({"model.remat": "some"}, "model.remat: 'some' is not one of"),
    ],
)
def test_mesh_and_config_are_checked_as_in_training(changed, message, micro_config):
    with pytest.raises(UserError, match=message):
        plan.make_plan(micro_config("cubit", **changed), of_cpus())


@pytest.mark.full
def test_what_does_not_fit_gets_a_setting_that_was_compiled(micro_config):
    config = micro_config("transformer", **{"batch_size": 64, "seq_len": 128, "model.mlp_dim": 512})
    fits = plan.make_plan(config, of_cpus())
    assert fits.fits and fits.implementations == {"attention": ["xla"]}
    found = plan.make_plan(config, of_cpus(memory=fits.peak // 2), tries=2)
    assert not found.fits and found.suggestion_compiled
    assert found.suggestion_peak <= found.available
    line = plan.refusal(found)
    assert "\n" not in line and f"{plan_advice.as_flags(found.suggestion)} (compiled: " in line


def test_what_cannot_fit_says_so(micro_config):
    found = plan.make_plan(micro_config("transformer"), of_cpus(memory=1000), tries=1)
    assert not found.fits and found.suggestion is None
    assert plan.refusal(found).endswith("more devices, or a smaller batch")


def test_advice_changes_as_little_as_it_can(micro_config):
    config = micro_config("transformer", **{"batch_size": 64, "model.remat": "full"})
    known = plan.Plan(
        settings=plan_advice.settings(config),
        topology="t",
        num_slices=1,
        num_devices=8,
        device_kind="d",
        compiler="c",
        mesh={"replica": 1, "data": 8, "fsdp": 1, "tensor": 1, "context": 1},
        num_parameters=1,
        parameters=100,
        optimizer=200,
        available=1000,
        peak=2400,
        fits=False,
        flops=1.0,
        flops_executed=1.0,
        seconds_at_peak=None,
    )

    def state_bytes(config):
        fsdp = config.mesh.get("fsdp", 1)
        return 100 // fsdp, 200 // fsdp

    # 2000 beside state and gradients; four micro-batches leave 500, beside 300 of state and two sums of gradients.
    assert plan_advice.suggest(config, [known], state_bytes) == ({"accumulation_steps": 8}, 300 + 200 + 250)
    state_heavy = dataclasses.replace(known, parameters=400, optimizer=800)

    def heavy(config):
        return tuple(4 * size for size in state_bytes(config))

    # With fsdp=2 state and gradients alone are 800 or, of several micro-batches, 1000; with 4 and two of them 500.
    assert plan_advice.suggest(config, [state_heavy], heavy) == (
        {"mesh.data": 2, "mesh.fsdp": 4, "accumulation_steps": 2},
        500 + 400,
    )
    no_room = dataclasses.replace(known, available=10)
    assert plan_advice.suggest(config, [no_room], state_bytes) is None


def _largest(program):
    """Elements of the largest array of any type in a compiled program."""
    return max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w+\[(\d[\d,]*)\]", program))


def test_logits_of_a_batch_never_exist_whole(micro_config):
    """Of the compiled step, on one device: no array has as many elements as [B, L, V], of any shape or type."""
    config = micro_config("transformer", **{"seq_len": 512, "batch_size": 4, "model.vocab_size": 1024})
    whole = config.batch_size * config.seq_len * config.model.vocab_size
    model = LanguageModel(ModelConfig.from_config(config))
    mesh = partitioning.make_mesh({}, jax.devices()[:1])
    with jax.set_mesh(mesh):
        shapes, shardings = train_step.state_shapes(model, config, mesh)
        step = train_step.compile_train_step(model, config, shapes, shardings, partitioning.batch_sharding(mesh))
    assert _largest(step.as_text()) <= whole // 4  # a chunk of the loss
    # The same look at a program that has them finds them.
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.seq_len), jnp.int32)
    logits = (
        jax.jit(lambda params, tokens: model.apply({"params": params}, tokens))
        .lower(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes["params"]), tokens)
        .compile()
    )
    assert _largest(logits.as_text()) >= whole


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize("name", ["v5e:16x16", "v5p:4x4x8"])
@pytest.mark.parametrize("length", [2048, 8192])
@pytest.mark.parametrize("size", ["125m", "350m", "1p3b"])
def test_shipped_settings_fit(size, length, name):
    code, out, err = run(
        f"--topology={name}", f"--config.seq_len={length}", "--tries=0", config=f"configs/cubit.py:{size}"
    )
    assert code == 0, out + err
    assert "kernel_solve: pallas, attention: pallas" in out
