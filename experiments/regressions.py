"""The regressions behind the token mixers, fitted to the same noisy samples: the figure of docs/papers_to_code.md.

    python -m experiments.regressions        # writes docs/figures/regressions.svg

A token mixer predicts the value at a query from pairs (key, value) before it. Here keys are points on a line, values
are noisy samples of a function, and queries are a grid. Points lie on a short arc of a large circle: the softmax of
their dot products is a Gaussian kernel, normalised over the samples.

  Nadaraya-Watson   mean of the values, weighted by the kernel: softmax attention, by ops.attention_cached
  kernel ridge      (P + ridge I) u = y, then the weighted mean of u: Cubit. "causal": a sample sees those before it, as
                    in the mixer, by ops.kernel_solve. "all samples": it sees all, the textbook's form
  delta rule        one pass over the samples; each stores a share of what the earlier ones leave unexplained.
                    DeltaFormer normalises the kernel over the samples before, which the textbook's form here does not
  local linear      a line per query, least squares weighted by the kernel (planned as a mixer)
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from cubit_jax import ops
from cubit_jax.runtime import cli
from experiments.support import plots
from experiments.support.options import output_path

NUM_SAMPLES, NOISE, WIDTH, RIDGE, SHARE = 24, 0.15, 0.09, 0.05, 0.5


def define_flags() -> None:
    """In a function, so that several of these programs can be imported into one process."""
    default = pathlib.Path(__file__).parents[1] / "docs" / "figures" / "regressions.svg"
    flags.DEFINE_string("output", str(default), "Path of the figure, .svg or .png.")
    flags.DEFINE_integer("seed", 3, "Of the samples.")


def function(x: np.ndarray) -> np.ndarray:
    """What the samples are drawn from."""
    return np.sin(2 * np.pi * x) + 1.5 * x


def draw(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points x in [0, 1] in random order, and noisy values y of `function`, each [N]."""
    random = np.random.default_rng(seed)
    x = random.uniform(0, 1, NUM_SAMPLES)
    return x, function(x) + NOISE * random.standard_normal(NUM_SAMPLES)


def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The Gaussian kernel of width WIDTH, [len(a), len(b)]."""
    return np.exp(-np.square(a[:, None] - b) / (2 * WIDTH**2))


def normalized(weights: np.ndarray) -> np.ndarray:
    """Rows that sum to one."""
    return weights / weights.sum(axis=1, keepdims=True)


def on_circle(x: np.ndarray) -> jax.Array:
    """Points as vectors [1, L, 1, 2] whose dot products are, up to a constant, the exponents of `kernel`."""
    angle = x / 32  # small, so that a chord is as long as its arc
    return jnp.asarray(np.stack([np.cos(angle), np.sin(angle)], axis=-1)[None, :, None] * 32 / WIDTH)


def read(x: np.ndarray, values: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """The mean of the samples' values at each query, weighted by the kernel: softmax attention to a cache."""
    count = queries.size
    keys, values = (jnp.broadcast_to(a, (count, *a.shape[1:])) for a in (on_circle(x), values[None, :, None, None]))
    rows = on_circle(queries).swapaxes(0, 1)  # one sequence per query, each with all the samples before it
    return np.asarray(ops.attention_cached(rows, keys, values, jnp.full(count, x.size - 1), scale=1.0)).ravel()


def nadaraya_watson(x: np.ndarray, y: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Softmax attention."""
    return read(x, y, queries)


def kernel_ridge_causal(x: np.ndarray, y: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Cubit: the solve over the samples in their order, then attention to its solution."""
    points = on_circle(x)
    u = ops.kernel_solve(points, points, jnp.asarray(y)[None, :, None, None], ridge=jnp.array([RIDGE]))
    return read(x, np.asarray(u)[0, :, 0, 0], queries)


def kernel_ridge(x: np.ndarray, y: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Cubit's equation where every sample sees every other."""
    u = np.linalg.solve(normalized(kernel(x, x)) + RIDGE * np.eye(x.size), y)
    return normalized(kernel(queries, x)) @ u


def delta_rule(x: np.ndarray, y: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """u_i = SHARE * (y_i - sum_{j<i} K_ij u_j), read by the kernel."""
    system = np.eye(x.size) + SHARE * np.tril(kernel(x, x), -1)
    return kernel(queries, x) @ np.linalg.solve(system, SHARE * y)


def local_linear(x: np.ndarray, y: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """The intercept of a weighted least-squares line around each query."""
    weights, offsets = normalized(kernel(queries, x)), x - queries[:, None]
    mean = np.sum(weights * offsets, axis=1, keepdims=True)
    variance = np.sum(weights * np.square(offsets - mean), axis=1, keepdims=True)
    return np.sum(weights * (1 - mean * (offsets - mean) / variance) * y, axis=1)


PANELS = {
    "Nadaraya-Watson\nsoftmax attention": {"weighted mean": nadaraya_watson},
    "kernel ridge regression\nCubit": {"causal": kernel_ridge_causal, "all samples": kernel_ridge},
    "delta rule\nDeltaFormer": {"one pass": delta_rule},
    "local linear regression\nplanned": {"weighted lines": local_linear},
}


def plot(seed: int, path: pathlib.Path) -> None:
    """One panel per regression, with the samples, the function and the error of the fit."""
    pyplot = plots.pyplot()
    x, y = draw(seed)
    queries = np.linspace(0, 1, 201)
    with pyplot.rc_context({"svg.hashsalt": "cubit_jax", "svg.fonttype": "none", "font.size": 11}):
        figure, axes = pyplot.subplots(1, len(PANELS), figsize=(13, 3.6), sharey=True, layout="constrained")
        for axis, (title, fits) in zip(axes, PANELS.items()):
            axis.plot(queries, function(queries), color="0.6", linewidth=1.5, linestyle=":", label="function")
            for color, (name, fit) in zip(("C0", "C1"), fits.items()):
                values = fit(x, y, queries)
                error = np.sqrt(np.mean(np.square(values - function(queries))))
                axis.plot(queries, values, color=color, linewidth=2, label=f"{name}: error {error:.2f}")
            axis.plot(x, y, "o", color="black", markersize=4, label="samples")
            axis.set(title=title, xlabel="key", xlim=(-0.02, 1.02), xticks=[0, 0.5, 1])
            axis.spines[["top", "right"]].set_visible(False)
            axis.legend(frameon=False, fontsize=9, loc="upper left")
        axes[0].set(ylabel="value", ylim=(-0.5, 2.6))
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def main() -> None:
    path = output_path(flags.FLAGS.output)
    with jax.enable_x64(True):
        plot(flags.FLAGS.seed, path)
    print(f"wrote {path}")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
