"""implementation="pallas" from outside: compiled by name, refused with reasons, divided over devices."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cubit_jax import ops, partitioning
from cubit_jax.model import LanguageModel, ModelConfig
from cubit_jax.ops import dispatch
from cubit_jax.training import step as train_step


def gradients(query, key, rhs, ridge):
    def loss(*arrays):
        return jnp.sum(ops.kernel_solve(*arrays[:3], ridge=arrays[3], implementation="pallas"))

    return jax.grad(loss, (0, 1, 2, 3))(query, key, rhs, ridge)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        *((24, jnp.bfloat16), (96, jnp.float32), (256, jnp.bfloat16)),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((24, jnp.float32), (96, jnp.bfloat16))),
        pytest.param(256, jnp.float32, marks=pytest.mark.full),
    ],
)
def test_lowered_for_a_tpu_it_has_the_kernels_by_name(head_dim, dtype):
    """Each width that head dimensions are padded to; libtpu compiles 64 and 128 in tpu_compile_test."""
    x, ridge = jax.ShapeDtypeStruct((1, 200, 2, head_dim), dtype), jax.ShapeDtypeStruct((2,), jnp.float32)
    with dispatch.backend("tpu"):
        text = jax.export.export(jax.jit(gradients), platforms=["tpu"])(x, x, x, ridge).mlir_module()
    assert all(name in text for name in ("kernel_solve_tpu_forward", "kernel_solve_tpu_backward"))


def test_lowered_for_a_gpu_it_has_the_kernels_by_name():
    x, ridge = jax.ShapeDtypeStruct((1, 200, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.float32)
    device = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with dispatch.backend("gpu"), jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(gradients).trace(x, x, x, ridge).lower(lowering_platforms=("cuda",)).as_text()
    for name in ("kernel_solve_gpu_forward", "kernel_solve_gpu_adjoint", "kernel_solve_gpu_query"):
        assert f'name = "{name}"' in text


@pytest.mark.parametrize(("platform", "reason"), [("tpu", "the TPU kernel"), ("gpu", "it has never run on a GPU")])
def test_what_no_kernel_takes_goes_to_xla_with_one_line(platform, reason, caplog):
    x, ridge = jnp.ones((1, 4, 1, 300)), jnp.ones(1)
    caplog.set_level(logging.INFO, logger="absl")
    with dispatch.backend(platform):
        with pytest.raises(NotImplementedError, match=r"head.*300"):
            ops.kernel_solve(x, x, x, ridge=ridge, implementation="pallas")
        for _ in range(2):
            assert bool(jnp.isfinite(ops.kernel_solve(x, x, x, ridge=ridge)).all())
    (line,) = (record.getMessage() for record in caplog.records if "kernel_solve" in record.getMessage())
    assert line.startswith(f"kernel_solve: implementation xla on {platform}; not pallas: {reason}")


@pytest.mark.parametrize(
    ("platform", "form"), [("tpu", "ridge"), ("gpu", "ridge"), pytest.param("tpu", "beta", marks=pytest.mark.full)]
)
def test_divided_over_batch_and_heads(platform, form, error):
    """Interpreted, against one device without Pallas. Every row and head has its own size, so a wrong offset shows."""
    rng = np.random.default_rng(0)
    size = np.sqrt((1 + np.arange(2.0))[:, None, None, None] * (1 + np.arange(4.0))[:, None])
    query, key, rhs, cotangent = (jnp.asarray(size * rng.normal(size=(2, 40, 4, 16)), jnp.float32) for _ in range(4))
    diagonal = jnp.array([0.5, 0.7, 0.9, 1.1]) if form == "ridge" else jnp.asarray(rng.uniform(size=(2, 40, 4)))
    if form == "ridge":
        key = query / jnp.linalg.norm(query, axis=-1, keepdims=True)
    ids = jnp.asarray([[1] * 40, [1] * 25 + [2] * 15])

    def both(implementation):
        def solve(query, key, rhs, diagonal, ids):
            return ops.kernel_solve(
                query, key, rhs, **{form: diagonal}, segment_ids=ids, scale=0.5, implementation=implementation
            )

        divided = partitioning.per_shard(solve, f"BLHK,BLHK,BLHK,{'H' if form == 'ridge' else 'BLH'},BL->BLHK")

        def run(query, key, rhs, diagonal, ids, cotangent):
            u, back = jax.vjp(lambda *arrays: divided(*arrays, ids), query, key, rhs, diagonal)
            return u, *back(cotangent)

        return jax.jit(run)

    arrays = (query, key, rhs, diagonal, ids, cotangent)
    expected = both("xla")(*arrays)
    mesh = partitioning.make_mesh({"replica": 1, "data": 2, "fsdp": 1, "tensor": 4, "context": 1})
    full, rows = P("data", None, "tensor"), P("data")
    specs = (full, full, full, P("tensor") if form == "ridge" else full, rows, full)
    with jax.set_mesh(mesh), dispatch.interpret(platform):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs)]
        compiled = both("pallas").lower(*placed).compile()
        actual = compiled(*placed)
    assert "all-gather" not in compiled.as_text()
    assert error(actual[0], expected[0]) <= 1e-5
    for name, a, b in zip(("query", "key", "rhs", form), actual[1:], expected[1:]):
        assert error(a, b) <= 1e-4, name


@pytest.mark.slow
def test_three_hundred_bfloat16_steps_stay_finite(micro_config):
    """Two Cubit layers on random text, through the interpreted TPU kernels of attention and of the solve."""
    fields = {"model.implementation": "pallas", "model.dtype": "bfloat16", "batch_size": 2, "num_steps": 300}
    config = micro_config("cubit", **fields)
    model = LanguageModel(ModelConfig.from_config(config))
    rng = np.random.default_rng(0)
    rows = np.ones((2, config.seq_len), np.int32)
    with dispatch.interpret():
        state = train_step.init_state(model, config)
        step = jax.jit(train_step.make_train_step(model, config))
        for _ in range(300):
            tokens = rng.integers(0, config.model.vocab_size, (2, config.seq_len + 1), dtype=np.int32)
            batch = {
                "tokens": tokens[:, :-1],
                "targets": tokens[:, 1:],
                "weights": rows.astype(np.float32),
                "segment_ids": rows,
                "positions": np.cumsum(rows, axis=1) - 1,
            }
            state, metrics = step(state, batch)
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(metrics)))
    assert state["step"] == 300
    assert state["skipped"] == 0
