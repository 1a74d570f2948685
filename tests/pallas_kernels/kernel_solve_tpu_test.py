"""The TPU kernels in Pallas' interpreters on a CPU, against reference arrays and a dense float64 solve."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.kernel_solve_tpu import BlockSizes, kernel_solve

NAMES = ("query", "key", "rhs", "diagonal")
FORWARD, GRADIENT, LOW_PRECISION = 1e-5, 1e-4, 2e-2


def dense(query, key, rhs, diagonal, *, strict, segment_ids=None, window=None, scale=1.0):
    """The system written out: [B, H, L, L], solved as it stands."""
    length = query.shape[1]
    row, column = jnp.arange(length)[:, None], jnp.arange(length)
    seen = (column < row if strict else column <= row)[None]
    if window is not None:
        seen = seen & (row - column < window)
    if segment_ids is not None:
        seen = seen & (segment_ids[:, :, None] == segment_ids[:, None]) & (segment_ids != 0)[:, None]
    seen = seen[:, None]
    scores = scale * jnp.einsum("bihk,bjhk->bhij", query, key)
    scores = jnp.where(seen, scores, 0.0)
    top = jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1.0, total)
    identity = jnp.eye(length)
    if strict:
        system = identity + diagonal.swapaxes(1, 2)[..., None] * weights
    else:
        system = weights + diagonal[:, None, None] * identity
    u = jax.scipy.linalg.solve_triangular(system, rhs.swapaxes(1, 2), lower=True)
    return u.swapaxes(1, 2)


def inputs(batch, length, heads, dim, *, strict, dtype=np.float32, seed=0, spread=1.0):
    """query (unit keys, so the system is well conditioned), key, rhs, ridge or beta, and the cotangent."""
    rng = np.random.default_rng(seed)
    key = rng.normal(size=(batch, length, heads, dim))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    rhs, cotangent = rng.normal(size=(2, batch, length, heads, dim))
    query = spread * (2.0 * key + 0.1 * rng.normal(size=key.shape))
    diagonal = rng.uniform(0, 1, size=(batch, length, heads)) if strict else rng.uniform(0.1, 0.3, size=heads)
    arrays = [jnp.asarray(x, dtype) for x in (query, key, rhs)]
    return *arrays, jnp.asarray(diagonal, jnp.float32), jnp.asarray(cotangent, jnp.float32)


def solve(query, key, rhs, diagonal, *, strict, interpret=True, **options):
    name = "beta" if strict else "ridge"
    return kernel_solve(query, key, rhs, **{name: diagonal}, interpret=interpret, **options)


# The interpreted kernels are long programs that run once: compiling them without optimisation takes half the time.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}


def value_and_gradients(function, arrays, cotangent):
    """u and the gradients for a cotangent, by one compiled program."""

    def loss(*arrays):
        u = function(*arrays)
        return jnp.sum(u * cotangent), u

    both = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True), compiler_options=COMPILER_OPTIONS)
    gradients, u = both(*arrays)
    return u, gradients


def compare(error, arrays, *, strict, forward=FORWARD, gradient=GRADIENT, interpret=True, block_size=None, **options):
    """Value and every gradient of the kernel against the dense solve in float64 of the same (rounded) arrays."""
    *arrays, cotangent = arrays
    u, gradients = value_and_gradients(
        functools.partial(solve, strict=strict, interpret=interpret, block_size=block_size, **options),
        arrays,
        cotangent,
    )
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (*arrays, cotangent)]
        expected, expected_gradients = value_and_gradients(
            functools.partial(dense, strict=strict, **options), wide[:4], wide[4]
        )
    assert u.dtype == jnp.float32
    assert error(u, expected) <= forward
    for name, array, actual, wanted in zip(NAMES, arrays, gradients, expected_gradients):
        assert actual.dtype == array.dtype, name
        assert error(actual, wanted) <= gradient, name
    return u, gradients


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("kind", ["krr", "delta"])
def test_reference_arrays(golden, error, kind, number):
    arrays = golden(f"{kind}_solve_{number}")
    last = "ridge" if kind == "krr" else "beta"
    names = ("query", "key", "rhs", last)
    options = {name: float(arrays[name]) for name in ("scale",) if name in arrays}
    options |= {name: int(arrays[name]) for name in ("window",) if name in arrays}
    if "segment_ids" in arrays:
        options["segment_ids"] = jnp.asarray(arrays["segment_ids"], jnp.int32)
    u, gradients = value_and_gradients(
        functools.partial(solve, strict=kind == "delta", **options),
        [jnp.asarray(arrays[name], jnp.float32) for name in names],
        jnp.asarray(arrays["cotangent"], jnp.float32),
    )
    assert error(u, arrays["solution"]) <= FORWARD
    for name, gradient in zip(names, gradients):
        assert error(gradient, arrays[f"grad_{name}"]) <= GRADIENT, name


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("length", [3, 17, 129, 257])
def test_lengths_that_no_block_divides(error, length, strict):  # H02, H06
    compare(error, inputs(1, length, 1, 64, strict=strict), strict=strict, block_size=128)


def test_one_token_has_no_score_gradient():
    *arrays, cotangent = inputs(1, 1, 2, 64, strict=False)
    _, (d_query, d_key, _, _) = value_and_gradients(functools.partial(solve, strict=False), arrays, cotangent)
    assert max(jnp.max(jnp.abs(d_query)), jnp.max(jnp.abs(d_key))) <= 1e-7


SIZES = [
    BlockSizes(128, 128, 1, 128, 128, 1),
    BlockSizes(128, 384, 2, 256, 256, 1),  # the row blocks of one pass are not those of the other
    BlockSizes(256, 256, 1, 128, 256, 2),
    BlockSizes(128, 256, 1, 384, 384, 1),
]


@pytest.mark.parametrize("strict", [False, True])
def test_every_block_size_gives_the_same(error, strict):  # H01
    arrays = inputs(1, 620, 2, 128, strict=strict)
    results = [compare(error, arrays, strict=strict, block_size=sizes) for sizes in SIZES[: 2 if strict else 4]]
    for u, gradients in results[1:]:
        assert error(u, results[0][0]) <= 1e-6
        for name, actual, wanted in zip(NAMES, gradients, results[0][1]):
            assert error(actual, wanted) <= 1e-5, name


@pytest.mark.parametrize("strict", [False, True])
def test_value_alone_is_that_with_gradients(error, strict):
    """Without a gradient the kernel writes nothing but u, and in another arrangement."""
    *arrays, cotangent = inputs(2, 260, 4, 64, strict=strict)
    sizes = BlockSizes(128, 256, 2, 128, 128, 2)
    plain = functools.partial(solve, strict=strict, block_size=sizes)
    alone = jax.jit(plain, compiler_options=COMPILER_OPTIONS)(*arrays)
    assert error(alone, value_and_gradients(plain, arrays, cotangent)[0]) <= 1e-6


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("window", [1, 300])
def test_window_skips_tiles(error, window, strict):
    arrays = inputs(1, 640, 1, 64, strict=strict)
    compare(error, arrays, strict=strict, window=window, scale=0.3, block_size=BlockSizes(128, 256, 1, 128, 128, 1))


@pytest.mark.parametrize("strict", [False, True])
def test_segments(error, strict):  # H10, H11
    """Segments shorter and longer than a block, of one token, padding left, right and over a whole row of the batch."""
    lengths = [[0] * 5 + [1] * 200 + [2] + [3] * 144, [1] * 130 + [2] * 120 + [0] * 100, [0] * 350]
    segment_ids = jnp.asarray(lengths, jnp.int32)
    arrays = inputs(3, 350, 1, 64, strict=strict)
    u, gradients = compare(error, arrays, strict=strict, segment_ids=segment_ids, block_size=128)
    alone = [x[1:2, 130:250] if x.ndim > 1 else x for x in arrays]
    *alone, cotangent = alone
    own, own_gradients = value_and_gradients(functools.partial(solve, strict=strict), alone, cotangent)
    assert error(u[1:2, 130:250], own) <= 1e-6
    for name, actual, wanted in zip(NAMES[:3], gradients, own_gradients):
        assert error(actual[1:2, 130:250], wanted) <= 1e-5, name


@pytest.mark.parametrize("dim", [8, 48, 80, 256])
def test_head_dims(error, dim):  # H07
    compare(error, inputs(1, 140, 3, dim, strict=False), strict=False)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_bfloat16(error, dim, strict):
    arrays = inputs(1, 300, 2, dim, strict=strict, dtype=jnp.bfloat16)
    sizes = BlockSizes(128, 256, 2, 128, 256, 2)
    compare(error, arrays, strict=strict, forward=LOW_PRECISION, gradient=LOW_PRECISION, block_size=sizes)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_bfloat16_with_the_block_sizes_that_are_estimated(error, strict):
    """Those of the table in experiments/README.md, over a whole tile, a remainder and both halves of a tile."""
    sizes = BlockSizes.best("TPU v5", 4096, 8, 128, False)
    arrays = inputs(1, 2048, 4, 128, strict=strict, dtype=jnp.bfloat16)
    compare(error, arrays, strict=strict, forward=LOW_PRECISION, gradient=LOW_PRECISION, block_size=sizes)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_keys_that_are_not_normalised_and_equal_keys(dtype):  # H03
    rng = np.random.default_rng(0)
    key, rhs = jnp.asarray(rng.normal(size=(2, 1, 512, 1, 64)), dtype)
    # Both at once, as two rows of the batch.
    keys = jnp.concatenate([key, jnp.broadcast_to(key[:, :1], key.shape)])
    rhs = jnp.concatenate([rhs, rhs])
    arrays = (keys, keys, rhs, jnp.full(1, 1e-3))
    u, gradients = value_and_gradients(functools.partial(solve, strict=False), arrays, jnp.ones(rhs.shape))
    assert bool(jnp.isfinite(u).all())
    for array, gradient in zip(arrays, gradients):
        assert gradient.dtype == array.dtype
        assert bool(jnp.isfinite(gradient.astype(jnp.float32)).all())
    wide = [np.asarray(x, np.float64) for x in arrays]
    with jax.enable_x64(True):
        expected = np.asarray(dense(*map(jnp.asarray, wide), strict=False))
    scale = np.abs(expected).max(axis=(1, 3))
    assert np.all(np.abs(np.asarray(u, np.float64) - expected).max(axis=(1, 3)) <= LOW_PRECISION * scale)


def test_exact_diagonal_with_peaked_weights(error):
    """dP - delta cancels on the diagonal when a row nearly sees only itself; bfloat16 products alone lose 0.3 there."""
    arrays = inputs(1, 256, 1, 128, strict=False, dtype=jnp.bfloat16, spread=6.0)
    compare(error, arrays, strict=False, forward=LOW_PRECISION, gradient=LOW_PRECISION)


@pytest.mark.parametrize("strict", [False, True])
def test_no_race_and_no_read_of_memory_that_was_not_written(error, strict):
    """Several row blocks and key tiles, the last tile reaching past the end of the array."""
    interpret = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan")
    sizes = BlockSizes(128, 256, 1, 128, 256, 1)
    segment_ids = jnp.repeat(jnp.asarray([[1, 2]], jnp.int32), 150, axis=1) if strict else None
    arrays = inputs(1, 300, 1, 64, strict=strict)
    compare(error, arrays, strict=strict, interpret=interpret, block_size=sizes, segment_ids=segment_ids)
    assert not interpret_pallas_call.races.races_found


def test_vmap_scan_and_remat(error):
    arrays = inputs(2, 130, 2, 64, strict=True)
    *arrays, cotangent = arrays
    plain = functools.partial(solve, strict=True)
    u, gradients = value_and_gradients(plain, arrays, cotangent)

    def mapped(*arrays):
        return jax.vmap(lambda *a: plain(*(x[None] for x in a))[0])(*arrays)

    def scanned(*arrays):
        body = jax.checkpoint(lambda _, a: (None, plain(*(x[None] for x in a))[0]))
        return jax.lax.scan(body, None, arrays)[1]

    for function in (mapped, scanned):
        other, other_gradients = value_and_gradients(function, arrays, cotangent)
        assert error(other, u) <= 1e-6
        for name, actual, wanted in zip(NAMES, other_gradients, gradients):
            assert error(actual, wanted) <= 1e-6, name


@pytest.mark.parametrize("strict", [False, True])
def test_sharded_over_batch_and_heads(error, strict):  # H09
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    *arrays, cotangent = inputs(2, 40, 4, 64, strict=strict)
    # Every row and head has its own size, so a wrong offset shows.
    size = (1 + jnp.arange(2.0))[:, None, None, None] * (1 + jnp.arange(4.0))[:, None]
    arrays[0], arrays[2] = arrays[0] * size**0.5, arrays[2] * size
    plain = functools.partial(solve, strict=strict)
    u, gradients = value_and_gradients(plain, arrays, cotangent)
    spec = P("data", None, "tensor", None)
    specs = (spec, spec, spec, P("data", None, "tensor") if strict else P("tensor"))
    # Interpret mode mixes values that vary over the mesh with ones that do not; the check is for compiled kernels.
    sharded = jax.shard_map(plain, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs)]
    other, other_gradients = value_and_gradients(sharded, placed, jax.device_put(cotangent, NamedSharding(mesh, spec)))
    assert error(other, u) <= 1e-6
    for name, actual, wanted in zip(NAMES, other_gradients, gradients):
        assert error(actual, wanted) <= 1e-6, name
    assert "all-gather" not in jax.jit(sharded).lower(*placed).compile().as_text()


def test_lowered_for_tpu_contains_the_kernels_by_name():
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(1, 256, 2, 128, strict=False)]

    def both(*arrays):
        return jax.vjp(functools.partial(solve, strict=False, interpret=False), *arrays[:4])[1](arrays[4])

    text = jax.export.export(jax.jit(both), platforms=["tpu"])(*arrays).mlir_module()
    assert "kernel_solve_tpu_forward" in text
    assert "kernel_solve_tpu_backward" in text


def test_what_it_cannot_do_is_named():
    *arrays, _ = inputs(1, 8, 1, 64, strict=False)
    query, key, rhs, ridge = arrays
    with pytest.raises(ValueError, match="exactly one"):
        kernel_solve(query, key, rhs)
    with pytest.raises(ValueError, match=r"rhs\.shape"):
        kernel_solve(query, key, rhs[:, :4], ridge=ridge)
    wide = jnp.ones((1, 8, 1, 300))
    with pytest.raises(NotImplementedError, match="300"):
        kernel_solve(wide, wide, wide, ridge=ridge)
    long = jax.ShapeDtypeStruct((1, 2**20, 1, 128), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="vector memory"):
        jax.eval_shape(functools.partial(kernel_solve, ridge=ridge), long, long, long)
    with pytest.raises(ValueError, match="multiple of 128"):
        BlockSizes(96, 96, 1, 128, 128, 1)
    with pytest.raises(NotImplementedError, match="block_size=96"):  # so that implementation=None goes on to xla
        kernel_solve(query, key, rhs, ridge=ridge, block_size=96)


@pytest.mark.parametrize("kind", ["TPU v5", "TPU v6 lite", "TPU of a later year"])
def test_block_sizes_for_any_device(kind):
    for length, heads, dim, precise in [
        (1, 1, 64, True),
        (600, 3, 128, False),
        (8192, 8, 128, True),
        (32768, 8, 128, True),
    ]:
        sizes = BlockSizes.best(kind, length, heads, dim, precise)
        assert heads % sizes.heads == 0
        assert heads % sizes.backward_heads == 0
