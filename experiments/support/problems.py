"""Problems of the benchmark and of the GPU check: the inputs of an op or mixer, its reference, its operations.

Names: the ops of OPS, the mixers of MIXERS as NAME_mixer, and CEM's settings as cem_INTERACTION_T2 (`cem_names`).
"""

import dataclasses
import re
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from cubit_jax import ops
from cubit_jax.layers import MIXERS

OPS = ("kernel_solve", "delta_solve", "attention")
MIXER_NAMES = tuple(f"{name}_mixer" for name in MIXERS)
PASSES = ("forward", "forward+backward")
# max|a - b| / max|b| against the float64 reference of the rounded inputs, of the output and of each gradient. A mixer's
# 16-bit reference rounds where the mixer does.
LIMITS = {"float32": (1e-5, 1e-4), "bfloat16": (2e-2, 2e-2), "float16": (2e-2, 2e-2)}
MIXER_LIMITS = {"float32": (1e-4, 1e-3), "bfloat16": (3e-2, 1e-1), "float16": (3e-2, 1e-1)}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the arrays [B, L, H, K]; mixers have model_dim H * K."""

    batch: int
    length: int
    num_heads: int
    head_dim: int
    dtype: str
    window: int | None = None


def cem_names(interactions: Iterable[str], recursions: Iterable[int]) -> list[str]:
    """Names of CEM attention's settings: cem_lowrank_T1 and so on, in the order of the arguments."""
    return [f"cem_{interaction}_T{t}" for interaction in interactions for t in recursions]


def mixer_options(name: str) -> tuple[str, dict]:
    """(key of MIXERS, options) of a mixer's name."""
    if setting := re.fullmatch(r"cem_(\w+)_T(\d+)", name):
        return "cem", {"interaction": setting[1], "num_recursions": int(setting[2])}
    return name.removesuffix("_mixer"), {}


def visible_pairs(length: int, window: int | None) -> int:
    """Number of (i, j) with j <= i and i - j < window."""
    window = min(window or length, length)
    return length * window - window * (window - 1) // 2


def count_flops(op: str, shape: Shape, direction: str) -> float | None:
    """Multiplications and additions of the definition: two products per visible pair forward, five more backward.

    A mixer adds its projections, and Cubit's and DeltaFormer's are a solve and an attention. None for other mixers: the
    steps of CEM share products with their own gradient.
    """
    pairs = shape.batch * shape.num_heads * visible_pairs(shape.length, shape.window)
    tile = 2 * shape.head_dim * pairs * (2 if direction == "forward" else 7)
    if op in OPS:
        return tile
    parts = {"attention_mixer": (4, 1), "deltaformer_mixer": (5, 2), "cubit_mixer": (5, 2)}
    if op not in parts:
        return None
    projections, tiles = parts[op]
    matrix = 2 * shape.batch * shape.length * (shape.num_heads * shape.head_dim) ** 2
    return tile * tiles + matrix * projections * (1 if direction == "forward" else 3)


def _op_inputs(op: str, shape: Shape, rng: np.random.Generator) -> tuple[dict, Callable]:
    """({argument: array}, f(arguments, implementation)): norms and ridge as at the start of training."""
    dims = (shape.batch, shape.length, shape.num_heads, shape.head_dim)
    query, key, rhs = rng.standard_normal((3, *dims)).astype(np.float32)
    if op == "attention":
        return {"q": query, "k": key, "v": rhs}, lambda a, name: ops.attention(
            a["q"], a["k"], a["v"], window=shape.window, implementation=name
        )
    if op == "kernel_solve":
        key = query / np.linalg.norm(query, axis=-1, keepdims=True)
        ridge = np.full(shape.num_heads, 1e-10, np.float32)
        return {"query": query, "key": key, "rhs": rhs, "ridge": ridge}, lambda a, name: ops.kernel_solve(
            a["query"], a["key"], a["rhs"], ridge=a["ridge"], window=shape.window, implementation=name
        )
    beta = rng.uniform(0.0, 1.0, dims[:3]).astype(np.float32)
    return {"query": query, "key": key, "rhs": rhs, "beta": beta}, lambda a, name: ops.kernel_solve(
        a["query"],
        a["key"],
        a["rhs"],
        beta=a["beta"],
        scale=shape.head_dim**-0.5,
        window=shape.window,
        implementation=name,
    )


def _mixer(op: str, shape: Shape, dtype, implementation: str):
    name, options = mixer_options(op)
    return MIXERS[name](
        num_heads=shape.num_heads,
        head_dim=shape.head_dim,
        window=shape.window,
        dtype=dtype,
        param_dtype=jnp.promote_types(dtype, jnp.float32),
        implementation=implementation,
        name="mixer",
        **options,
    )


ROWS = ("q", "k", "v", "query", "key", "rhs", "beta", "x")  # arguments with a row per position


class Problem:
    """Inputs of one op at one shape, the function of an implementation, and the reference on the first rows."""

    def __init__(self, op: str, shape: Shape, seed: int = 0):
        self.op, self.shape, self.dtype = op, shape, jnp.dtype(shape.dtype)
        rng = np.random.default_rng(seed)
        if op in OPS:
            inputs, self.call = _op_inputs(op, shape, rng)
            wide = ("ridge", "beta")
        else:
            model_dim = shape.num_heads * shape.head_dim
            x = rng.standard_normal((shape.batch, shape.length, model_dim)).astype(np.float32)
            params = jax.jit(_mixer(op, shape, jnp.float32, "xla").init)(jax.random.key(seed), jnp.asarray(x[:, :1]))
            inputs, wide = {"params": params, "x": x}, ("params",)
            self.call = lambda a, name: _mixer(op, shape, a["x"].dtype, name).apply(a["params"], a["x"])
        self.inputs = {
            name: value if name in wide else np.asarray(jnp.asarray(value, self.dtype))
            for name, value in inputs.items()
        }
        # The solve returns float32; everything else its input's dtype.
        out_dtype = np.float32 if op in ("kernel_solve", "delta_solve") else self.dtype
        out_shape = np.shape(inputs["x"] if "x" in inputs else inputs.get("rhs", inputs.get("v")))
        self.cotangent = rng.standard_normal(out_shape).astype(np.float32).astype(out_dtype)

    def program(self, implementation: str, direction: str) -> Callable:
        """Function of (inputs, cotangent): the output, or (output, gradients)."""
        if direction == "forward":
            return lambda inputs, cotangent: self.call(inputs, implementation)

        def both(inputs, cotangent):
            out, vjp = jax.vjp(lambda inputs: self.call(inputs, implementation), inputs)
            return out, vjp(cotangent)[0]

        return both

    def reference(self, rows: int) -> tuple:
        """(output, gradients) of the first `rows` rows, which later rows do not change, by the dense implementation.

        On the CPU; in float64, but a 16-bit mixer in its own dtype, because its roundings belong to it.
        """
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            own = self.op not in OPS and self.dtype.itemsize == 2

            def place(x):
                return jnp.asarray(x if own else np.asarray(x, np.float64))

            inputs = {
                name: jax.tree.map(lambda x, row=name in ROWS: place(x[:, :rows] if row else x), value)
                for name, value in self.inputs.items()
            }
            cotangent = self.cotangent[:, :rows]
            out = jax.jit(self.program("reference", PASSES[1]))(inputs, place(cotangent))
            return jax.tree.map(lambda x: np.asarray(x, np.float64), out)


def relative_error(actual, expected) -> float:
    """max|a - b| / max|b|; infinite where `actual` is not finite."""
    actual = np.asarray(actual, np.float64)
    if not np.isfinite(actual).all():
        return float("inf")
    return float(np.max(np.abs(actual - expected)) / (np.max(np.abs(expected)) or 1.0))


def worst_error(problem: Problem, result, expected: tuple, direction: str) -> float:
    """The largest error of output and gradients, each as a share of its limit, over the rows the reference has."""
    forward, backward = (LIMITS if problem.op in OPS else MIXER_LIMITS)[problem.shape.dtype]
    out, grads = result if direction == PASSES[1] else (result, {})
    rows = expected[0].shape[1]
    worst = relative_error(out[:, :rows], expected[0]) / forward
    for name, grad in grads.items():
        for a, b in zip(jax.tree.leaves(grad), jax.tree.leaves(expected[1][name])):
            worst = max(worst, relative_error(a[:, :rows] if name in ROWS else a, b) / backward)
    return worst
