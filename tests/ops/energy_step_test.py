"""The hand-derived CEM steps against the reference arrays and against jax.grad of the energies, in every option."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cubit_jax import ops
from cubit_jax.ops.potential import ACTIVATIONS

LIMITS = {"float64": 1e-10, "float32": 1e-5}
DIAGS = {"lowrank": None, "diag": "diag", "shareddiag": "shared_diag", "diag_rope": "diag", "diag_pre": "diag"}
IMPLEMENTATIONS = ("reference", "xla")


def arrays(case, dtype):
    return {
        name: jnp.asarray(value, dtype)
        for name, value in case.items()
        if not name.startswith(("update", "energy", "window"))
    }


def trajectory(step, energy, case, precondition):
    """x_T - h and the energies at T = 0 .. 4, and the same x_4 - h from one call of minimize."""
    descend = functools.partial(ops.minimize, step, step_size=case["eta"], precondition=precondition)

    def one(state, _):
        state = descend(state, num_steps=1)
        return state, state

    states = jnp.concatenate([case["h"][None], jax.lax.scan(one, case["h"], None, length=4)[1]])
    return states - case["h"], jax.lax.map(energy, states), descend(case["h"], num_steps=4) - case["h"]


def preconditioner(case, option):
    if "pre" not in option:
        return None
    return lambda vector: ops.precondition(vector, case["pre_d"], case["pre_u"], case["pre_v"])


@functools.partial(jax.jit, static_argnames=("option", "window", "implementation"))
def attention_trajectory(case, option, window, implementation):
    h, w_q, w_k = case["h"], *(jnp.moveaxis(case[name], 2, 0) for name in ("wq", "wk"))
    diag = None if DIAGS[option] is None else case[DIAGS[option]]
    options = {"positions": jnp.arange(h.shape[1]) if "rope" in option else None, "window": window}
    energy = functools.partial(ops.interaction_energy, context=h, w_q=w_q, w_k=w_k, diag=diag, **options)
    step = functools.partial(
        ops.interaction_step, context=h, w_q=w_q, w_k=w_k, diag=diag, **options, implementation=implementation
    )
    if implementation == "gradient":
        step = ops.descent_direction(energy)
    return trajectory(step, energy, case, preconditioner(case, option))


@functools.partial(jax.jit, static_argnames=("option", "activation", "implementation"))
def mlp_trajectory(case, option, activation, implementation):
    arguments = {"context": case["h"], "w_up": case["w_up"].T, "w_gate": case["w_gate"].T, "activation": activation}
    energy = functools.partial(ops.elementwise_energy, **arguments)
    step = functools.partial(ops.elementwise_step, **arguments)
    return trajectory(
        ops.descent_direction(energy) if implementation == "gradient" else step,
        energy,
        case,
        preconditioner(case, option),
    )


def check(actual, case, name, error, limit):
    updates, energies, at_once = actual
    for steps in (1, 2, 4):
        assert error(updates[steps], case[f"update_{name}_T{steps}"]) < limit, (name, steps)
        assert error(energies[: steps + 1], case[f"energy_{name}_T{steps}"]) < limit, (name, steps)
    assert error(at_once, updates[4]) < limit


@pytest.mark.parametrize(
    "implementation, dtype", (("gradient", "float64"), ("reference", "float64"), ("xla", "float64"), ("xla", "float32"))
)
@pytest.mark.parametrize("number", [*(pytest.param(number, marks=pytest.mark.full) for number in (0, 1)), 2])
def test_interaction_against_the_reference_arrays(number, implementation, dtype, golden, error):
    case = golden(f"cem_attention_{number}")
    window = int(case["window"]) if "window" in case else None
    with jax.enable_x64(dtype == "float64"):
        for option in DIAGS:
            actual = attention_trajectory(arrays(case, dtype), option, window, implementation)
            check(actual, case, option, error, LIMITS[dtype])


@pytest.mark.parametrize(
    "implementation, dtype", (("gradient", "float64"), ("hand-derived", "float64"), ("hand-derived", "float32"))
)
@pytest.mark.parametrize("number", [*(pytest.param(number, marks=pytest.mark.full) for number in (0, 1)), 2])
def test_elementwise_against_the_reference_arrays(number, implementation, dtype, golden, error):
    case = golden(f"cem_mlp_{number}")
    with jax.enable_x64(dtype == "float64"):
        for activation in ("silu", "gelu", "relu"):
            for option in ("plain", "pre"):
                actual = mlp_trajectory(arrays(case, dtype), option, activation, implementation)
                check(actual, case, f"{activation}_{option}", error, LIMITS[dtype])


# Longer than two row blocks and a multiple of none; short; a single token.
CASES = {
    "long": {"length": 290},
    "window": {"length": 290, "window": 45},
    "packed": {"length": 150, "segments": True},
    "packed_window": {"length": 150, "window": 7, "segments": True},
    "one": {"length": 1},
}
# Every form of the diagonal and every case at least once; all pairs of them run in the full tier.
USUAL = {("lowrank", "packed"), ("shared", "packed_window"), ("per_head", "window"), ("per_head", "one")}
DIAGONALS = ("per_head", *(pytest.param(diagonal, marks=pytest.mark.full) for diagonal in ("lowrank", "shared")))
B, D, H, K = 2, 12, 3, 4


def random_case(length, diagonal, window=None, segments=False, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    inputs = {"state": (B, length, D), "context": (B, length, D), "w_q": (D, H, K), "w_k": (D, H, K)}
    if diagonal != "lowrank":
        inputs["diag"] = (D,) if diagonal == "shared" else (H, D)
    scale = {"w_q": 0.4, "w_k": 0.4, "diag": 0.3}
    inputs = {name: jnp.asarray(rng.normal(size=shape) * scale.get(name, 1), dtype) for name, shape in inputs.items()}
    options = {"window": window, "tau": 1.3}
    if segments:
        # Documents of unequal length, one of a single token; padding at the end of one row, in front of the other.
        ids = np.ones((B, length), np.int32)
        ids[0, 40:] = 2
        ids[0, 41:] = 3
        ids[0, -9:] = 0
        ids[1, :6] = 0
        positions = np.arange(length)[None] - np.argmax(ids[:, :, None] == ids[:, None, :], axis=2)
        options |= {"segment_ids": jnp.asarray(ids), "positions": jnp.asarray(positions, jnp.int32)}
    else:
        options["positions"] = jnp.arange(length)
    return inputs, options


@pytest.mark.parametrize(
    "diagonal, case",
    [
        pytest.param(diagonal, case, marks=() if (diagonal, case) in USUAL else pytest.mark.full)
        for diagonal in ("lowrank", "shared", "per_head")
        for case in CASES
    ],
)
def test_step_and_its_gradients_are_those_of_the_energy(diagonal, case, error):
    with jax.enable_x64(True):
        inputs, options = random_case(diagonal=diagonal, **CASES[case])
        cotangent = jnp.asarray(np.random.default_rng(1).normal(size=inputs["state"].shape))

        @functools.partial(jax.jit, static_argnums=1)
        def run(inputs, implementation):
            def loss(inputs):
                if implementation == "gradient":
                    state = inputs["state"]
                    rest = {name: value for name, value in inputs.items() if name != "state"}
                    step = ops.descent_direction(ops.interaction_energy)(state, **rest, **options)
                else:
                    step = ops.interaction_step(**inputs, **options, implementation=implementation)
                return jnp.sum(step * cotangent), step

            (_, step), gradients = jax.value_and_grad(loss, has_aux=True)(inputs)
            return step, gradients

        expected_step, expected = run(inputs, "gradient")
        for implementation in IMPLEMENTATIONS if case == "packed" else ("xla",):
            step, gradients = run(inputs, implementation)
            assert error(step, expected_step) < 1e-12
            for name in inputs:
                if case == "one" and name == "state":  # one visible column has weight 1 whatever its score
                    assert jnp.max(jnp.abs(gradients[name])) < 1e-12
                    continue
                assert error(gradients[name], expected[name]) < 1e-11, name
                assert jnp.max(jnp.abs(gradients[name])) > 1e-3, name
        if "segment_ids" in options:
            assert jnp.all(step[options["segment_ids"] == 0] == 0)


@pytest.mark.parametrize("diagonal", DIAGONALS)
def test_step_in_lower_precision(diagonal, error):
    with jax.enable_x64(True):
        inputs, options = random_case(length=40, diagonal=diagonal)
        rounded = {name: x.astype(jnp.bfloat16) for name, x in inputs.items()}
        wide = {name: x.astype(jnp.float64) for name, x in rounded.items()}
        expected = ops.interaction_step(**wide, **options, implementation="reference")
        run = jax.jit(lambda inputs: ops.interaction_step(**inputs, **options))
        step = run(rounded)
        assert step.dtype == jnp.bfloat16 and error(step, expected) < 2e-2
        # A float32 state keeps its dtype beside 16-bit context.
        mixed = run(rounded | {"state": rounded["state"].astype(jnp.float32)})
        assert mixed.dtype == jnp.float32 and error(mixed, expected) < 2e-2
        narrow = {name: x.astype(jnp.float32) for name, x in inputs.items()}
        expected = ops.interaction_step(**inputs, **options, implementation="reference")
        assert error(run(narrow), expected) < 1e-5


@pytest.mark.parametrize("diagonal", DIAGONALS)
def test_no_position_reads_later_context(diagonal):
    inputs, options = random_case(length=140, diagonal=diagonal, dtype=np.float32)
    rows = (0, 63, 64, 127, 128)
    for read in (ops.interaction_step, ops.interaction_energy):

        def gradients(context, read=read):
            out, pull = jax.vjp(lambda context: read(**(inputs | {"context": context}), **options), context)
            cotangents = jnp.stack([jnp.zeros_like(out).at[:, row].set(1) for row in rows])
            return jax.vmap(pull)(cotangents)[0]

        for row, gradient in zip(rows, jax.jit(gradients)(inputs["context"])):
            assert jnp.all(gradient[:, row + 1 :] == 0), (read, row)
            assert jnp.all(jnp.any(gradient[:, : row + 1] != 0, axis=-1)), (read, row)


def test_a_packed_document_is_as_if_alone(error):
    with jax.enable_x64(True):
        inputs, options = random_case(length=150, diagonal="shared", segments=True)
        run = jax.jit(lambda inputs: ops.interaction_step(**inputs, **options))
        whole = run(inputs)
        part = slice(41, 141)
        alone = inputs | {name: inputs[name][:1, part] for name in ("state", "context")}
        step = ops.interaction_step(**alone, positions=jnp.arange(100), tau=options["tau"])
        assert error(whole[:1, part], step) < 1e-12
        other = inputs | {"context": inputs["context"].at[:, :41].add(1.0)}
        assert jnp.all(run(other)[:1, part] == whole[:1, part])


def test_a_row_that_sees_nothing_leaves_every_gradient_finite():
    inputs, options = random_case(length=20, diagonal="shared", dtype=np.float32)
    options["segment_ids"] = jnp.ones((B, 20), jnp.int32).at[0].set(0)
    for read in (ops.interaction_step, ops.interaction_energy):

        def loss(inputs, read=read):
            return jnp.sum(jnp.sin(read(**inputs, **options)))

        gradients = jax.jit(jax.grad(loss))(inputs)
        assert all(jnp.all(jnp.isfinite(g)) for g in gradients.values())
        assert jnp.all(gradients["context"][0] == 0) and jnp.any(gradients["context"][1] != 0)


@pytest.mark.parametrize("diagonal", DIAGONALS)
def test_cached_step_is_the_step_of_the_last_rows(diagonal, error):
    with jax.enable_x64(True):
        inputs, options = random_case(length=30, diagonal=diagonal, window=11)
        diag = inputs.get("diag")
        whole = ops.interaction_step(**inputs, **options)
        keys = ops.interaction_keys(inputs["context"], inputs["w_k"], positions=options["positions"])
        room = [(0, 0), (0, 6), (0, 0)]
        start = jnp.array([25, 11])  # rows of unequal length; what lies beyond them must not be read
        held = jnp.arange(36) < start[:, None] + 3
        key_cache = jnp.where(held[..., None, None], jnp.pad(keys, [*room, (0, 0)]), 1e3)
        context_cache = None if diag is None else jnp.where(held[..., None], jnp.pad(inputs["context"], room), 1e3)
        rows = start[:, None] + jnp.arange(3)
        state = jnp.take_along_axis(inputs["state"], rows[..., None], axis=1)
        step = ops.interaction_step_cached(
            state, context_cache, key_cache, inputs["w_q"], diag, start, positions=rows, window=11, tau=options["tau"]
        )
        assert error(step, jnp.take_along_axis(whole, rows[..., None], axis=1)) < 1e-12


@pytest.mark.parametrize("diagonal, window", (("shared", None), pytest.param("per_head", 64, marks=pytest.mark.full)))
def test_memory_is_linear_in_the_length(diagonal, window):
    def temporaries(length):
        inputs, options = random_case(length=length, diagonal=diagonal, window=window, dtype=np.float32)
        gradient = jax.grad(lambda inputs: jnp.sum(ops.interaction_step(**inputs, **options)))
        return jax.jit(gradient).lower(inputs).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(4096) < 2.5 * temporaries(2048)


def test_zero_steps_are_the_identity_and_one_step_is_one_gradient_step(error):
    with jax.enable_x64(True):
        inputs, options = random_case(length=20, diagonal="per_head")
        rng = np.random.default_rng(3)
        d, u, v = (jnp.asarray(rng.normal(size=shape)) for shape in ((D,), (D, 2), (D, 2)))
        state = inputs.pop("state")

        def step(x):
            return ops.interaction_step(x, **inputs, **options)

        @functools.partial(jax.jit, static_argnums=0)
        def run(num_steps, step_size):
            return ops.minimize(
                step,
                state,
                num_steps=num_steps,
                step_size=step_size,
                precondition=lambda vector: ops.precondition(vector, d, u, v),
            )

        assert jnp.all(run(0, 0.5) == state) and jnp.all(run(1, 0.0) == state)
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(ops.interaction_energy(x, **inputs, **options))))(state)
        matrix = jnp.diag(jax.nn.softplus(d)) + u @ v.T + v @ u.T
        assert error(run(1, 0.3) - state, -0.3 * gradient @ matrix) < 1e-12


def test_preconditioner_margin_is_the_smallest_relative_eigenvalue():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        signs = set()
        for scale in (0.1, 0.2, 0.3, 0.5):
            d, u, v = rng.normal(size=16), scale * rng.normal(size=(16, 3)), scale * rng.normal(size=(16, 3))
            diagonal = np.log1p(np.exp(d))
            matrix = np.diag(diagonal) + u @ v.T + v @ u.T
            relative = matrix / np.sqrt(diagonal) / np.sqrt(diagonal)[:, None]
            margin = ops.preconditioner_margin(jnp.asarray(d), jnp.asarray(u), jnp.asarray(v))
            np.testing.assert_allclose(margin, np.linalg.eigvalsh(relative)[0], rtol=1e-10)
            assert (margin > 0) == (np.linalg.eigvalsh(matrix)[0] > 0)
            signs.add(bool(margin > 0))
        assert signs == {True, False}
        assert ops.preconditioner_margin(jnp.asarray(d)) == 1


@pytest.mark.parametrize("kind", ("lowrank", "shared", "per_head", *ACTIVATIONS))
def test_a_small_step_never_raises_the_energy(kind):
    """A step of 1e-3 in a thousand draws of state, context and weights, without a preconditioner.

    The interaction energy is concave in the state, so there no step of any size raises it: its draws have any scale.
    """
    rng = np.random.default_rng(0)
    draws, length, dim, width, heads = 1000, 6, 5, 8, 2

    def normal(*shape, spread=0.0):
        scale = np.exp(spread * rng.normal(size=(draws, *(1,) * len(shape))))
        return jnp.asarray(rng.normal(size=(draws, *shape)) * scale)

    with jax.enable_x64(True):
        x, h = normal(1, length, dim), normal(1, length, dim)
        if kind in ACTIVATIONS:
            energy, step = (
                functools.partial(read, activation=kind) for read in (ops.elementwise_energy, ops.elementwise_step)
            )
            weights = normal(dim, width), normal(dim, width)
        else:
            energy, step = (
                functools.partial(read, positions=jnp.arange(length))
                for read in (ops.interaction_energy, ops.interaction_step)
            )
            weights = normal(dim, heads, 4, spread=1), normal(dim, heads, 4, spread=1)
            shapes = {"lowrank": (), "shared": ((dim,),), "per_head": ((heads, dim),)}[kind]
            weights += tuple(normal(*shape, spread=1) for shape in shapes)

        def change_of(x, h, *weights):
            return energy(x + 1e-3 * step(x, h, *weights), h, *weights) - energy(x, h, *weights)

        change = jax.jit(jax.vmap(change_of))(x, h, *weights)
        assert change.shape == (draws, 1, length) and jnp.max(change) <= 0
        assert jnp.min(change) < 0


def test_malformed_input_is_named():
    inputs, options = random_case(length=4, diagonal="per_head", dtype=np.float32)
    bad = {
        "context.shape": {"context": inputs["context"][:, :3]},
        "w_q.shape": {"w_q": inputs["w_q"][:5]},
        "w_k.shape": {"w_k": inputs["w_k"][:, :2]},
        "diag.shape": {"diag": inputs["diag"][:2]},
        "positions.shape": {"positions": jnp.arange(3)},
        "segment_ids.shape": {"segment_ids": jnp.ones((B, 3), jnp.int32)},
        "tau": {"tau": 0.0},
        "window=0": {"window": 0},
        "window=1.5": {"window": 1.5},
        "window=True": {"window": True},
        "array.dtype": {"context": jnp.ones(inputs["context"].shape, jnp.int32)},
        "no dimension of size 0": {
            "state": jnp.ones((0, 4, D)),
            "context": jnp.ones((0, 4, D)),
            "segment_ids": None,
            "positions": None,
        },
    }
    for name, change in bad.items():
        for read in (ops.interaction_energy, ops.interaction_step):
            with pytest.raises(ValueError, match=name):
                read(**({**inputs, **options} | change))
    x = inputs["state"]
    with pytest.raises(ValueError, match=r"w_up\.shape"):
        ops.elementwise_step(x, x, jnp.ones((D, 8)), jnp.ones((D, 7)))
    with pytest.raises(ValueError, match=r"array\.dtype"):
        ops.elementwise_step(jnp.ones(x.shape, int), x, jnp.ones((D, 8)), jnp.ones((D, 8)))
    for num_steps in (-1, 1.5, "2"):
        with pytest.raises(ValueError, match="num_steps"):
            ops.minimize(lambda x: -x, x, num_steps=num_steps, step_size=0.1)
    with pytest.raises(ValueError, match=r"direction\.shape"):
        ops.minimize(lambda x: -x[:, :1], x, num_steps=1, step_size=0.1)
    with pytest.raises(ValueError, match="u and v must be given together"):
        ops.precondition(x, jnp.ones(D), jnp.ones((D, 2)))
    with pytest.raises(ValueError, match="did you mean 'silu'"):
        ops.elementwise_step(x, x, jnp.ones((D, 8)), jnp.ones((D, 8)), activation="siluu")
    with pytest.raises(NotImplementedError, match="no device kernel"):
        ops.interaction_step(**inputs, **options, implementation="pallas")
    with pytest.raises(ValueError, match="implementation"):
        ops.interaction_step(**inputs, **options, implementation="dense")
