"""Values and gradients of kernel_solve, for every implementation that runs on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from cubit_jax import ops
from cubit_jax.ops import dispatch

NAMES = {"ridge": ("query", "key", "rhs", "ridge"), "beta": ("query", "key", "rhs", "beta")}
FORMS = sorted(NAMES)
full = functools.partial(pytest.param, marks=pytest.mark.full)


def problem(form, length, *, batch=1, heads=2, dim=8, seed=0, norm=2.0):
    """float64 arrays: keys of a given norm, as Cubit's references have, and queries along them."""
    rng, shape = np.random.default_rng(seed), (batch, length, heads, dim)
    query = rng.normal(size=shape)
    arrays = {
        "query": query,
        "key": norm * query / np.linalg.norm(query, axis=-1, keepdims=True),
        "rhs": rng.normal(size=shape),
    }
    if form == "ridge":
        arrays["ridge"] = rng.uniform(0.05, 0.3, size=heads)
    else:
        arrays["beta"] = rng.normal(size=shape[:3])
        arrays["key"] = rng.normal(size=shape)
    return arrays, rng.normal(size=shape)


def _run(arrays, cotangent, segment_ids, implementation, window, scale, block_size):
    def loss(arrays):
        u = ops.kernel_solve(
            **arrays,
            segment_ids=segment_ids,
            window=window,
            scale=scale,
            block_size=block_size,
            implementation=implementation,
        )
        return jnp.sum(u * cotangent), u

    (_, u), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
    return {"u": u, **gradients}


_compiled = jax.jit(_run, static_argnames=("implementation", "window", "scale", "block_size"))


def run(
    arrays,
    cotangent,
    implementation,
    *,
    segment_ids=None,
    window=None,
    scale=1.0,
    block_size=None,
    dtype=jnp.float32,
    compiled=_compiled,
):
    """u and the gradient of sum(u * cotangent) with respect to each array, by name."""
    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    segment_ids = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
    return compiled(arrays, jnp.asarray(cotangent), segment_ids, implementation, window, scale, block_size)


def exact(arrays, cotangent, *, segment_ids=None, window=None, scale=1.0):
    """The same, dense in float64 NumPy."""
    query, key, rhs = (arrays[name] for name in ("query", "key", "rhs"))
    strict = "beta" in arrays
    i, j = np.indices((query.shape[1], query.shape[1]))
    mask = (j <= i - strict) & (True if window is None else i - j < window)
    mask = np.broadcast_to(mask, (query.shape[0], 1, *mask.shape))
    if segment_ids is not None:
        mask = mask & ((segment_ids[:, :, None] == segment_ids[:, None]) & (segment_ids[:, None] != 0))[:, None]
    scores = scale * np.einsum("bihk,bjhk->bhij", query, key)
    top = scores.max(axis=-1, keepdims=True, where=mask, initial=-1e9)
    weights = np.exp(np.where(mask, scores - top, -np.inf))
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
    factor = np.moveaxis(arrays["beta"], 1, 2)[..., None] if strict else 1.0
    system = factor * weights + np.eye(len(i)) * (1.0 if strict else arrays["ridge"][:, None, None])
    u, y = np.zeros_like(rhs), np.zeros_like(rhs)
    for b, h in np.ndindex(rhs.shape[0], rhs.shape[2]):
        u[b, :, h] = scipy.linalg.solve_triangular(system[b, h], rhs[b, :, h], lower=True)
        y[b, :, h] = scipy.linalg.solve_triangular(system[b, h], cotangent[b, :, h], lower=True, trans=1)
    dp = -factor * np.einsum("bihk,bjhk->bhij", y, u)
    ds = scale * weights * (dp - np.sum(weights * dp, axis=-1, keepdims=True))
    result = {
        "u": u,
        "query": np.einsum("bhij,bjhk->bihk", ds, key),
        "key": np.einsum("bhij,bihk->bjhk", ds, query),
        "rhs": y,
    }
    if strict:
        return {**result, "beta": -np.einsum("bihk,bhij,bjhk->bih", y, weights, u)}
    return {**result, "ridge": -np.einsum("bihk,bihk->h", y, u)}


def assert_close(actual, expected, error, forward=1e-5, gradient=1e-4):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert error(actual[name], expected[name]) < (forward if name == "u" else gradient), name


GOLDEN = [f"{kind}_solve_{n}" for kind in ("krr", "delta") for n in range(5)]


def load(golden, name):
    d = golden(name)
    arrays = {key: d[key] for key in NAMES["ridge" if "ridge" in d else "beta"]}
    options = {
        "scale": float(d.get("scale", 1.0)),
        "window": int(d["window"]) if "window" in d else None,
        "segment_ids": d.get("segment_ids"),
    }
    return arrays, d["cotangent"], options, {"u": d["solution"], **{key: d[f"grad_{key}"] for key in arrays}}


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", GOLDEN)
def test_reference_files(name, implementation, golden, error):
    arrays, cotangent, options, expected = load(golden, name)
    actual = run(arrays, cotangent.astype(np.float32), implementation, **options)
    assert_close(actual, expected, error)
    with jax.enable_x64(True):
        actual = run(arrays, cotangent, implementation, dtype=jnp.float64, **options)
    assert all(x.dtype == jnp.float64 for x in actual.values())
    if name == "krr_solve_2":
        # Its solution reaches 1e16, and the file holds it to six digits; the next test checks the rest of them.
        assert_close(actual, expected, error, 1e-6, 1e-5)
    else:
        assert_close(actual, expected, error, 1e-10, 1e-10)


@pytest.mark.parametrize("name", ["krr_solve_2", "krr_solve_4", "delta_solve_2"])
def test_float64_is_what_row_by_row_substitution_gives(name, golden, error):
    arrays, cotangent, options, _ = load(golden, name)
    with jax.enable_x64(True):
        actual = run(arrays, cotangent, "xla", dtype=jnp.float64, **options)["u"]
    query, key, rhs = (arrays[n].astype(np.longdouble) for n in ("query", "key", "rhs"))
    u = np.zeros_like(rhs)
    strict = "beta" in arrays
    ids = options["segment_ids"]
    for i in range(rhs.shape[1]):
        for h in range(rhs.shape[2]):
            columns = [
                j
                for j in range(max(0, i - options["window"] + 1), i + (not strict))
                if ids is None or ids[0, i] == ids[0, j]
            ]
            scores = np.exp(options["scale"] * key[0, columns, h] @ query[0, i, h])
            weights = scores / np.sum(scores) if columns else scores
            if strict:
                u[0, i, h] = rhs[0, i, h] - arrays["beta"][0, i, h] * weights @ u[0, columns, h]
            else:
                rest = weights[:-1] @ u[0, columns[:-1], h]
                u[0, i, h] = (rhs[0, i, h] - rest) / (weights[-1] + arrays["ridge"][h])
    assert error(actual, u) < 1e-12


BLOCKS = [("ridge", length, block) for length in (96, 100, 160, 209) for block in (32, 64, 80, 96)]
BLOCKS += [("beta", 96, 80), ("beta", 100, 32), ("beta", 160, 96), ("beta", 209, 64)]
USUAL = {("ridge", 96, 64), ("ridge", 100, 80), ("ridge", 160, 32), ("ridge", 209, 96), ("beta", 209, 64)}
BLOCKS = [case if case in USUAL else full(*case) for case in BLOCKS]


@pytest.mark.parametrize(("form", "length", "block_size"), BLOCKS)
def test_no_block_size_changes_the_result(form, length, block_size, error):
    arrays, cotangent = problem(form, length, seed=length)
    assert_close(run(arrays, cotangent, "xla", block_size=block_size), exact(arrays, cotangent), error)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 3, 8, 17, full(2), full(7), full(15), full(16)])
def test_short_lengths(form, length, error):
    arrays, cotangent = problem(form, length, seed=length)
    actual = run(arrays, cotangent, "xla", window=9)
    assert_close(actual, exact(arrays, cotangent, window=9), error)
    if length == 1:
        assert np.abs(actual["query"]).max() <= 1e-7
        assert np.abs(actual["key"]).max() <= 1e-7


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_options_together(form, segmented, window, error):
    arrays, cotangent = problem(form, 60, batch=2, seed=5)
    ids = np.array([[1] * 25 + [2] + [4] * 30 + [0] * 4, [0] * 9 + [7] * 51]) if segmented else None
    options = {"segment_ids": ids, "window": window, "scale": 0.3}
    expected = exact(arrays, cotangent, **options)
    # Each option changes the result, so that the comparison below can tell.
    assert error(exact(arrays, cotangent)["u"], expected["u"]) > 1e-2
    actual = run(arrays, cotangent, "xla", block_size=16, **options)
    assert_close(actual, expected, error)
    assert all(np.abs(x).max() > 1e-3 for x in actual.values())  # no gradient is cut


@pytest.mark.parametrize(
    "form, platform", [("beta", "tpu"), ("ridge", "gpu"), full("ridge", "tpu"), full("beta", "gpu")]
)
def test_device_kernels_through_the_same_entry(form, platform, error):
    """Interpreted. What each kernel can do is tested beside it; this holds them to one definition of the options."""
    arrays, cotangent = problem(form, 40, batch=2, seed=5)
    options = {"segment_ids": np.array([[1] * 25 + [2] + [4] * 14, [7] * 31 + [0] * 9]), "window": 20, "scale": 0.3}
    cotangent = np.where(options["segment_ids"][..., None, None] == 0, 0, cotangent)
    with dispatch.interpret(platform):
        actual = run(arrays, cotangent, "pallas", compiled=_run, **options)
    assert_close(actual, exact(arrays, cotangent, **options), error)


@pytest.mark.parametrize("scale", [1.0, 8**-0.5])
def test_scale_of_the_scores(scale, error):
    arrays, cotangent = problem("beta", 40)
    assert_close(run(arrays, cotangent, "xla", scale=scale), exact(arrays, cotangent, scale=scale), error)


def test_limits(error):
    arrays, _ = problem("ridge", 50)
    query, key, rhs, ridge = (jnp.float32(arrays[name]) for name in NAMES["ridge"])
    solve = jax.jit(ops.kernel_solve, static_argnames="window")
    u = solve(query, key, rhs, ridge=ridge)
    by_row = solve(query, key, rhs, ridge=ridge, window=1)
    assert error(by_row, u) > 1e-2
    assert error(by_row, rhs / (1 + ridge[:, None])) < 1e-6  # the weights are the identity
    large = solve(query, key, rhs, ridge=jnp.full(2, 1e6))
    assert error(1e6 * large, rhs) < 1e-5
    off = solve(query, key, rhs, beta=jnp.zeros(rhs.shape[:3]))
    assert np.array_equal(off, rhs)  # so that DeltaFormer is softmax attention


@pytest.mark.parametrize("norm", [0.0, 1e-3, 0.05, 1.0, 30.0])
@pytest.mark.parametrize("ridge", [1e-10, 1e-2])
def test_float32_accuracy_from_uniform_to_peaked_weights(norm, ridge, error):
    arrays, cotangent = problem("ridge", 300, norm=norm, dim=16)
    arrays["ridge"] = np.full(2, ridge)
    actual, expected = run(arrays, cotangent, "xla"), exact(arrays, cotangent)
    assert error(actual["u"], expected["u"]) < 3e-6
    assert_close(actual, expected, error, gradient=2e-5)  # with norm 30 the diagonal of dS cancels, unless done exactly


@pytest.mark.parametrize("ridge", [1e3, 1e6])
def test_a_large_ridge_keeps_its_gradients(ridge, error):
    """The sum of P_ij u_j is kept; made from the right-hand side it would lose as many digits as the ridge has."""
    arrays, cotangent = problem("ridge", 40)
    arrays["ridge"] = np.full(2, ridge)
    assert_close(run(arrays, cotangent, "xla"), exact(arrays, cotangent), error)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("length", [64, 512])
def test_16_bit_inputs(form, dtype, length):
    rng = np.random.default_rng(0)
    shape = (1, length, 2, 64)
    solve = jax.jit(functools.partial(ops.kernel_solve, implementation="xla", scale=1.0 if form == "ridge" else 1 / 8))
    coefficient = {"ridge": jnp.full(2, 1e-2)} if form == "ridge" else {"beta": jnp.asarray(rng.normal(size=shape[:3]))}
    for same in (False, True):  # keys that are not normalised, and keys that are all the same
        query, key, rhs = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(3))
        if same:
            query, key = jnp.broadcast_to(query[:, :1], shape), jnp.broadcast_to(key[:, :1], shape)
        elif form == "ridge":
            query = key
        u = solve(query, key, rhs, **coefficient)
        assert u.dtype == jnp.float32
        assert np.isfinite(u).all()
        residual = _residual(query, key, rhs, u, form, coefficient)
        assert residual < 1e-5, residual


def _residual(query, key, rhs, u, form, coefficient):
    """max |M u - rhs| / (|M| |u| + |rhs|), in float64."""
    query, key, rhs, u = (np.asarray(x, np.float64) for x in (query, key, rhs, u))
    scores = np.einsum("bihk,bjhk->bhij", query, key) * (1.0 if form == "ridge" else 1 / 8)
    mask = np.tri(scores.shape[-1], k=0 if form == "ridge" else -1, dtype=bool)
    top = scores.max(axis=-1, keepdims=True, where=mask, initial=-1e9)
    weights = np.exp(np.where(mask, scores - top, -np.inf))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    (value,) = coefficient.values()
    eye = np.eye(scores.shape[-1])
    if form == "ridge":
        system = weights + np.asarray(value)[:, None, None] * eye
    else:
        system = eye + np.asarray(value, np.float64).transpose(0, 2, 1)[..., None] * weights
    product = np.einsum("bhij,bjhk->bihk", system, u)
    size = np.einsum("bhij,bjhk->bihk", np.abs(system), np.abs(u)) + np.abs(rhs)
    return np.max(np.abs(product - rhs) / size)


@pytest.mark.parametrize("form", ["ridge", full("beta")])
def test_scanned_and_rematerialised_16_bit_layers(form, error):
    """A cotangent of another dtype than its input is an error in there."""
    arrays, cotangent = problem(form, 40)
    arrays = {name: jnp.asarray(x, jnp.bfloat16) for name, x in arrays.items()}

    def layer(x, _):
        u = ops.kernel_solve(**{**arrays, "query": x}, block_size=16)
        return (x + u.astype(x.dtype) / 8).astype(x.dtype), None

    def scanned(x):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, length=2)[0].astype(jnp.float32) * cotangent)

    def unrolled(x):
        return jnp.sum(layer(layer(x, None)[0], None)[0].astype(jnp.float32) * cotangent)

    gradient, expected = (jax.jit(jax.grad(f))(arrays["query"]) for f in (scanned, unrolled))
    assert gradient.dtype == jnp.bfloat16
    assert error(gradient, expected) < 5e-2


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("form", FORMS)
def test_documents_do_not_meet(form, implementation, error):
    arrays, cotangent = problem(form, 50, seed=3)
    ids = np.array([[1] * 22 + [2] * 28])
    packed = run(arrays, cotangent, implementation, segment_ids=ids)
    changed, _ = problem(form, 50, seed=4)
    other = {
        name: np.where(ids[..., None, None] == 1, changed[name], x) if x.ndim == 4 else x for name, x in arrays.items()
    }
    if form == "beta":
        other["beta"] = np.where(ids[..., None] == 1, changed["beta"], arrays["beta"])
    after = run(other, cotangent, implementation, segment_ids=ids)
    alone = exact({name: x[:, 22:] if x.ndim > 1 else x for name, x in arrays.items()}, cotangent[:, 22:])
    assert error(after["u"][:, :22], packed["u"][:, :22]) > 1e-2
    assert error(exact(arrays, cotangent)["u"][:, 22:], packed["u"][:, 22:]) > 1e-2
    for name, x in packed.items():
        if x.ndim > 1:
            assert error(after[name][:, 22:], x[:, 22:]) <= 1e-6, name
            assert error(x[:, 22:], alone[name]) < 1e-5, name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ridge", [1e-10, 0.0])
def test_padding_is_inert(form, ridge, error):
    """Left and right padding, a row of nothing else, a segment of one token; no token of them changes a real one."""
    arrays, cotangent = problem(form, 40, batch=3, seed=6)
    if form == "ridge":
        arrays["ridge"] = np.full(2, ridge)
    ids = np.array([[0] * 7 + [1] * 20 + [2] + [3] * 12, [1] * 30 + [0] * 10, [0] * 40])
    cotangent = np.where(ids[..., None, None] == 0, 0, cotangent)  # a loss reads no padding
    padded = run(arrays, cotangent, "xla", segment_ids=ids, block_size=16)
    assert all(np.isfinite(x).all() for x in padded.values())
    for name, x in padded.items():
        if x.ndim > 1 and name != "u":
            assert not np.any(np.where((ids == 0).reshape(3, 40, *[1] * (x.ndim - 2)), x, 0)), name
    if form == "beta":
        expected = arrays["rhs"]
    else:
        expected = arrays["rhs"] / ridge if ridge else np.zeros_like(arrays["rhs"])
    assert error(padded["u"][1, 30:], expected[1, 30:]) < 1e-6
    total = 0
    for b, rows in ((0, slice(7, 27)), (0, slice(27, 28)), (0, slice(28, 40)), (1, slice(0, 30))):
        part = {name: x[b : b + 1, rows] if x.ndim > 1 else x for name, x in arrays.items()}
        alone = exact(part, cotangent[b : b + 1, rows])
        total += alone.get("ridge", 0)
        for name, x in alone.items():
            if x.ndim > 1:
                assert error(padded[name][b : b + 1, rows], x) < 1e-5, name
    if form == "ridge":
        assert error(padded["ridge"], total) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_no_row_depends_on_a_later_one(form):
    arrays, _ = problem(form, 100)
    for row in (0, 14, 15, 16, 31, 63, 64, 98):
        cotangent = np.zeros((1, 100, 2, 8))
        cotangent[:, row] = 1
        for name, x in run(arrays, cotangent, "xla", block_size=16).items():
            if x.ndim > 1 and name != "u":
                assert not np.any(x[:, row + 1 :]), name
                assert row == 0 or np.any(x[:, : row + 1]), name


def test_vmap(error):
    arrays, cotangent = problem("ridge", 30, batch=3)
    arrays = {name: jnp.float32(x) for name, x in arrays.items()}
    ids = jnp.array([[1] * 30, [1] * 10 + [2] * 20, [3] * 25 + [0] * 5])
    ridges = jnp.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])

    def one(query, key, rhs, ridge, ids, cotangent):
        def loss(query, ridge):
            u = ops.kernel_solve(query[None], key[None], rhs[None], ridge=ridge, segment_ids=ids[None], block_size=16)
            return jnp.sum(u * cotangent)

        return jax.grad(loss, (0, 1))(query, ridge)

    args = (arrays["query"], arrays["key"], arrays["rhs"], ridges, ids, jnp.float32(cotangent))
    batched = jax.jit(jax.vmap(one))(*args)
    one = jax.jit(one)
    for b in range(3):
        for actual, expected in zip(batched, one(*(x[b] for x in args))):
            assert error(actual[b], expected) < 1e-5
