"""The TPU kernels in Pallas' interpreters on a CPU, against reference arrays and a dense float64 solve."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kernel_solve_tpu import BlockSizes, kernel_solve

NAMES = ("query", "key", "rhs", "diagonal")
FORWARD, GRADIENT, LOW_PRECISION = 1e-5, 1e-4, 2e-2


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


def compare(
    error, reference, arrays, *, strict, forward=FORWARD, gradient=GRADIENT, interpret=True, block_size=None, **options
):
    """Value and every gradient of the kernel against the dense solve in float64 of the same (rounded) arrays."""
    *arrays, cotangent = arrays
    u, gradients = value_and_gradients(
        functools.partial(solve, strict=strict, interpret=interpret, block_size=block_size, **options),
        arrays,
        cotangent,
    )
    expected, expected_gradients = reference(arrays, cotangent, strict=strict, **options)
    assert u.dtype == jnp.float32
    assert error(u, expected) <= forward
    for name, array, actual, wanted in zip(NAMES, arrays, gradients, expected_gradients):
        assert actual.dtype == array.dtype, name
        assert error(actual, wanted) <= gradient, name
    return u, gradients


@pytest.mark.parametrize("number", [4, *(pytest.param(n, marks=pytest.mark.full) for n in range(4))])
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
        functools.partial(solve, strict=kind == "delta", block_size=128, **options),
        [jnp.asarray(arrays[name], jnp.float32) for name in names],
        jnp.asarray(arrays["cotangent"], jnp.float32),
    )
    assert error(u, arrays["solution"]) <= FORWARD
    for name, gradient in zip(names, gradients):
        assert error(gradient, arrays[f"grad_{name}"]) <= GRADIENT, name


SHORT = (1, 2, 3, 7, 8, 15, 16, 17, 65, 96, 100, 127)
LONG = (129, 160, 200, 209, 257)


@pytest.mark.parametrize(
    ("padded", "columns", "lengths", "strict"),
    [
        (128, 128, SHORT, False),
        (384, 256, LONG, True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (128, 128, SHORT, True),
                (384, 256, LONG, False),
                *((384, 128, LONG, strict) for strict in (False, True)),
                *((128, 256, (100,), strict) for strict in (False, True)),
            )
        ),
    ],
)
def test_lengths_that_no_block_divides(padded, columns, lengths, strict, check_prefixes):
    """In one or three blocks of rows. A tile of 256 columns reaches past an array of 384 rows, where the interpreter
    has NaN: nothing there is used. An array of 128 rows is narrower than such a tile."""
    *arrays, cotangent = inputs(len(lengths), padded, 1, 64, strict=strict)
    sizes = BlockSizes(128, columns, 1, 128, columns, 1)
    run = functools.partial(value_and_gradients, functools.partial(solve, strict=strict, block_size=sizes))
    check_prefixes(lengths, run, arrays, cotangent, strict=strict, forward=FORWARD, gradient=GRADIENT)


def test_no_score_gradient_at_one_position():
    *arrays, cotangent = inputs(1, 1, 1, 64, strict=False)
    _, gradients = value_and_gradients(functools.partial(solve, strict=False), arrays, cotangent)
    assert max(jnp.max(jnp.abs(x)) for x in gradients[:2]) <= 1e-7


SIZES = [
    BlockSizes(128, 384, 2, 256, 256, 1),  # the row blocks of one pass are not those of the other
    BlockSizes(256, 256, 1, 128, 256, 2),
]


@pytest.mark.full
@pytest.mark.parametrize("strict", [False, True])
def test_every_block_size_gives_the_same(error, reference, strict):
    arrays = inputs(1, 500, 2, 128, strict=strict)
    results = [compare(error, reference, arrays, strict=strict, block_size=size) for size in SIZES]
    for u, gradients in results[1:]:
        assert error(u, results[0][0]) <= 1e-6
        for name, actual, wanted in zip(NAMES, gradients, results[0][1]):
            assert error(actual, wanted) <= 1e-5, name


@pytest.mark.full
@pytest.mark.parametrize("strict", [False, True])
def test_value_alone_is_that_with_gradients(error, strict):
    """Without a gradient the kernel writes nothing but u, and in another arrangement."""
    *arrays, cotangent = inputs(2, 260, 4, 64, strict=strict)
    sizes = BlockSizes(128, 256, 2, 128, 128, 2)
    plain = functools.partial(solve, strict=strict, block_size=sizes)
    program = jax.jit(plain, compiler_options=COMPILER_OPTIONS)
    alone = program(*arrays)
    assert error(alone, value_and_gradients(plain, arrays, cotangent)[0]) <= 1e-6
    # Nor do blocks of rows above read anything of the rows below.
    poisoned = program(*(x.at[:, 256:].set(jnp.nan) for x in arrays[:3]), arrays[3])
    np.testing.assert_array_equal(poisoned[:, :256], alone[:, :256])


@pytest.mark.parametrize(
    ("strict", "num_heads", "dtype", "length", "start"),
    [
        # Inverses that share products: of one head, 128 rows and the next, and below of two heads.
        (False, 1, jnp.float32, 256, 130),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (True, 2, jnp.bfloat16, 256, 20),
                (False, 1, jnp.float32, 11, 1),
                (True, 1, jnp.float32, 300, 100),
                (False, 2, jnp.bfloat16, 300, 140),
            )
        ),
    ],
)
def test_a_row_that_overflows_spoils_no_row_before_it(strict, num_heads, dtype, length, start, check_overflow):
    sizes = BlockSizes(256, 256, num_heads, 256, 256, num_heads)
    plain = functools.partial(solve, strict=strict, block_size=sizes)

    def with_residuals(*arrays):
        return jax.vjp(plain, *arrays)[0]

    def run(arrays):
        return jax.jit(with_residuals if strict else plain, compiler_options=COMPILER_OPTIONS)(*arrays)

    limit = FORWARD if dtype == jnp.float32 else LOW_PRECISION
    check_overflow(run, length, 64, num_heads, strict=strict, dtype=dtype, limit=limit, start=start)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.full)])
def test_padding_is_inert(strict, check_padding):
    segment_ids = jnp.asarray([[0] * 5 + [1] * 130 + [0] * 3 + [2] * 60 + [0] * 2], jnp.int32)
    *arrays, cotangent = inputs(1, 200, 1, 64, strict=strict)

    def both(arrays, cotangent, segment_ids):
        function = functools.partial(solve, strict=strict, segment_ids=segment_ids, block_size=128)
        u, back = jax.vjp(function, *arrays)
        return u, back(cotangent)

    check_padding(jax.jit(both, compiler_options=COMPILER_OPTIONS), arrays, cotangent, segment_ids, strict=strict)


@pytest.mark.parametrize(
    ("window", "strict"),
    [(1, True), (300, False), *(pytest.param(*case, marks=pytest.mark.full) for case in ((1, False), (300, True)))],
)
def test_window_skips_tiles(error, reference, window, strict):
    arrays = inputs(1, 640, 1, 64, strict=strict)
    sizes = BlockSizes(128, 256, 1, 128, 128, 1)
    compare(error, reference, arrays, strict=strict, window=window, scale=0.3, block_size=sizes)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.full)])
def test_segments(error, reference, strict):
    """Segments shorter and longer than a block, of one token, padding left, right and over a whole row of the batch."""
    lengths = [[0] * 5 + [1] * 200 + [2] + [3] * 144, [1] * 130 + [2] * 120 + [0] * 100, [0] * 350]
    segment_ids = jnp.asarray(lengths, jnp.int32)
    arrays = inputs(3, 350, 1, 64, strict=strict)
    u, gradients = compare(error, reference, arrays, strict=strict, segment_ids=segment_ids, block_size=128)
    alone = [x[1:2, 130:250] if x.ndim > 1 else x for x in arrays]
    *alone, cotangent = alone
    own, own_gradients = value_and_gradients(functools.partial(solve, strict=strict, block_size=128), alone, cotangent)
    assert error(u[1:2, 130:250], own) <= 1e-6
    for name, actual, wanted in zip(NAMES[:3], gradients, own_gradients):
        assert error(actual[1:2, 130:250], wanted) <= 1e-5, name


@pytest.mark.parametrize(
    "dims",
    [
        (8, 16, 24, 48, 64),
        (256,),
        pytest.param((80, 96, 128), marks=pytest.mark.full),
        pytest.param((24,), id="padded", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.full), jnp.bfloat16])
def test_head_dims(dtype, dims, error, reference):
    """Those that are padded to 64, to 128 and to 256, each as a batch row with zeros in the channels that it lacks."""
    forward, gradient = (FORWARD, GRADIENT) if dtype == jnp.float32 else (LOW_PRECISION, LOW_PRECISION)
    *arrays, diagonal, cotangent = inputs(len(dims), 100, 1, dims[-1], strict=True, dtype=dtype)
    present = (jnp.arange(dims[-1]) < jnp.asarray(dims)[:, None])[:, None, None]
    query, key, rhs, cotangent = (jnp.where(present, x, 0) for x in (*arrays, cotangent))
    arrays = (query, key, rhs, diagonal, cotangent)
    compare(error, reference, arrays, strict=True, forward=forward, gradient=gradient)


@pytest.mark.parametrize(
    ("dim", "strict"),
    [(64, True), *(pytest.param(*case, marks=pytest.mark.full) for case in ((64, False), (128, False), (128, True)))],
)
def test_bfloat16(error, reference, dim, strict):
    arrays = inputs(1, 300, 2, dim, strict=strict, dtype=jnp.bfloat16)
    sizes = BlockSizes(128, 256, 2, 128, 256, 2)
    compare(error, reference, arrays, strict=strict, forward=LOW_PRECISION, gradient=LOW_PRECISION, block_size=sizes)


@pytest.mark.slow
@pytest.mark.parametrize("device_kind", ["TPU v5", "TPU v6 lite"])
@pytest.mark.parametrize("strict", [False, True])
def test_bfloat16_with_the_block_sizes_that_are_estimated(error, reference, strict, device_kind):
    """Those of the table in experiments/README.md, over whole tiles and, for v5p, both halves of one."""
    sizes = BlockSizes.best(device_kind, 4096, 8, 128, False)
    arrays = inputs(1, 2048, 4, 128, strict=strict, dtype=jnp.bfloat16)
    compare(error, reference, arrays, strict=strict, forward=LOW_PRECISION, gradient=LOW_PRECISION, block_size=sizes)


@pytest.mark.parametrize("dtype", [pytest.param(jnp.bfloat16, marks=pytest.mark.full), jnp.float16])
def test_keys_that_are_not_normalised_and_equal_keys(dtype, reference):
    rng = np.random.default_rng(0)
    key, rhs = jnp.asarray(rng.normal(size=(2, 1, 512, 1, 64)), dtype)
    # Both at once, as two rows of the batch.
    keys = jnp.concatenate([key, jnp.broadcast_to(key[:, :1], key.shape)])
    rhs = jnp.concatenate([rhs, rhs])
    arrays = (keys, keys, rhs, jnp.full(1, 1e-3))
    function = functools.partial(solve, strict=False, block_size=128)
    u, gradients = value_and_gradients(function, arrays, jnp.ones(rhs.shape))
    assert bool(jnp.isfinite(u).all())
    for array, gradient in zip(arrays, gradients):
        assert gradient.dtype == array.dtype
        assert bool(jnp.isfinite(gradient.astype(jnp.float32)).all())
    expected, _ = reference(arrays, np.ones(rhs.shape), strict=False)
    scale = np.abs(expected).max(axis=(1, 3))
    assert np.all(np.abs(np.asarray(u, np.float64) - expected).max(axis=(1, 3)) <= LOW_PRECISION * scale)


def test_exact_diagonal_with_peaked_weights(error, reference):
    """dP - delta cancels on the diagonal when a row nearly sees only itself; bfloat16 products alone lose 0.3 there."""
    arrays = inputs(1, 256, 1, 128, strict=False, dtype=jnp.bfloat16, spread=6.0)
    compare(error, reference, arrays, strict=False, forward=LOW_PRECISION, gradient=LOW_PRECISION)


@pytest.mark.parametrize("strict", [pytest.param(False, marks=pytest.mark.full), True])
def test_no_race_and_no_read_of_memory_that_was_not_written(error, reference, strict):
    """Several row blocks and key tiles, the last tile reaching past the end of the array."""
    interpret = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan")
    sizes = BlockSizes(128, 256, 1, 128, 256, 1)
    segment_ids = jnp.repeat(jnp.asarray([[1, 2]], jnp.int32), 150, axis=1) if strict else None
    arrays = inputs(1, 300, 1, 64, strict=strict)
    compare(error, reference, arrays, strict=strict, interpret=interpret, block_size=sizes, segment_ids=segment_ids)
    assert not interpret_pallas_call.races.races_found


@pytest.mark.full
@pytest.mark.parametrize("transformation", ["vmap", "scan and remat"])
def test_transformations(transformation, error):
    *arrays, cotangent = inputs(2, 130, 1, 64, strict=True)
    plain = functools.partial(solve, strict=True, block_size=128)
    u, gradients = value_and_gradients(plain, arrays, cotangent)

    def alone(arrays):
        return plain(*(x[None] for x in arrays))[0]

    def transformed(*arrays):
        if transformation == "vmap":
            return jax.vmap(lambda *x: alone(x))(*arrays)
        return jax.lax.scan(jax.checkpoint(lambda _, x: (None, alone(x))), None, arrays)[1]

    other, other_gradients = value_and_gradients(transformed, arrays, cotangent)
    assert error(other, u) <= 1e-6
    for name, actual, wanted in zip(NAMES, other_gradients, gradients):
        assert error(actual, wanted) <= 1e-6, name


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
