"""The mesh, the parameter rules, and ops run on each device's share, on eight fake devices."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cubit_jax import partitioning

SIZES = {"replica": 1, "data": 2, "fsdp": 2, "tensor": 2, "context": 1}


@pytest.fixture
def mesh():
    return partitioning.make_mesh(SIZES)


def test_rest_of_the_devices_goes_to_the_axis_of_minus_one():
    assert partitioning.mesh_sizes({**SIZES, "data": -1}, 32)["data"] == 8
    assert list(partitioning.mesh_sizes({"data": -1}, 8).items()) == [
        ("replica", 1),
        ("data", 8),
        ("fsdp", 1),
        ("tensor", 1),
        ("context", 1),
    ]


@pytest.mark.parametrize(
    "sizes, words",
    [
        ({"data": 3}, ["3", "8 devices"]),
        ({"data": -1, "tensor": 3}, ["3", "8 devices"]),
        ({"data": -1, "fsdp": -1}, ["mesh.data", "mesh.fsdp"]),
        ({"data": 0}, ["mesh.data=0"]),
        ({"model": 2}, ["'model'", "tensor"]),
    ],
)
def test_sizes_that_do_not_fit_the_devices(sizes, words):
    with pytest.raises(ValueError) as caught:
        partitioning.mesh_sizes(sizes, 8)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"batch_size": 10}, ["batch_size=10", "4"]),
        ({"accumulation_steps": 4}, ["batch_size=8", "16", "accumulation_steps=4"]),
        ({"num_heads": 3}, ["num_heads=3", "mesh.tensor=2"]),
        ({"mlp_dim": 9}, ["mlp_dim=9", "mesh.tensor=2"]),
        ({"vocab_size": 301}, ["vocab_size=301", "mesh.tensor=2"]),
        ({"model_dim": 15}, ["model_dim=15", "mesh.fsdp=2"]),
    ],
)
def test_run_that_does_not_fit_the_mesh_names_both_numbers(mesh, changed, words):
    run = {"batch_size": 8, "accumulation_steps": 1}
    model = {"num_heads": 4, "mlp_dim": 32, "vocab_size": 300, "model_dim": 16, "seq_len": 64, "mixers": ("cubit",)}
    partitioning.check(mesh, **run, model=types.SimpleNamespace(**model))
    run |= {name: value for name, value in changed.items() if name in run}
    model |= {name: value for name, value in changed.items() if name in model}
    with pytest.raises(ValueError) as caught:
        partitioning.check(mesh, **run, model=types.SimpleNamespace(**model))
    assert all(word in str(caught.value) for word in words)


def test_sequence_that_cannot_be_dealt_names_the_numbers():
    mesh = partitioning.make_mesh({"context": 4, "tensor": 2})
    model = {"num_heads": 4, "mlp_dim": 32, "vocab_size": 300, "model_dim": 16}
    for mixer, multiple in {"cubit": 8, "cem": 16}.items():  # two of four devices share the rows of a head; all four
        model |= {"mixers": (mixer,), "seq_len": 2 * multiple}
        partitioning.check(mesh, batch_size=8, accumulation_steps=1, model=types.SimpleNamespace(**model))
        model["seq_len"] -= 4
        with pytest.raises(ValueError, match=rf"length={2 * multiple - 4} must be a multiple of {multiple} = 4 dev"):
            partitioning.check(mesh, batch_size=8, accumulation_steps=1, model=types.SimpleNamespace(**model))


@pytest.mark.parametrize(
    "per_process, sizes, shares",
    [
        (4, {"data": 8}, [(0, 2), (1, 2)]),  # own rows
        (4, {"context": 8}, [(0, 1), (0, 1)]),  # the same rows, of which each process holds a part of the sequence
        (2, {"data": 2, "tensor": 4}, [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ],
)
def test_processes_that_hold_the_same_rows_read_the_same(per_process, sizes, shares, monkeypatch):
    shape = {**dict.fromkeys(partitioning.AXES, 1), **sizes}
    devices = [types.SimpleNamespace(process_index=i // per_process) for i in range(8)]
    mesh = types.SimpleNamespace(shape=shape, devices=np.array(devices).reshape(list(shape.values())))
    for process, share in enumerate(shares):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert partitioning.process_share(mesh) == share


def test_processes_whose_rows_overlap_are_refused():
    devices = np.array([types.SimpleNamespace(process_index=i // 3) for i in range(6)])
    mesh = types.SimpleNamespace(
        shape={**dict.fromkeys(partitioning.AXES, 1), "data": 3, "context": 2}, devices=devices.reshape(1, 3, 1, 1, 2)
    )
    with pytest.raises(ValueError, match="rows of 2 processes overlap"):
        partitioning.process_share(mesh)


def test_rules_add_the_layer_axis_and_refuse_what_they_do_not_know():
    assert partitioning.parameter_spec("params/layer_0/mixer/q_proj/kernel", 3) == P("fsdp", "tensor", None)
    assert partitioning.parameter_spec("mu/layers/mixer/q_proj/kernel", 4) == P(None, "fsdp", "tensor", None)
    assert partitioning.parameter_spec("layers/mixer/diag", 1) == P(None)
    with pytest.raises(ValueError, match=r"params/mixer/s_proj/kernel has no sharding rule"):
        partitioning.parameter_spec("params/mixer/s_proj/kernel", 2)
    with pytest.raises(ValueError, match="5 dimensions"):
        partitioning.parameter_spec("params/mixer/q_proj/kernel", 5)


def _weighted(query, value, gate, segment_ids):
    """An op whose rows and heads differ, so that a wrong offset shows."""
    scores = jnp.einsum("blhk,bmhk->bhlm", query, value) * gate[:, None, None]
    scores = jnp.where((segment_ids[:, None, :] == segment_ids[:, :, None])[:, None], scores, -1e9)
    return jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(scores), value)


def _arrays():
    key = jax.random.split(jax.random.key(0), 3)
    scale = 0.1 + 0.2 * jnp.arange(4)[:, None, None, None] + 0.5 * jnp.arange(2)[:, None]
    query, value = (scale * jax.random.normal(k, (4, 5, 2, 3)) for k in key[:2])
    return query, value, jax.random.normal(key[2], (2,)), jnp.array([[1, 1, 2, 2, 2]] * 4)


def test_per_shard_equals_one_device_with_every_gradient_and_gathers_nothing(mesh, error):
    arrays = _arrays()

    def loss(fn):
        return lambda query, value, gate, ids: jnp.sum(jnp.sin(fn(query, value, gate, ids)))

    expected = jax.value_and_grad(loss(_weighted), argnums=(0, 1, 2))(*arrays)
    sharded = partitioning.per_shard(_weighted, "BLHK,BLHK,H,BL->BLHK")
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, jax.NamedSharding(mesh, spec))
            for x, spec in zip(
                arrays,
                [P(("data", "fsdp"), None, "tensor"), P(("data", "fsdp"), None, "tensor"), P(), P(("data", "fsdp"))],
            )
        ]
        step = jax.jit(jax.value_and_grad(loss(sharded), argnums=(0, 1, 2))).lower(*placed).compile()
        actual = step(*placed)
    for name, a, b in zip(("loss", "query", "value", "gate"), jax.tree.leaves(actual), jax.tree.leaves(expected)):
        assert error(a, b) < 1e-5, name
    assert "all-gather" not in step.as_text()


def test_per_shard_sums_heads_that_the_result_lacks(mesh, error):
    query, value, gate, ids = _arrays()

    def summed(*args):
        return _weighted(*args).sum(axis=2)

    def loss(fn):
        return lambda query, gate: jnp.sum(jnp.sin(fn(query, value, gate, ids)))

    expected = jax.value_and_grad(loss(summed), argnums=(0, 1))(query, gate)
    with jax.set_mesh(mesh):
        fn = partitioning.per_shard(summed, "BLHK,BLHK,H,BL->BLK")
        actual = jax.jit(jax.value_and_grad(loss(fn), argnums=(0, 1)))(query, gate)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        assert error(a, b) < 1e-5


def test_per_shard_takes_none_and_a_batch_of_one_and_refuses_odd_heads(mesh):
    seen = []

    def fn(x, ids):
        seen.append((x.shape, ids))
        return x

    with jax.set_mesh(mesh):
        identity = partitioning.per_shard(fn, "BLHK,BL->BLHK")
        np.testing.assert_array_equal(jax.jit(identity)(jnp.ones((1, 5, 2, 3)), None), 1.0)
        assert seen == [((1, 5, 1, 3), None)]  # the row whole, one head a device
        with pytest.raises(ValueError, match=r"dimension H of size 3 is no multiple of mesh tensor = 2"):
            identity(jnp.ones((4, 5, 3, 3)), None)
    assert identity(jnp.ones((4, 5, 3, 3)), None).shape == (4, 5, 3, 3)  # no mesh: the op itself


def test_constrain_places_an_activation(mesh):
    x = jnp.ones((4, 6, 2, 3))
    assert partitioning.constrain(x, "BLHK") is x
    with jax.set_mesh(mesh):
        placed = jax.jit(lambda x: partitioning.constrain(x, "BLHK"))(x)
    assert placed.sharding.spec == P(("data", "fsdp"), None, "tensor")


@pytest.mark.parametrize(
    "call", [lambda x: partitioning.constrain(x, "BLQK"), lambda x: partitioning.per_shard(jnp.sin, "BLQK->BLQK")(x)]
)
def test_dimension_that_no_rule_names(call, mesh):
    message = r"'Q' of 'BLQK' is not known: the mesh splits B, L, H, F, V, and D, K, N stay whole"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        call(jnp.ones((4, 6, 2, 3)))
