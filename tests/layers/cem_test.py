"""CEM layers against the reference arrays and against jax.grad of their energies; recursion, options, parameters."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cubit_jax import ops
from cubit_jax.layers import CEMMLP, CEMAttention, GatedMLP
from cubit_jax.model import LanguageModel, ModelConfig

LIMITS = {"float64": 1e-10, "float32": 1e-5}
# The reference arrays' options as those of the layer; without rotary embedding every position is 0.
ATTENTION = {
    "lowrank": {"interaction": "lowrank"},
    "diag_rope": {"interaction": "diagonal"},
    "shareddiag": {"interaction": "shared_diagonal"},
    "diag_pre": {"interaction": "diagonal", "preconditioner": "diagonal_lowrank", "precondition_rank": 3},
}
MLP = {"plain": {}, "pre": {"preconditioner": "diagonal_lowrank", "precondition_rank": 3}}
B, L, D, H, K, F = 2, 21, 12, 3, 4, 20


def preconditioner_of(case, options):
    if "preconditioner" not in options:
        return {}
    return {f"precond_{name}": case[f"pre_{name}"] for name in "duv"}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("steps", (1, 2, 4))
def test_attention_against_the_reference_arrays(steps, dtype, golden, error):
    case = golden("cem_attention_2")
    heads, head_dim, _ = case["wq"].shape
    with jax.enable_x64(dtype == "float64"):
        for name, options in ATTENTION.items():
            layer = CEMAttention(
                heads, head_dim, int(case["window"]), dtype=dtype, param_dtype=dtype, num_recursions=steps, **options
            )
            params = {
                "q_proj": {"kernel": np.moveaxis(case["wq"], 2, 0)},
                "step_size": case["eta"],
                "k_proj": {"kernel": np.moveaxis(case["wk"], 2, 0)},
            } | preconditioner_of(case, options)
            if options["interaction"] != "lowrank":
                params["diag"] = case["shared_diag" if name == "shareddiag" else "diag"]
            params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
            h = jnp.asarray(case["h"], dtype)
            positions = jnp.broadcast_to(jnp.arange(h.shape[1]) * ("rope" in name), h.shape[:2])
            update = jax.jit(functools.partial(layer.apply, positions=positions))({"params": params}, h)
            assert error(update, case[f"update_{name}_T{steps}"]) < LIMITS[dtype], name


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("steps", (1, 2, 4))
def test_mlp_against_the_reference_arrays(steps, dtype, golden, error):
    case = golden("cem_mlp_0")
    with jax.enable_x64(dtype == "float64"):
        for activation in ("silu", "gelu", "relu"):
            for name, options in MLP.items():
                layer = CEMMLP(
                    case["w_up"].shape[0],
                    dtype=dtype,
                    param_dtype=dtype,
                    num_recursions=steps,
                    activation=activation,
                    **options,
                )
                params = {
                    "up_proj": {"kernel": case["w_up"].T},
                    "gate_proj": {"kernel": case["w_gate"].T},
                    "step_size": case["eta"],
                } | preconditioner_of(case, options)
                params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
                update = jax.jit(layer.apply)({"params": params}, jnp.asarray(case["h"], dtype))
                assert error(update, case[f"update_{activation}_{name}_T{steps}"]) < LIMITS[dtype], (activation, name)


def make(kind, dtype="float32", **options):
    """A layer, parameters that are nowhere at their special initial values, and an input."""
    if kind == "attention":
        layer = CEMAttention(H, K, dtype=dtype, param_dtype=dtype, **options)
    else:
        layer = CEMMLP(F, dtype=dtype, param_dtype=dtype, **options)
    x = jax.random.normal(jax.random.key(0), (B, L, D), dtype)
    params = layer.init(jax.random.key(1), x)["params"]
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    leaves = [leaf + 0.2 * jax.random.normal(key, leaf.shape, leaf.dtype) for leaf, key in zip(leaves, keys)]
    return layer, jax.tree.unflatten(tree, leaves), x


def energy_of(layer, params, h, **arguments):
    kernel = {name: value["kernel"] for name, value in params.items() if isinstance(value, dict)}
    if isinstance(layer, CEMAttention):
        return lambda x: ops.interaction_energy(
            x, h, kernel["q_proj"], kernel["k_proj"], params.get("diag"), positions=jnp.arange(h.shape[1]), **arguments
        )
    return lambda x: ops.elementwise_energy(x, h, kernel["up_proj"], kernel["gate_proj"], activation=layer.activation)


def reference(layer, params, h):
    """x_T - h by jax.grad of the energy and the preconditioner as a matrix."""
    energy, x = energy_of(layer, params, h), h
    matrix = jnp.eye(h.shape[-1])
    if "precond_d" in params:
        matrix = jnp.diag(jax.nn.softplus(params["precond_d"]))
    if "precond_u" in params:
        product = params["precond_u"] @ params["precond_v"].T
        matrix = matrix + product + product.T
    step_size = params.get("step_size", layer.step_size)
    for _ in range(layer.num_recursions):
        x = x - step_size * jax.grad(lambda x: jnp.sum(energy(x)))(x) @ matrix
    return x - h


VARIANTS = [
    ("attention", {"interaction": "lowrank", "num_recursions": 2, "preconditioner": "diagonal"}),
    ("attention", {"interaction": "diagonal", "num_recursions": 1, "learn_step_size": False, "step_size": 0.3}),
    ("attention", {"interaction": "shared_diagonal", "num_recursions": 3, "preconditioner": "diagonal_lowrank"}),
    ("mlp", {"num_recursions": 3, "preconditioner": "diagonal_lowrank"}),
    ("mlp", {"num_recursions": 2, "activation": "gelu"}),
    ("mlp", {"num_recursions": 1, "activation": "relu", "preconditioner": "diagonal"}),
]


@pytest.mark.parametrize("kind, options", VARIANTS)
def test_update_and_every_gradient_are_those_of_the_energy(kind, options, error):
    with jax.enable_x64(True):
        layer, params, x = make(kind, "float64", **options)
        expected_names = {"attention": {"q_proj", "k_proj"}, "mlp": {"up_proj", "gate_proj"}}[kind]
        expected_names |= {"step_size"} if options.get("learn_step_size", True) else set()
        expected_names |= {"diag"} if options.get("interaction", "lowrank") != "lowrank" else set()
        expected_names |= {
            "none": set(),
            "diagonal": {"precond_d"},
            "diagonal_lowrank": {"precond_d", "precond_u", "precond_v"},
        }[layer.preconditioner]
        assert set(params) == expected_names
        cotangent = jax.random.normal(jax.random.key(3), x.shape)

        def losses(apply):
            def loss(params, x):
                update = apply(params, x)
                return jnp.sum(update * cotangent), update

            return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

        (_, update), actual = losses(lambda params, x: layer.apply({"params": params}, x))(params, x)
        (_, expected_update), expected = losses(functools.partial(reference, layer))(params, x)
        assert error(update, expected_update) < 1e-12
        for path, gradient in jax.tree_util.tree_leaves_with_path(actual):
            other = functools.reduce(
                lambda tree, key: tree[getattr(key, "key", getattr(key, "idx", None))], path, expected
            )
            assert error(gradient, other) < 1e-11, path
            assert jnp.max(jnp.abs(gradient)) > 1e-3, path


@pytest.mark.parametrize("kind, options", VARIANTS)
def test_number_of_parameters(kind, options):
    layer, params, _ = make(kind, **options)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == layer.expected_parameters(D)
    if "diag" in params:
        assert params["diag"].shape == ((D,) if options["interaction"] == "shared_diagonal" else (H, D))
    if kind == "mlp":
        rest = layer.descent_parameters(D)
        assert layer.expected_parameters(D) - rest == GatedMLP(F).expected_parameters(D) * 2 // 3


@pytest.mark.parametrize("kind", ("attention", "mlp"))
def test_no_recursion_and_no_step_are_the_identity(kind):
    for options in ({"num_recursions": 0}, {"num_recursions": 2, "step_size": 0.0, "learn_step_size": False}):
        layer, params, x = make(kind, **options)
        assert jnp.all(layer.apply({"params": params}, x) == 0)


@pytest.mark.parametrize("kind", ("attention", "mlp"))
def test_recursions_may_be_changed_after_training(kind, error):
    with jax.enable_x64(True):
        layer, params, x = make(kind, "float64", num_recursions=2)
        for recursions in (1, 5):
            other = layer.clone(num_recursions=recursions)
            expected = jax.jit(functools.partial(reference, other))(params, x)
            assert error(jax.jit(other.apply)({"params": params}, x), expected) < 1e-12


def test_initial_step_size_is_one_over_the_recursions():
    for recursions, given, first in ((1, None, 1.0), (4, None, 0.25), (0, None, 1.0), (4, 0.7, 0.7)):
        layer = CEMMLP(F, num_recursions=recursions, step_size=given)
        params = layer.init(jax.random.key(0), jnp.ones((1, 1, D)))["params"]
        assert params["step_size"] == jnp.float32(first)


@pytest.mark.parametrize(
    "recursions", [1, pytest.param(8, marks=pytest.mark.full), pytest.param(64, marks=pytest.mark.full)]
)
def test_deep_recursion_stays_bounded_at_initialization(recursions):
    config = ModelConfig(
        vocab_size=50,
        num_layers=3,
        model_dim=64,
        num_heads=4,
        head_dim=16,
        mlp_dim=160,
        seq_len=32,
        mixers=("cem",),
        mlp="cem",
        scan_layers=False,
        options={"num_recursions": recursions},
    )
    model = LanguageModel(config)
    tokens = jax.random.randint(jax.random.key(0), (2, 32), 0, 50)
    params = jax.jit(model.init)(jax.random.key(1), tokens)

    def loss(params, tokens):
        logits, seen = model.apply(params, tokens, capture_intermediates=True)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 0]), seen["intermediates"]

    (value, seen), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, tokens)
    assert jnp.isfinite(value)
    rms = [float(jnp.sqrt(jnp.mean(jnp.square(seen[f"layer_{i}"]["__call__"][0][0])))) for i in range(3)]
    assert max(rms) < 30, rms
    norms = [
        float(jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients["params"][f"layer_{i}"]))))
        for i in range(3)
    ]
    assert np.isfinite(norms).all() and min(norms) > 0
    ratios = [a / b for a, b in itertools.pairwise(norms)]
    assert max(ratios) < 10 and min(ratios) > 0.1, ratios


@pytest.mark.parametrize("kind, recursions", (("attention", 1), ("mlp", 8)))
def test_64_recursions_of_a_layer_made_for_few_stay_finite(kind, recursions):
    """Attention's state grows by at most a constant a step, a gated MLP's like (1 + step_size * curvature)^T."""
    layer, _, x = make(kind, num_recursions=recursions)
    params = layer.init(jax.random.key(1), x)
    deep = layer.clone(num_recursions=64)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: jnp.mean(deep.apply(params, x))))(x)
    assert jnp.isfinite(value) and jnp.all(jnp.isfinite(gradient))


@pytest.mark.parametrize("kind", ("attention", "mlp"))
def test_small_steps_are_not_lost_in_16_bits(kind, error):
    layer, params, x = make(kind, "float32", num_recursions=32)
    params["step_size"] = jnp.float32(1e-4)  # a step is far below the last bit of a bfloat16 state
    x = x.astype(jnp.bfloat16)
    update = jax.jit(layer.clone(dtype=jnp.bfloat16).apply)({"params": params}, x)
    assert update.dtype == jnp.bfloat16
    assert error(update, jax.jit(layer.apply)({"params": params}, x.astype(jnp.float32))) < 2e-2


@pytest.mark.parametrize("kind", ("attention", "mlp"))
def test_energies_are_recorded_when_asked_for(kind):
    layer, params, x = make(kind, num_recursions=2, preconditioner="diagonal_lowrank")
    assert not layer.apply({"params": params}, x, mutable=["other"])[1]
    update, seen = layer.apply({"params": params}, x, mutable=["diagnostics"])
    seen = seen["diagnostics"]
    assert set(seen) == {"energy_before", "energy_after", "step_size", "preconditioner_margin"}
    energy = energy_of(layer, params, x)
    np.testing.assert_allclose(seen["energy_before"], jnp.mean(energy(x)), rtol=1e-5)
    np.testing.assert_allclose(seen["energy_after"], jnp.mean(energy(x + update)), rtol=1e-5)
    margin = ops.preconditioner_margin(*(params[f"precond_{name}"] for name in "duv"))
    np.testing.assert_allclose(seen["preconditioner_margin"], margin, rtol=1e-5)
    assert seen["step_size"] == params["step_size"]


def test_recorded_energies_leave_padding_out():
    layer, params, x = make("attention")
    ids = jnp.ones((B, L), jnp.int32).at[0, 5:].set(0)
    _, seen = layer.apply({"params": params}, x, segment_ids=ids, mutable=["diagnostics"])
    energy = energy_of(layer, params, x, segment_ids=ids)(x)
    np.testing.assert_allclose(seen["diagnostics"]["energy_before"], jnp.sum(energy) / (L + 5), rtol=1e-5)


def test_cache_holds_keys_and_the_input_where_a_diagonal_reads_it():
    for interaction, names in {"lowrank": {"k"}, "diagonal": {"k", "h"}, "shared_diagonal": {"k", "h"}}.items():
        layer = CEMAttention(H, K, interaction=interaction)
        cache = layer.init_cache(2, 7, jnp.bfloat16, D)
        assert set(cache) == names
        assert cache["k"].shape == (2, 7, H, K) and cache["k"].dtype == jnp.bfloat16
        assert "h" not in names or cache["h"].shape == (2, 7, D)
    with pytest.raises(ValueError, match="give model_dim"):
        CEMAttention(H, K).init_cache(2, 7, jnp.bfloat16)


@pytest.mark.parametrize(
    "options",
    (
        {"interaction": "lowrank", "num_recursions": 3},
        {"interaction": "diagonal", "num_recursions": 2},
        {"interaction": "shared_diagonal", "num_recursions": 2, "preconditioner": "diagonal_lowrank"},
    ),
)
def test_decoding_in_pieces_is_the_full_pass(options, error):
    layer, params, x = make("attention", window=9, **options)
    apply = jax.jit(functools.partial(layer.apply, {"params": params}), static_argnames="prefill")
    full = apply(x)
    cache = layer.init_cache(B, L, jnp.float32, D) | {"length": jnp.zeros(B, jnp.int32)}
    pieces = []
    for begin, end in ((0, 7), (7, 14), (14, L)):  # of one length, to be compiled once
        update, new = apply(x[:, begin:end], cache=cache, prefill=begin == 0)
        cache = new | {"length": jnp.full(B, end, jnp.int32)}
        pieces.append(update)
    assert error(jnp.concatenate(pieces, axis=1), full) < 1e-5


@pytest.mark.parametrize(
    "layer, message",
    (
        (lambda: CEMAttention(H, K, interaction="low_rank"), "interaction='low_rank' must be one of lowrank, diagonal"),
        (lambda: CEMMLP(F, preconditioner="full"), "preconditioner='full' must be one of none, diagonal"),
        (lambda: CEMMLP(F, activation="swish"), "activation='swish' must be one of silu, gelu, relu"),
        (lambda: CEMMLP(F, num_recursions=-1), "num_recursions=-1 must be at least 0"),
        (lambda: CEMMLP(F, learn_step_size=False), "step_size=None must be a number"),
        (lambda: CEMMLP(F, precondition_rank=0), "precondition_rank=0 must be at least 1"),
    ),
)
def test_bad_options_are_named(layer, message):
    with pytest.raises(ValueError, match=message):
        layer()
