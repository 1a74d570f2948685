"""GPU kernels of the causal solve in Pallas' interpreter, against golden arrays and a dense float64 solve."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kernel_solve_gpu
from pallas_kernels.kernel_solve_gpu import kernel_solve

NAMES = ("query", "key", "rhs", "coefficient")
# The interpreter's programs are large and run for milliseconds: compile them fast.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})


def problem(length, head_dim=16, *, strict=False, gamma=1.0, ridge=1e-2, dtype=np.float32, num_heads=2, seed=0):
    """(query, key, rhs, coefficient, cotangent): rotated-reference-like keys of norm gamma, rounded to dtype."""
    rng = np.random.default_rng(seed)
    shape = (1, length, num_heads, head_dim)
    query, key, rhs, cotangent = rng.standard_normal((4, *shape))
    if not strict:
        # Cubit's diagonal is the largest score of its row.
        key = gamma * query / np.linalg.norm(query, axis=-1, keepdims=True)
    coefficient = rng.standard_normal(shape[:3]) if strict else np.linspace(1.0, 2.0, num_heads) * ridge
    # Through jax's own dtypes, so that the reference sees the rounded values.
    query, key, rhs = (np.asarray(jnp.asarray(x, dtype)) for x in (query, key, rhs))
    return query, key, rhs, coefficient.astype(np.float32), cotangent.astype(np.float32)


@functools.cache
def _jitted(strict, window, scale, segmented, block_size):
    def run(args, segment_ids, cotangent):
        def solve(query, key, rhs, coefficient):
            return kernel_solve(
                query,
                key,
                rhs,
                **{"beta" if strict else "ridge": coefficient},
                segment_ids=segment_ids if segmented else None,
                window=window,
                scale=scale,
                block_size=block_size,
                interpret=True,
            )

        solution, vjp = jax.vjp(solve, *args)
        return solution, vjp(cotangent)

    return jit(run)


def device(args, cotangent, *, strict, segment_ids=None, window=None, scale=1.0, block_size=None):
    """(u, gradients) of the kernel."""
    segmented = segment_ids is not None
    ids = jnp.asarray(segment_ids, jnp.int32) if segmented else 0
    return _jitted(strict, window, scale, segmented, block_size)(
        tuple(jnp.asarray(x) for x in args), ids, jnp.asarray(cotangent)
    )


def check(error, reference, args, cotangent, forward, backward, *, block_size=None, **options):
    u, grads = device(args, cotangent, block_size=block_size, **options)
    expected, expected_grads = reference(args, cotangent, **options)
    assert u.dtype == jnp.float32
    assert error(u, expected) < forward
    for name, x, grad, wanted in zip(NAMES, args, grads, expected_grads):
        assert grad.dtype == x.dtype, name
        assert error(np.asarray(grad, np.float64), wanted) < backward, name


@pytest.mark.parametrize("index", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (0, 1, 2, 4))])
@pytest.mark.parametrize("kind", ["krr", "delta"])
def test_golden(kind, index, golden, error, reference):
    arrays = golden(f"{kind}_solve_{index}")
    strict = kind == "delta"
    coefficient = "beta" if strict else "ridge"
    args = [arrays[name].astype(np.float32) for name in ("query", "key", "rhs", coefficient)]
    window = int(arrays["window"]) if "window" in arrays else None
    u, grads = device(
        args,
        arrays["cotangent"].astype(np.float32),
        strict=strict,
        window=window,
        segment_ids=arrays.get("segment_ids"),
        scale=float(arrays.get("scale", 1.0)),
    )
    expected, expected_grads = reference(
        [arrays[name] for name in ("query", "key", "rhs", coefficient)],
        arrays["cotangent"],
        strict=strict,
        window=window,
        segment_ids=arrays.get("segment_ids"),
        scale=float(arrays.get("scale", 1.0)),
    )
    assert error(u, arrays["solution"]) < 1e-5
    for name, grad, wanted in zip(("query", "key", "rhs", coefficient), grads, expected_grads):
        assert error(grad, arrays[f"grad_{name}"]) < 1e-4, name
        # The other tests' reference. One array's solution reaches 1e16, of which float64 keeps this much.
        limit = 1e-5 * np.abs(arrays[f"grad_{name}"]).max() + 1e-14
        assert np.abs(wanted - arrays[f"grad_{name}"]).max() < limit, name
    assert error(expected, arrays["solution"]) < 1e-6


# Rows per block -> padded length and lengths around, below and far beyond a block.
LENGTHS = {16: (16, (1, 2, 3, 7, 8, 15, 16)), 32: (128, (17, 65, 96, 100, 127)), 64: (256, (129, 160, 200, 209))}


@pytest.mark.parametrize(
    "block_size, strict",
    [
        (16, True),
        (32, False),
        (64, True),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((16, False), (32, True), (64, False))),
    ],
)
def test_lengths_that_no_block_divides(block_size, strict, check_prefixes):
    padded, lengths = LENGTHS[block_size]
    systems = [problem(padded, strict=strict, seed=length) for length in lengths]
    query, key, rhs, coefficient, cotangent = (np.concatenate(x) for x in zip(*systems))
    run = functools.partial(device, strict=strict, block_size=block_size)
    arrays = (query, key, rhs, coefficient if strict else systems[0][3])
    check_prefixes(lengths, run, arrays, cotangent, strict=strict, forward=1e-5, gradient=1e-4)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.full)])
def test_padding_to_whole_blocks(strict, error, reference):
    *args, cotangent = problem(53, 24, strict=strict)
    check(error, reference, args, cotangent, 1e-5, 1e-4, strict=strict, block_size=16)


def test_no_score_gradient_at_one_position():
    *args, cotangent = problem(1)
    _, grads = device(args, cotangent, strict=False)
    assert np.abs(grads[0]).max() < 1e-7
    assert np.abs(grads[1]).max() < 1e-7


@pytest.mark.parametrize(
    "dtype, gamma, ridge",
    [
        *(
            (dtype, *case)
            for dtype in (jnp.float32, jnp.bfloat16)
            for case in ((0.0, 1e-10), (0.1, 1e-10), (1.0, 1e-2), (8.0, 1e-10))
        ),
        (jnp.float16, 0.1, 1e-2),
    ],
)
def test_reference_norms(dtype, gamma, ridge, error, reference):
    *args, cotangent = problem(70, gamma=gamma, ridge=ridge, dtype=dtype)
    forward, backward = (1e-5, 1e-4) if dtype == jnp.float32 else (2e-2, 2e-2)
    check(error, reference, args, cotangent, forward, backward, strict=False, block_size=32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("gamma, strict", [(0.0, False), (0.1, False), (1.0, False), (8.0, False), (1.0, True)])
def test_many_blocks(gamma, strict, dtype, error, reference):
    """Sixteen blocks of 64 rows; prints the errors of u and of the worst gradient (experiments/README.md)."""
    *args, cotangent = problem(1024, 64, strict=strict, gamma=gamma, ridge=1e-10, dtype=dtype, num_heads=1)
    scale = 0.125 if strict else 1.0
    u, grads = device(args, cotangent, strict=strict, scale=scale)
    expected, expected_grads = reference(args, cotangent, strict=strict, scale=scale)
    forward = error(u, expected)
    # Where all keys are equal or one weight is 1 the scores have next to no gradient, only that of the right side.
    sizes = [max(np.abs(x).max(), np.abs(expected_grads[2]).max() * 1e-6) for x in expected_grads]
    backward = max(
        np.abs(np.asarray(grad, np.float64) - wanted).max() / size
        for grad, wanted, size in zip(grads, expected_grads, sizes)
    )
    print(
        f"\n{jnp.dtype(dtype).name} norm {gamma} {'DeltaFormer' if strict else 'Cubit'}: u {forward:.1e}, "
        f"gradient {backward:.1e}"
    )
    limits = (1e-5, 1e-4) if dtype == jnp.float32 else (2e-2, 2e-2)
    assert forward < limits[0]
    assert backward < limits[1]


@pytest.mark.parametrize("dtype", [jnp.float16, pytest.param(jnp.bfloat16, marks=pytest.mark.full)])
def test_keys_without_normalisation(dtype, error, reference):
    *args, cotangent = problem(130, 64, strict=True, dtype=dtype, num_heads=1)
    check(error, reference, args, cotangent, 2e-2, 2e-2, strict=True, scale=0.125)


def test_identical_keys(error, reference):
    query, key, rhs, beta, cotangent = problem(130, 64, strict=True, dtype=jnp.float16, num_heads=1)
    args = (query, np.broadcast_to(key[:, :1], key.shape), rhs, beta)
    u, grads = device(args, cotangent, strict=True, scale=0.125)
    expected, expected_grads = reference(args, cotangent, strict=True, scale=0.125)
    assert error(u, expected) < 2e-2
    for name, grad, wanted in list(zip(NAMES, grads, expected_grads))[1:]:
        assert error(np.asarray(grad, np.float64), wanted) < 2e-2, name
    # A query makes no difference between equal keys.
    assert np.abs(grads[0]).max() < 2e-2 * np.abs(expected_grads[1]).max()


PACKED = np.concatenate([np.full(20, 3), np.zeros(13), np.full(1, 1), np.full(23, 7), np.full(13, 2)])[None]


@pytest.mark.parametrize(
    ("segmented", "window", "strict"),
    [
        *((True, None, False), (True, 7, True), (True, 40, False), (False, 1, True), (False, 20, False)),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((True, None, True), (True, 7, False), (True, 40, True), (False, 1, False), (False, 20, True))
        ),
    ],
)
def test_windows_and_segments(strict, segmented, window, error, reference):
    """Unordered ids, a document of one token and padding in the middle, whose rows see nothing."""
    *args, cotangent = problem(70, strict=strict)
    ids = PACKED.astype(np.int32) if segmented else None
    if segmented:
        cotangent = cotangent * (ids != 0)[:, :, None, None]
    # u = rhs / ridge at padding would set the scale of the comparison.
    options = {"strict": strict, "segment_ids": ids, "window": window}
    u, grads = device(args, cotangent, block_size=16, **options)
    expected, expected_grads = reference(args, cotangent, **options)
    real = np.s_[:] if ids is None else ids[0] != 0
    assert error(u[:, real], expected[:, real]) < 1e-5
    for name, grad, wanted in zip(NAMES, grads, expected_grads):
        assert error(grad, wanted) < 1e-4, name


@pytest.mark.parametrize("strict", [True, pytest.param(False, marks=pytest.mark.full)])
def test_packed_half_precision(strict, error, reference):
    """Padding inside a block must not set the float16 unit of the real rows: there u is rhs / ridge = 1e10."""
    *args, cotangent = problem(70, strict=strict, dtype=jnp.bfloat16, ridge=1e-10)
    ids = PACKED.astype(np.int32)
    cotangent = cotangent * (ids != 0)[:, :, None, None]
    options = {"strict": strict, "segment_ids": ids}
    u, grads = device(args, cotangent, block_size=32, **options)
    expected, expected_grads = reference(args, cotangent, **options)
    assert error(u[:, ids[0] != 0], expected[:, ids[0] != 0]) < 2e-2
    for name, grad, wanted in zip(NAMES, grads, expected_grads):
        assert error(np.asarray(grad, np.float64), wanted) < 2e-2, name


def test_documents_do_not_mix():
    query, key, rhs, ridge, _ = problem(70)
    ids = np.repeat([[1, 2]], [30, 40], axis=1)
    u, _ = device((query, key, rhs, ridge), np.zeros_like(rhs), strict=False, segment_ids=ids, block_size=16)
    alone, _ = device(
        tuple(x[:, 30:] for x in (query, key, rhs)) + (ridge,), np.zeros_like(rhs[:, 30:]), strict=False, block_size=16
    )
    np.testing.assert_allclose(u[:, 30:], alone, atol=1e-5)
    changed = [x.copy() for x in (query, key, rhs)]
    for x in changed:
        x[:, :30] += 1.0
    other, _ = device((*changed, ridge), np.zeros_like(rhs), strict=False, segment_ids=ids, block_size=16)
    assert np.abs(other[:, :30] - u[:, :30]).max() > 0.1
    np.testing.assert_array_equal(other[:, 30:], u[:, 30:])


def test_causal():
    query, key, rhs, ridge, _ = problem(70)
    for prefix in (15, 16, 33):
        changed = [x.copy() for x in (query, key, rhs)]
        for x in changed:
            x[:, prefix:] = np.nan
        u, _ = device((*changed, ridge), np.zeros_like(rhs), strict=False, block_size=16)
        whole, _ = device((query, key, rhs, ridge), np.zeros_like(rhs), strict=False, block_size=16)
        last = prefix // 16 * 16  # rows of the block that the suffix cuts share products with it
        np.testing.assert_array_equal(u[:, :last], whole[:, :last])


@pytest.mark.parametrize(
    ("strict", "dtype", "block_size", "length", "start"),
    [
        (False, jnp.float32, 16, 60, 20),
        (True, jnp.bfloat16, 16, 60, 20),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (False, jnp.bfloat16, 16, 11, 1),
                (True, jnp.float32, 64, 130, 100),
                (False, jnp.bfloat16, 64, 130, 20),
            )
        ),
    ],
)
def test_a_row_that_overflows_spoils_no_row_before_it(strict, dtype, block_size, length, start, check_overflow):
    @jit
    def run(arrays):
        coefficient = {"beta" if strict else "ridge": arrays[3]}
        return kernel_solve(*arrays[:3], **coefficient, block_size=block_size, interpret=True)

    limit = 1e-5 if dtype == jnp.float32 else 2e-2
    check_overflow(run, length, 16, 2, strict=strict, dtype=dtype, limit=limit, start=start)


@pytest.mark.parametrize(
    ("strict", "dtype"), [(False, jnp.bfloat16), pytest.param(True, jnp.float32, marks=pytest.mark.full)]
)
def test_padding_is_inert(strict, dtype, check_padding):
    *args, cotangent = (jnp.asarray(x) for x in problem(70, strict=strict, dtype=dtype))

    def run(arrays, cotangent, segment_ids):
        return device(arrays, cotangent, strict=strict, segment_ids=segment_ids, block_size=16)

    check_padding(run, args, cotangent, jnp.asarray(PACKED, jnp.int32), strict=strict)


@pytest.mark.parametrize(
    "dims",
    [(24,), (48, 64), (256,), *(pytest.param(dims, marks=pytest.mark.full) for dims in ((8, 16), (80, 96, 128)))],
)
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.full), jnp.bfloat16])
def test_head_dims(dtype, dims, error, reference):
    """Those that are padded to one power of two, each as a head with zeros in the channels that it lacks."""
    if dtype == jnp.float32 and dims == (256,):
        pytest.skip("refused, see test_refusals")
    *args, cotangent = (np.array(x) for x in problem(33, dims[-1], strict=True, dtype=dtype, num_heads=len(dims)))
    for x in (*args[:3], cotangent):
        for head, dim in enumerate(dims):
            x[:, :, head, dim:] = 0
    limits = (1e-5, 1e-4) if dtype == jnp.float32 else (2e-2, 2e-2)
    check(error, reference, args, cotangent, *limits, strict=True, scale=dims[-1] ** -0.5, block_size=16)


def test_float32_rhs_beside_bfloat16_keys(error, reference):
    query, key, _, ridge, cotangent = problem(40, dtype=jnp.bfloat16)
    rhs = np.random.default_rng(5).standard_normal(query.shape).astype(np.float32)
    check(error, reference, (query, key, rhs, ridge), cotangent, 2e-2, 2e-2, strict=False)


def test_transformations(error):
    """vmap, scan and remat around the kernel give what a Python loop gives."""
    *args, _ = problem(40, num_heads=1)
    stacked = [jnp.stack([jnp.asarray(x), 0.5 * jnp.asarray(x)]) for x in args]

    def loss(query, key, rhs, ridge):
        return jnp.sum(kernel_solve(query, key, rhs, ridge=ridge, block_size=16, interpret=True) ** 2)

    grad = jax.grad(loss, argnums=(0, 1, 2, 3))
    alone = jit(grad)
    one_by_one = [jnp.stack(x) for x in zip(*(alone(*(x[i] for x in stacked)) for i in range(2)))]
    mapped = jit(jax.vmap(grad))(*stacked)
    remat_grad = jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2, 3))
    scanned = jit(lambda xs: jax.lax.scan(lambda _, x: (None, remat_grad(*x)), None, xs)[1])(tuple(stacked))
    for name, want, a, b in zip(NAMES, one_by_one, mapped, scanned):
        assert error(a, want) < 1e-6, name
        assert error(b, want) < 1e-6, name


def test_refusals():
    *args, _ = problem(20)
    query, key, rhs, ridge = (jnp.asarray(x) for x in args)
    with pytest.raises(NotImplementedError, match=r"block sizes \(16, 32, 64\)"):
        kernel_solve(query, key, rhs, ridge=ridge, block_size=48)
    for dtype, limit in ((jnp.float32, 128), (jnp.bfloat16, 256)):
        wide = jnp.zeros((1, 4, 1, limit + 1), dtype)
        with pytest.raises(NotImplementedError, match=f"head_dim <= {limit} for {jnp.dtype(dtype).name}"):
            kernel_solve(wide, wide, wide, ridge=ridge[:1])
    with pytest.raises(ValueError, match="exactly one"):
        kernel_solve(query, key, rhs)
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="float64"):
        kernel_solve(query.astype(jnp.float64), key, rhs, ridge=ridge)


def test_tile_ranges():
    """Tile ranges: a block starts at the first block it can see, and nothing is skipped that it sees."""
    settings = kernel_solve_gpu.Settings(
        strict=False, segmented=True, window=20, scale=1.0, rows=16, half=False, interpret=True
    )
    ids = np.zeros(96, np.int32)
    ids[:40], ids[40:90] = 5, 2
    first, last = kernel_solve_gpu._tile_range(settings, jnp.asarray(ids)[None], 1, 96)
    row, column = np.arange(96)[:, None], np.arange(96)[None, :]
    seen = (column <= row) & (row - column < 20) & (ids[:, None] == ids[None, :]) & (ids != 0)[None, :]
    tiles = seen.reshape(6, 16, 6, 16).any(axis=(1, 3)) | np.eye(6, dtype=bool)
    np.testing.assert_array_equal(first[0], [np.flatnonzero(tiles[i]).min() for i in range(6)])
    np.testing.assert_array_equal(last[0], [np.flatnonzero(tiles[:, i]).max() for i in range(6)])
