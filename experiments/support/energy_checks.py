"""What `check_energies` measures of a CEM layer, or of any energy: the update, its gradient, descent and causality."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from cubit_jax import ops
from cubit_jax.layers import CEMMLP, Attention, CEMAttention, GatedMLP
from cubit_jax.layers.cem import INTERACTIONS, PRECONDITIONERS
from cubit_jax.ops.potential import POTENTIALS

BATCH, LENGTH, MODEL_DIM, NUM_HEADS, HEAD_DIM, MLP_DIM = 2, 13, 12, 3, 4, 18
RECURSIONS = (1, 2, 4)
UPDATE_LIMIT = 1e-10
# A finite difference of a piecewise polynomial (relu) is limited by rounding, of a smooth function much less.
GRADIENT_LIMIT = 1e-8
SMALL_STEP = 1e-3
# Everything here compiles far longer than it runs.
_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer and the energy that it should descend.

    Attributes:
      name: columns of the table that say which.
      update: (params, h) -> x_T - h, the layer itself.
      energy: (params, x, h) -> [B, L].
      minimize: (params, direction, h) -> x_T - h for a given descent direction x -> [B, L, D], with the layer's own
        number of recursions, step size and preconditioner, the last as a matrix.
      params: tree of arrays. h: [B, L, D].
      smooth: whether finite differences of high order converge.
    """

    name: tuple[str, ...]
    update: Callable
    energy: Callable
    minimize: Callable
    params: Any
    h: jax.Array
    smooth: bool = True


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured of a case; relative differences are max|a - b| / max|b|.

    Attributes:
      update: the layer's update against explicit steps along jax.grad of the energy.
      gradient: the derivative of the layer, in a random direction of parameters and input, against finite differences.
      before, after: mean energy at h and at x_T.
      small_step: largest change of any position's energy by one plain step of 1e-3; must not be above 0.
      leak: largest derivative of a position's energy in another position's state or in later context; must be 0.
    """

    update: float
    gradient: float
    before: float
    after: float
    small_step: float
    leak: float

    @property
    def failures(self) -> list[str]:
        limits = {"update": UPDATE_LIMIT, "gradient": GRADIENT_LIMIT, "small_step": 0.0, "leak": 0.0}
        wrong = [name for name, limit in limits.items() if not getattr(self, name) <= limit]
        return wrong + [name for name in ("before", "after") if not np.isfinite(getattr(self, name))]


def measure(case: Case, seed: int = 0) -> Result:
    """The Result of a case, in the precision of its arrays."""
    keys = jax.random.split(jax.random.key(seed), 4)

    @_jit
    def values(params, h):
        direction = ops.descent_direction(lambda x: case.energy(params, x, h))
        update, expected = case.update(params, h), case.minimize(params, direction, h)
        energies = [case.energy(params, x, h) for x in (h, h + update, h + SMALL_STEP * direction(h))]
        return update, expected, energies

    update, expected, (before, after, small) = values(case.params, case.h)
    return Result(
        relative(update, expected),
        _gradient_error(case, keys[:2]),
        float(jnp.mean(before)),
        float(jnp.mean(after)),
        float(jnp.max(small - before)),
        _leak(case, keys[2]),
    )


def relative(actual: jax.Array, expected: jax.Array) -> float:
    """max|a - b| / max|b|."""
    return float(jnp.max(jnp.abs(actual - expected)) / jnp.max(jnp.abs(expected)))


def _gradient_error(case, keys):
    """Reverse-mode derivative of the layer along a random direction against a central difference of order 8 (or 2)."""
    point = (case.params, case.h)
    direction = random_like(keys[0], point)
    cotangent = jax.random.normal(keys[1], case.h.shape, case.h.dtype)

    def loss(params, h):
        return jnp.sum(cotangent * case.update(params, h))

    along = _jit(lambda t: loss(*jax.tree.map(lambda a, b: a + t * b, point, direction)))
    gradient = _jit(jax.grad(loss, (0, 1)))(*point)
    exact = sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction)))
    size, weights = (1e-2, (4 / 5, -1 / 5, 4 / 105, -1 / 280)) if case.smooth else (1e-6, (1 / 2,))
    norm = jnp.sqrt(sum(jnp.vdot(b, b) for b in jax.tree.leaves(direction)))
    size = size / norm
    estimate = sum(w * (along(n * size) - along(-n * size)) for n, w in enumerate(weights, start=1)) / size
    scale = jnp.sqrt(sum(jnp.vdot(a, a) for a in jax.tree.leaves(gradient))) * norm
    return float(abs(estimate - exact) / scale)


def _leak(case, key):
    """Largest derivative of one position's energy in what it must not read."""
    length = case.h.shape[1]
    row = length // 2
    x = case.h + jax.random.normal(key, case.h.shape, case.h.dtype)

    @_jit
    def gradients(x, h):
        return jax.grad(lambda x, h: jnp.sum(case.energy(case.params, x, h)[:, row]), (0, 1))(x, h)

    of_state, of_context = gradients(x, case.h)
    others = jnp.arange(length) != row
    return float(jnp.maximum(jnp.max(jnp.abs(of_state[:, others])), jnp.max(jnp.abs(of_context[:, row + 1 :]))))


def random_like(key: jax.Array, tree: Any) -> Any:
    """Standard normal arrays of the shapes and types of a tree's."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(structure, [jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, leaves)])


def built_in_cases(seed: int = 0) -> Iterator[Case]:
    """Every option of the two CEM layers: interaction or activation, preconditioner, number of recursions."""
    for kind, choices in (("attention", INTERACTIONS), ("mlp", POTENTIALS)):
        for choice, preconditioner, recursions in itertools.product(choices, PRECONDITIONERS, RECURSIONS):
            yield _layer_case(kind, choice, preconditioner, recursions, seed)


def _layer_case(kind, choice, preconditioner, recursions, seed):
    options = {
        "num_recursions": recursions,
        "preconditioner": preconditioner,
        "precondition_rank": 3,
        "dtype": jnp.float64,
        "param_dtype": jnp.float64,
    }
    if kind == "attention":
        layer = CEMAttention(NUM_HEADS, HEAD_DIM, interaction=choice, **options)
    else:
        layer = CEMMLP(MLP_DIM, activation=choice, **options)
    keys = jax.random.split(jax.random.key(seed))
    h = jax.random.normal(keys[0], (BATCH, LENGTH, MODEL_DIM), jnp.float64)
    shapes = jax.eval_shape(layer.init, keys[1], h)["params"]
    params = jax.tree.map(lambda x: 0.3 * x, random_like(keys[1], shapes)) | {"step_size": jnp.float64(0.3)}
    return Case(
        (f"cem {kind}", choice, preconditioner, str(recursions)),
        lambda params, h: layer.apply({"params": params}, h),
        functools.partial(_layer_energy, layer),
        functools.partial(_minimize, layer),
        params,
        h,
        smooth=choice != "relu",
    )


def _layer_energy(layer, params, x, h):
    kernels = [
        params[name]["kernel"]
        for name in (("q_proj", "k_proj") if isinstance(layer, CEMAttention) else ("up_proj", "gate_proj"))
    ]
    if isinstance(layer, CEMAttention):
        return ops.interaction_energy(x, h, *kernels, params.get("diag"), positions=jnp.arange(h.shape[1]))
    return ops.elementwise_energy(x, h, *kernels, activation=layer.activation)


def _minimize(layer, params, direction, h):
    matrix = jnp.eye(h.shape[-1], dtype=h.dtype)
    if "precond_d" in params:
        matrix = jnp.diag(jax.nn.softplus(params["precond_d"]))
    if "precond_u" in params:
        product = params["precond_u"] @ params["precond_v"].T
        matrix = matrix + product + product.T

    def step(_, x):
        return x + params["step_size"] * direction(x) @ matrix

    return jax.lax.fori_loop(0, layer.num_recursions, step, h) - h


def user_cases(
    name: str, energy: Callable, step: Callable | None, params: tuple, seed: int = 0, step_size: float = 0.1
) -> Iterator[Case]:
    """Cases of an energy(x, h, *params) -> [B, L]; step(x, h, *params) -> [B, L, D] or None is minus its gradient."""
    h = jax.random.normal(jax.random.key(seed), (BATCH, LENGTH, MODEL_DIM), jnp.float64)
    step = step or ops.descent_direction(energy)
    for recursions in RECURSIONS:

        def descend(direction, h, recursions=recursions):
            return ops.minimize(direction, h, num_steps=recursions, step_size=step_size) - h

        yield Case(
            (name, "", "none", str(recursions)),
            lambda params, h, descend=descend: descend(lambda x: step(x, h, *params), h),
            lambda params, x, h: energy(x, h, *params),
            lambda params, direction, h, descend=descend: descend(direction, h),
            params,
            h,
        )


def parameter_shares() -> list[tuple[str, int, int, float]]:
    """(layer, its parameters without step size and diagonal, those of the ordinary layer, the share it should have)."""
    model_dim, heads, head_dim, mlp_dim = 768, 12, 64, 2048
    attention = CEMAttention(heads, head_dim, interaction="lowrank", step_size=1.0, learn_step_size=False)
    mlp = CEMMLP(mlp_dim, step_size=1.0, learn_step_size=False)
    pairs = (("attention", attention, Attention(heads, head_dim), 1 / 2), ("mlp", mlp, GatedMLP(mlp_dim), 2 / 3))
    return [
        (name, layer_size(layer, model_dim), layer_size(other, model_dim), share) for name, layer, other, share in pairs
    ]


def layer_size(layer: nn.Module, model_dim: int) -> int:
    """The number of parameters that a layer's init makes."""
    shapes = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((1, 2, model_dim)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def indefinite_share(draws=1000, model_dim=64, rank=8, scales=(0.03, 0.05, 0.07, 0.1), seed=0):
    """How often diag(softplus(d)) + U V^T + V U^T is not positive definite: {scale: share of the draws}.

    d is standard normal, the entries of U and V are scale * normal.
    """
    keys = jax.random.split(jax.random.key(seed), 3)
    d = jax.random.normal(keys[0], (draws, model_dim))
    u, v = (jax.random.normal(key, (draws, model_dim, rank)) for key in keys[1:])
    margin = jax.jit(jax.vmap(ops.preconditioner_margin))
    return {scale: float(jnp.mean(margin(d, scale * u, scale * v) <= 0)) for scale in scales}
