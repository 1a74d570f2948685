"""CubitMixer against the reference arrays and against autodiff of the dense formula in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import sigmoid

from cubit_jax.layers import CubitMixer

CASES = [f"cubit_mixer_{i}" for i in range(5)]
NAMES = {"q_proj": "w_q", "k_proj": "w_k", "v_proj": "w_v", "r_proj": "w_r", "o_proj": "w_o", "lrr_proj": "w_lrr"}
PER_HEAD = {
    "reference_scale": "w_reference_scale",
    "log_ridge": "w_log_ridge",
    "lrr_low": "w_lrr_low",
    "lrr_range": "w_lrr_range",
}
VARIANTS = {"output": {}, "output_no_lrr": {"lrr": False}, "output_shared_reference": {"reference": "shared"}}


def full(*arguments):
    """A case of the full tier."""
    return pytest.param(*arguments, marks=pytest.mark.full)


def parameters(case, options, dtype):
    names = set(NAMES) | set(PER_HEAD)
    if options.get("lrr") is False:
        names -= {"lrr_proj", "lrr_low", "lrr_range"}
    if options.get("reference") == "shared":
        names -= {"r_proj"}
    tree = {name: {"kernel": jnp.asarray(case[NAMES[name]], dtype)} for name in names & set(NAMES)}
    return tree | {name: jnp.asarray(case[PER_HEAD[name]], dtype) for name in names & set(PER_HEAD)}


def mixer(case, options, dtype, implementation):
    _, num_heads, head_dim = case["w_q"].shape
    window = int(case["window"]) if "window" in case else None
    return CubitMixer(
        num_heads, head_dim, window, dtype=dtype, param_dtype=dtype, implementation=implementation, **options
    )


def token_arguments(case):
    return {name: jnp.asarray(case[name], jnp.int32) for name in ("segment_ids", "positions") if name in case}


def rotate(x, positions):
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * 10_000.0 ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [first * jnp.cos(angle) - second * jnp.sin(angle), second * jnp.cos(angle) + first * jnp.sin(angle)], -1
    )


def softmax_visible(scores, visible):
    scores = jnp.where(visible, scores, -jnp.inf)
    top = jnp.max(scores, -1, keepdims=True, where=visible, initial=-1e30)
    weights = jnp.where(visible, jnp.exp(scores - top), 0)
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)


def dense(params, x, segment_ids, positions, window):
    """The Cubit mixer as the paper writes it, with the matrices whole and the system inverted."""
    batch, length, _ = x.shape
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length)) if positions is None else positions
    segments = jnp.ones((batch, length), int) if segment_ids is None else segment_ids
    rows, columns = np.arange(length)[:, None], np.arange(length)[None]
    visible = (columns <= rows) & (rows - columns < (window or length))
    visible = visible & (segments[:, :, None] == segments[:, None, :]) & (segments != 0)[:, None, :]
    visible = visible[:, None]

    def project(name):
        return jnp.einsum("bld,dhk->blhk", x, params[name]["kernel"])

    q, k, v = rotate(project("q_proj"), positions), rotate(project("k_proj"), positions), project("v_proj")
    r = rotate(project("r_proj"), positions) if "r_proj" in params else k
    scale = jnp.maximum(params["reference_scale"], 0)[:, None]
    rn = scale * r / jnp.maximum(jnp.linalg.norm(r, axis=-1, keepdims=True), 1e-6)
    if "lrr_low" in params:
        gate = sigmoid(jnp.einsum("bld,dh->blh", x, params["lrr_proj"]["kernel"]))
        v = v * (params["lrr_low"] + params["lrr_range"] * gate)[..., None]
    weights = softmax_visible(jnp.einsum("bihk,bjhk->bhij", r, rn), visible)
    system = weights + jnp.exp(params["log_ridge"])[:, None, None] * jnp.eye(length)
    u = jnp.linalg.solve(system, jnp.moveaxis(v, 1, 2))
    attention = softmax_visible(jnp.einsum("bihk,bjhk->bhij", q, k) / np.sqrt(q.shape[-1]), visible)
    return jnp.einsum("bhij,bhjk,hkd->bid", attention, u, params["o_proj"]["kernel"])


def cotangent_of(case):
    return np.random.default_rng(0).normal(size=case["x"].shape)


@pytest.fixture(scope="module")
def dense_gradients(golden):
    """dense_gradients(name, variant) -> the float64 gradients of sum(cotangent * output) for (parameters, x)."""

    @functools.cache
    def compute(name, variant):
        case = golden(name)
        with jax.enable_x64(True):
            window = int(case["window"]) if "window" in case else None

            def loss(params, x):
                y = dense(params, x, case.get("segment_ids"), case.get("positions"), window)
                return jnp.sum(cotangent_of(case) * y)

            params = parameters(case, VARIANTS[variant], jnp.float64)
            return jax.tree.map(np.asarray, jax.jit(jax.grad(loss, (0, 1)))(params, jnp.asarray(case["x"])))

    return compute


def check(case, variant, implementation, dtype, forward_limit, gradient_limit, expected, error):
    options = VARIANTS[variant]
    module, tokens = mixer(case, options, dtype, implementation), token_arguments(case)
    params, x = parameters(case, options, dtype), jnp.asarray(case["x"], dtype)
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(module.init, jax.random.key(0), x[:, :1])["params"])
    assert shapes == jax.tree.map(jnp.shape, params)

    def loss(params, x):
        y = module.apply({"params": params}, x, **tokens)
        return jnp.sum(jnp.asarray(cotangent_of(case), dtype) * y), y

    gradients, y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)
    assert y.dtype == dtype
    assert error(y, case[variant]) <= forward_limit
    # One token: P = A = 1, so that no gradient reaches the embeddings that the weights are made of.
    flat = {"q_proj", "k_proj", "r_proj", "reference_scale"} if x.shape[1] == 1 else set()
    for (path, actual), (_, leaf) in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves_with_path(expected)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if flat & set(name.split("/")):
            assert np.max(np.abs(actual)) <= 1e-7, name
        else:
            assert np.any(leaf), f"the gradient of {name} is zero"
            assert error(actual, leaf) <= gradient_limit, name


@pytest.mark.parametrize(
    "name, implementation, variant",
    [
        *((name, "xla", "output") for name in CASES[2:4]),
        ("cubit_mixer_3", "reference", "output"),
        *(("cubit_mixer_3", "xla", variant) for variant in ("output_no_lrr", "output_shared_reference")),
        *(full(name, "xla", "output") for name in (*CASES[:2], CASES[4])),
        full("cubit_mixer_1", "reference", "output"),
        *(full("cubit_mixer_0", "xla", variant) for variant in ("output_no_lrr", "output_shared_reference")),
    ],
)
def test_equals_reference_arrays_and_dense_gradients(name, implementation, variant, golden, dense_gradients, error):
    check(golden(name), variant, implementation, jnp.float32, 1e-5, 1e-4, dense_gradients(name, variant), error)


@pytest.mark.parametrize("name", CASES)
def test_options_equal_reference_arrays(name, golden, error):
    case = golden(name)
    for variant, options in VARIANTS.items():
        params = parameters(case, options, jnp.float32)
        y = jax.jit(mixer(case, options, jnp.float32, "reference").apply)(
            {"params": params}, jnp.asarray(case["x"], jnp.float32), **token_arguments(case)
        )
        assert error(y, case[variant]) <= 1e-5


@pytest.mark.parametrize(
    "name, implementation",
    [("cubit_mixer_3", "xla"), full("cubit_mixer_3", "reference"), *(full(name, "xla") for name in CASES[2::2])],
)
def test_float64(name, implementation, golden, dense_gradients, error):
    expected = dense_gradients(name, "output")
    with jax.enable_x64(True):
        check(golden(name), "output", implementation, jnp.float64, 1e-10, 1e-10, expected, error)


@pytest.mark.parametrize("name", CASES[:4:3])
def test_cache_holds_the_solution(name, golden, error):
    case = golden(name)
    module, x = mixer(case, {}, jnp.float32, "reference"), jnp.asarray(case["x"], jnp.float32)
    cache = module.init_cache(len(x), x.shape[1] + 3, jnp.float32) | {"length": jnp.zeros(len(x), jnp.int32)}
    _, cache = module.apply(
        {"params": parameters(case, {}, jnp.float32)}, x, cache=cache, prefill=True, **token_arguments(case)
    )
    real = (case["segment_ids"] != 0 if "segment_ids" in case else np.ones(x.shape[:2]))[..., None, None]
    assert error(cache["u"][:, : x.shape[1]] * real, case["solution"] * real) <= 1e-5
    assert cache["u"].dtype == jnp.float32


def test_bfloat16_keeps_the_solution_wide_and_stays_close(golden, error):
    case = golden("cubit_mixer_2")
    module = mixer(case, {}, jnp.bfloat16, "xla").clone(param_dtype=jnp.float32)
    y = jax.jit(module.apply)({"params": parameters(case, {}, jnp.float32)}, jnp.asarray(case["x"], jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert error(y.astype(jnp.float32), case["output"]) <= 5e-2  # projections are rounded too, hence above 2e-2
    assert module.cache_dtypes(jnp.bfloat16) == {"k": jnp.bfloat16, "rn": jnp.bfloat16, "u": jnp.float32}


def random_mixer(options=None, length=37, model_dim=24, **overrides):
    module = CubitMixer(num_heads=3, head_dim=8, implementation="reference", **(options or {}))
    x = jax.random.normal(jax.random.key(1), (2, length, model_dim))
    params = jax.jit(module.init)(jax.random.key(2), x)["params"]
    return module, {**params, **overrides}, x


def attention_of(values, module, params, x):
    """softmax(q k^T / sqrt K) values W_o with the queries and keys of a Cubit mixer."""
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    q, k = (rotate(jnp.einsum("bld,dhk->blhk", x, params[name]["kernel"]), positions) for name in ("q_proj", "k_proj"))
    visible = np.tril(np.ones((x.shape[1],) * 2, bool))
    weights = softmax_visible(jnp.einsum("bihk,bjhk->bhij", q, k) / np.sqrt(module.head_dim), visible)
    return jnp.einsum("bhij,bjhk,hkd->bid", weights, values, params["o_proj"]["kernel"])


def test_large_ridge_is_attention_over_rescaled_values(error):
    module, params, x = random_mixer(log_ridge=jnp.full(3, np.log(1e6)))
    rescale = params["lrr_low"] + params["lrr_range"] * sigmoid(x @ params["lrr_proj"]["kernel"])
    values = rescale[..., None] * jnp.einsum("bld,dhk->blhk", x, params["v_proj"]["kernel"])
    y = module.apply({"params": params}, x)
    assert error(1e6 * y, attention_of(values, module, params, x)) <= 1e-4


def test_identity_kernel_is_attention_over_values_over_one_plus_ridge(error):
    module, params, x = random_mixer({"lrr": False}, reference_scale=jnp.full(3, 1e4), log_ridge=jnp.full(3, 0.0))
    values = jnp.einsum("bld,dhk->blhk", x, params["v_proj"]["kernel"]) / 2
    assert error(module.apply({"params": params}, x), attention_of(values, module, params, x)) <= 1e-5


def test_negative_reference_scale_acts_as_zero():
    module, params, x = random_mixer(length=256)
    zero = module.apply({"params": {**params, "reference_scale": jnp.zeros(3)}}, x)
    negative = module.apply({"params": {**params, "reference_scale": jnp.full(3, -0.1)}}, x)
    np.testing.assert_array_equal(zero, negative)
    assert np.max(np.abs(negative)) < 1e4


def test_zero_input_has_finite_gradients():
    module, params, x = random_mixer()
    gradients = jax.jit(jax.grad(lambda params, x: jnp.sum(module.apply({"params": params}, x) ** 2 + x), (0, 1)))(
        params, x.at[:, 3:7].set(0)
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_initial_values_and_rescale_bounds():
    _, params, _ = random_mixer(
        {"ridge_init": 1e-3, "lrr_low_init": 0.25, "lrr_range_init": 2.0, "reference_scale_init": 0.5}
    )
    np.testing.assert_allclose(params["log_ridge"], np.log(1e-3), rtol=1e-6)
    for name, value in {"lrr_low": 0.25, "lrr_range": 2.0, "reference_scale": 0.5}.items():
        np.testing.assert_array_equal(params[name], np.full(3, value))
    _, default, _ = random_mixer()
    np.testing.assert_allclose(default["log_ridge"], np.log(1e-10), rtol=1e-6)
    np.testing.assert_array_equal(default["lrr_low"], np.full(3, 0.5))
    np.testing.assert_array_equal(default["lrr_range"], np.full(3, 1.5))


def test_diagnostics_only_when_asked():
    module, params, x = random_mixer()
    segment_ids = jnp.ones(x.shape[:2], jnp.int32).at[:, 30:].set(0)
    _, state = module.apply({"params": params}, x, segment_ids=segment_ids, mutable=["diagnostics"])
    diagnostics = state["diagnostics"]
    assert set(diagnostics) == {"ridge_min", "ridge_max", "rescale_min", "rescale_max", "diagonal_min"}
    assert 0.5 < diagnostics["rescale_min"] < diagnostics["rescale_max"] < 2.0
    assert 0 < diagnostics["diagonal_min"] <= 1
    np.testing.assert_allclose(diagnostics["ridge_min"], 1e-10, rtol=1e-4)
    assert isinstance(module.apply({"params": params}, x), jax.Array)
    assert "diagnostics" not in module.init(jax.random.key(0), x)


@pytest.mark.parametrize("options", [{"reference": "indepedent"}, {"ridge_init": 0.0}])
def test_bad_options(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.* must be"):
        CubitMixer(num_heads=3, head_dim=8, **options)
