"""Ops whose sequences are shared by eight fake devices: values, gradients, the work of each device, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cubit_jax import ops, partitioning
from cubit_jax.layers import MIXERS
from cubit_jax.ops.blockwise.diagonal_attention import diagonal_attention
from cubit_jax.ops.context_parallel.layout import Layout, choose_head_shares
from cubit_jax.ops.context_parallel.solve import Schedule


def _mesh(devices=8):
    return partitioning.make_mesh({"context": devices}, jax.devices()[:devices])


def _layout(num_heads, length):
    return Layout("context", 8, choose_head_shares(8, num_heads), length)


def _segments(length):
    """Two rows: two packed documents and padding; one document that ends elsewhere."""
    index = jnp.arange(length)
    first = jnp.where(index < length // 3, 1, 2) * (index < length - length // 10)
    return jnp.stack([first, jnp.where(index < length // 2 - 3, 1, 2)]).astype(jnp.int32)


def _arrays(length, num_heads, head_dim=8):
    """q, k, v [B, L, H, K] whose heads and rows have different scales; state, context [B, L, D]."""
    keys = jax.random.split(jax.random.key(length + num_heads), 5)
    scale = 1 + 0.3 * jnp.arange(num_heads)[:, None] + jnp.arange(length)[:, None, None] / length
    heads = [scale * jax.random.normal(key, (2, length, num_heads, head_dim)) for key in keys[:3]]
    return *heads, *(jax.random.normal(key, (2, length, 16)) for key in keys[3:])


def _case(name, length, num_heads, window):
    """(op of (arrays, segment_ids, layout, implementation), arrays, dimension letters)."""
    q, k, v, state, context = _arrays(length, num_heads)
    options = {"window": window, "scale": 0.5}
    if name == "ridge":
        q, k = q + k, (q + k) / jnp.linalg.norm(q + k, axis=-1, keepdims=True)  # a diagonal that dominates its row
        op = functools.partial(_solve, "ridge", **options)
        return op, (q, k, v, 10.0 ** jnp.linspace(-4, -1, num_heads)), "BLHK,BLHK,BLHK,H,BL->BLHK"
    if name == "beta":
        beta = jax.random.normal(jax.random.key(1), (2, length, num_heads))
        return functools.partial(_solve, "beta", **options), (q, k, v, beta), "BLHK,BLHK,BLHK,BLH,BL->BLHK"
    if name == "attention":
        return functools.partial(_attend, **options), (q, k, v), "BLHK,BLHK,BLHK,BL->BLHK"
    diag = jax.random.normal(jax.random.key(2), (16,) if name == "shared_diagonal" else (num_heads, 16))
    dims = f"BLHK,BLD,BLHK,BLD,{'D' if name == 'shared_diagonal' else 'HD'},BL->BLHK,BLD"
    return functools.partial(_diagonal, **options), (q, state, k, context, diag), dims


def _solve(form, q, k, v, coefficient, segment_ids, layout=None, **options):
    return ops.kernel_solve(q, k, v, **{form: coefficient}, segment_ids=segment_ids, layout=layout, **options)


def _attend(q, k, v, segment_ids, layout=None, **options):
    return ops.attention(q, k, v, segment_ids=segment_ids, layout=layout, **options)


def _diagonal(q, state, k, context, diag, segment_ids, layout=None, implementation=None, **options):
    return diagonal_attention(
        q, state, k, context, diag, segment_ids=segment_ids, layout=layout, implementation=implementation, **options
    )


@pytest.mark.parametrize(
    "name, length, num_heads, window",
    [
        ("ridge", 128, 1, None),  # 8 devices share the rows
        pytest.param("ridge", 256, 12, 40, marks=pytest.mark.full),  # 2 x 4 heads
        pytest.param("beta", 192, 2, None, marks=pytest.mark.full),  # 4 x 2 heads
        ("beta", 64, 8, 9),  # every device has a head
        pytest.param("attention", 256, 1, 100, marks=pytest.mark.full),
        ("attention", 128, 4, None),
        ("shared_diagonal", 128, 2, None),
        pytest.param("diagonal", 192, 3, 30, marks=pytest.mark.full),
    ],
)
def test_values_and_gradients_are_those_of_one_device(name, length, num_heads, window, error):
    op, arrays, dims = _case(name, length, num_heads, window)
    segment_ids = _segments(length)
    probe = jax.random.normal(jax.random.key(3), (2, length, 1))
    real = jnp.where(segment_ids != 0, 1.0, 0.0)[..., None]  # u of padding is rhs / ridge, far larger than the rest

    def loss(op):
        def fn(*arrays):
            outputs = [x.reshape(2, length, -1) * real for x in jax.tree.leaves(op(*arrays, segment_ids))]
            return sum(jnp.sum(x * probe * jnp.arange(1, x.shape[-1] + 1)) for x in outputs), outputs

        return jax.value_and_grad(fn, argnums=tuple(range(len(arrays))), has_aux=True)

    expected = jax.jit(loss(functools.partial(op, implementation="reference")))(*arrays)
    with jax.set_mesh(_mesh()):
        actual = jax.jit(loss(partitioning.per_shard(op, dims)))(*arrays)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert error(a, b) < 1e-5


@pytest.mark.parametrize("name", ["ridge", "attention", "shared_diagonal"])
def test_padding_is_inert_whatever_it_holds(name):
    op, arrays, dims = _case(name, 64, 1, None)
    segment_ids = _segments(64)
    rows = [x.ndim > 1 for x in arrays]

    def of(x):
        return (segment_ids != 0).reshape(2, 64, *[1] * (x.ndim - 2))

    def loss(*arrays):
        outputs = jax.tree.leaves(partitioning.per_shard(op, dims)(*arrays, segment_ids))
        return sum(jnp.sum(jnp.where(of(x), jnp.sin(x), 0)) for x in outputs)

    with jax.set_mesh(_mesh()):
        run = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(arrays)))))
        expected = run(*arrays)
        actual = run(*(jnp.where(of(x), x, jnp.nan) if row else x for x, row in zip(arrays, rows)))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("name", ["ridge", "attention"])
def test_an_overflowing_row_spoils_no_row_before_it(name):
    op, (q, k, v, *rest), dims = _case(name, 64, 1, None)
    with jax.set_mesh(_mesh()):
        run = jax.jit(partitioning.per_shard(op, dims))
        clean, bad = (run(q, k, x, *rest, None) for x in (v, v.at[:, 37].set(jnp.inf)))
    np.testing.assert_array_equal(bad[:, :37], clean[:, :37])
    assert not np.isfinite(bad[:, 37:]).any()


def test_diagonal_of_the_system_is_that_of_one_device(error):
    _, (q, k, _, ridge), _ = _case("ridge", 128, 1, None)
    segment_ids = _segments(128)
    expected = ops.system_diagonal(q, k, ridge, segment_ids=segment_ids, scale=0.5)
    with jax.set_mesh(_mesh()):
        actual = jax.jit(
            partitioning.per_shard(
                lambda q, k, ridge, segment_ids, layout=None: ops.system_diagonal(
                    q, k, ridge, segment_ids=segment_ids, scale=0.5, layout=layout
                ),
                "BLHK,BLHK,H,BL->BLH",
            )
        )(q, k, ridge, segment_ids)
    assert error(actual, expected) < 1e-5


@pytest.mark.parametrize("num_heads", [8, 4, 1, 12])
def test_rows_are_dealt_where_the_index_says_and_come_back(num_heads):
    layout = _layout(num_heads, 512)
    assert layout.head_shares == {8: 8, 4: 4, 1: 1, 12: 4}[num_heads]
    rows = jnp.arange(512)
    x = rows[:, None] * 100 + jnp.arange(num_heads)

    def local(x, rows):
        dealt = layout.deal(x[None], heads=True)[0]
        index = layout.index(0, layout.local_length)
        good = jnp.all(dealt == index[:, None] * 100 + layout.own_heads(jnp.arange(num_heads), 0))
        good &= jnp.all(layout.deal(rows[None], heads=False)[0] == index)
        return layout.undeal(dealt[None], heads=True)[0], good[None]

    with jax.set_mesh(_mesh()):
        fn = jax.shard_map(local, in_specs=P("context"), out_specs=P("context"), check_vma=False)
        back, good = jax.jit(fn)(x, rows)
    assert good.all()
    np.testing.assert_array_equal(back, x)


def test_lengths_that_cannot_be_dealt_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"length=72 must be a multiple of 64 = 8 devices of the context axis x 8"):
        _layout(3, 72)
    assert _layout(8, 72).super_block == 9


def test_kernels_that_need_whole_sequences_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="8 devices share the rows"):
        _attend(*_arrays(64, 1)[:3], None, layout=_layout(1, 512), implementation="pallas")


def test_length_that_cannot_be_dealt_stays_whole(error):
    q, k, v = _arrays(24, 2)[:3]  # 8 devices could have a part each, but 4 of them no equal pieces of it
    with jax.set_mesh(_mesh()):
        actual = jax.jit(partitioning.per_shard(_attend, "BLHK,BLHK,BLHK,BL->BLHK"))(q, k, v, None)
    assert error(actual, ops.attention(q, k, v, implementation="reference")) < 1e-5


def _products(layout, window=None):
    """(products of T x T x K that one device makes for the solve, forward and backward; the same over the ideal)."""
    tile, schedule = layout.tile, Schedule(layout, window, solve=True)
    width = layout.super_block // tile
    triangle = width * (width + 1) // 2
    rows = columns = 0
    for s in range(layout.num_super_blocks):
        first, end = schedule.row_tiles(s)
        rows += (end - first) * width
        first, end = schedule.column_tiles(s)
        columns += (end - first) * width
    made = 2 * (rows + triangle * layout.num_super_blocks) + 5 * columns + 2 * triangle * layout.num_super_blocks
    blocks = layout.length // tile
    return made, made / (7 * blocks * (blocks + 1) / 2 / layout.row_shares)


@pytest.mark.parametrize("num_heads, length, limit", [(4, 16384, 1.25), (1, 16384, 1.25), (1, 131072, 1.1)])
def test_work_is_near_the_ideal(num_heads, length, limit):
    layout = _layout(num_heads, length)
    assert layout.tile == 128
    # One schedule for all devices: their counts are equal, not only within 5 % of the mean.
    _, ratio = _products(layout)
    assert 1 <= ratio < limit


def test_schedule_with_a_window_leaves_out_what_no_row_sees():
    layout = _layout(1, 16384)
    assert _products(layout, 1024)[0] < 0.3 * _products(layout)[0]


@pytest.mark.parametrize(
    "family, num_heads",
    [
        ("cubit", 1),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("cubit", 8), ("cubit", 4), ("deltaformer", 1), ("cem", 8))
        ),
    ],
)
def test_memory_of_a_layer(family, num_heads):
    """At L = 16384 a device that shares the sequence with 7 others needs at most a fifth of the temporary memory."""
    length, head_dim = 16384, 64
    model_dim = num_heads * head_dim
    mixer = MIXERS[family](num_heads=num_heads, head_dim=head_dim)
    params = jax.eval_shape(lambda: mixer.init(jax.random.key(0), jnp.zeros((1, 8, model_dim))))

    def loss(params, x, segment_ids, probe):
        return jnp.sum(mixer.apply(params, x, segment_ids=segment_ids) * probe)

    def temporary(devices):
        mesh = _mesh(devices)
        with jax.set_mesh(mesh):
            shardings = partitioning.state_shardings(mesh, params)
            wide, narrow = partitioning.batch_sharding(mesh, 3), partitioning.batch_sharding(mesh)
            x = jax.ShapeDtypeStruct((1, length, model_dim), jnp.float32, sharding=wide)
            ids = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=narrow)
            placed = jax.tree.map(
                lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), params, shardings
            )
            step = jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=(shardings, wide))
            return step.lower(placed, x, ids, x).compile().memory_analysis().temp_size_in_bytes

    assert temporary(8) <= 0.2 * temporary(1)
