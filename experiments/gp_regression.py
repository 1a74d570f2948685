"""Does deeper recursion regress better in context? CEM with T = 1, 2, 4, 8 and softmax attention on Gaussian processes.

    python -m experiments.gp_regression --quick     # two seeds, few steps: a minute or two, too little to decide
    python -m experiments.gp_regression             # at most 30 minutes on two CPU cores
    python -m experiments.gp_regression             # stopped? the same command keeps the models that were finished

A sequence is one function drawn from a Gaussian process (RBF kernel) at random points. A token holds the next point
and the last (point, noisy value); the model predicts the value there, as in arXiv 2605.07588's regression experiment.
The CEM models have the same parameters at every T; softmax attention and its gated MLP are narrowed until they have as
many. Every model sees the same functions, seed by seed, and is trained with the same optimizer.

Prints RMSE against the noiseless function with 95 % confidence intervals over seeds (Student's t), and paired
differences; writes OUTPUT.json and OUTPUT.png. "exact" is the posterior mean of the process, which no model beats.
"""

import itertools
import json
import math
import pathlib
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from flax import linen as nn

from cubit_jax.layers import CEMMLP, Attention, CEMAttention, GatedMLP
from cubit_jax.runtime import cli
from cubit_jax.runtime.errors import UserError
from cubit_jax.runtime.files import write_atomically
from experiments.support import plots
from experiments.support.options import integers, output_files
from experiments.support.timing import environment

LENGTH_SCALE, NOISE, EXTENT = 0.5, 0.1, 2.0  # of the process; points are uniform in (-EXTENT, EXTENT)
NUM_POINTS = 32
# One layer, so that recursion is the only depth.
NUM_LAYERS, MODEL_DIM, NUM_HEADS, HEAD_DIM, MLP_DIM = 1, 48, 4, 16, 96
_SETTINGS = ("seeds", "steps", "batch", "test_functions", "learning_rate")
_QUICK = {"seeds": 2, "steps": 150, "test_functions": 200, "recursions": ["1", "2"]}
# Student's t at 97.5 %, by degrees of freedom.
_T_QUANTILE = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def define_flags() -> None:
    """In a function, so that several of these programs can be imported into one process."""
    flags.DEFINE_list("recursions", ["1", "2", "4", "8"], "Values of T.")
    flags.DEFINE_integer("seeds", 4, "Models of each kind.", lower_bound=2, upper_bound=10)
    flags.DEFINE_integer("steps", 1500, "Updates of each model.", lower_bound=1)
    flags.DEFINE_integer("batch", 16, "Functions an update.", lower_bound=1)
    flags.DEFINE_integer("test_functions", 2000, "Functions that RMSE is measured on.", lower_bound=1)
    flags.DEFINE_float("learning_rate", 2e-3, "Peak; warm-up over the first tenth, then cosine.", lower_bound=0.0)
    flags.DEFINE_boolean("quick", False, "Two seeds, 150 steps, 200 functions, T = 1 and 2, unless given: does it run?")
    flags.DEFINE_string("output", "gp_regression", "Path without ending of the .json and .png files.")


class Regressor(nn.Module):
    """Pre-norm blocks over [B, L, 4] tokens -> [B, L] predictions; recursions=None is softmax attention."""

    recursions: int | None

    # The dense reference of the ops is the fastest for so few points.
    @nn.compact
    def __call__(self, tokens):
        x = nn.Dense(MODEL_DIM, name="embed")(tokens)
        positions = jnp.zeros(x.shape[:2], jnp.int32)  # the order of the points carries nothing: no rotation
        for i in range(NUM_LAYERS):
            x = x + self._mixer(f"mixer_{i}")(nn.RMSNorm(name=f"mixer_norm_{i}")(x), positions=positions)
            x = x + self._mlp(f"mlp_{i}")(nn.RMSNorm(name=f"mlp_norm_{i}")(x))
        return nn.Dense(1, name="head")(nn.RMSNorm(name="final_norm")(x))[..., 0]

    def _mixer(self, name):
        if self.recursions is None:  # four matrices of half the heads' width are as large as two
            return Attention(NUM_HEADS, HEAD_DIM // 2, implementation="reference", name=name)
        return CEMAttention(NUM_HEADS, HEAD_DIM, num_recursions=self.recursions, implementation="reference", name=name)

    def _mlp(self, name):
        if self.recursions is None:  # three matrices of two thirds of the width
            return GatedMLP(MLP_DIM * 2 // 3, name=name)
        return CEMMLP(MLP_DIM, num_recursions=self.recursions, name=name)


def draw(key: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """Tokens [count, L, 4], noisy values y and values f [count, L], and the process's own prediction [count, L]."""
    keys = jax.random.split(key, 3)
    x = jax.random.uniform(keys[0], (count, NUM_POINTS), minval=-EXTENT, maxval=EXTENT)
    kernel = jnp.exp(-jnp.square(x[:, :, None] - x[:, None, :]) / (2 * LENGTH_SCALE**2))
    identity = jnp.eye(NUM_POINTS)
    f = jnp.einsum("bij,bj->bi", cholesky(kernel + 1e-4 * identity), jax.random.normal(keys[1], (count, NUM_POINTS)))
    y = f + NOISE * jax.random.normal(keys[2], f.shape)
    exact = posterior_mean(kernel + (NOISE**2 + 1e-4) * identity, y)
    before = [jnp.pad(a[:, :-1], ((0, 0), (1, 0))) for a in (x, y, jnp.ones_like(x))]
    return jnp.stack([x, *before], axis=-1), y, f, exact


def cholesky(matrices: jax.Array) -> jax.Array:
    """The lower factors of [B, N, N], column by column.

    Not LAPACK's: on a CPU two batches of factorizations in one program may each wait for the other's thread for ever.
    """

    def column(i, carry):
        rest, factors = carry
        values = jnp.where(jnp.arange(matrices.shape[-1]) < i, 0, rest[:, :, i] / jnp.sqrt(rest[:, i, i, None]))
        return rest - values[:, :, None] * values[:, None, :], factors.at[:, :, i].set(values)

    return jax.lax.fori_loop(0, matrices.shape[-1], column, (matrices, jnp.zeros_like(matrices)))[1]


def posterior_mean(covariance: jax.Array, y: jax.Array) -> jax.Array:
    """Of each point given those before it, [B, N]: sum_{j<i} C_ij z_j with C C^T = covariance [B, N, N] and C z = y."""
    factors = cholesky(covariance)

    def substitute(i, carry):
        predicted, z = carry  # z is 0 where it is not yet known
        mean = jnp.einsum("bj,bj->b", factors[:, i], z)
        return predicted.at[:, i].set(mean), z.at[:, i].set((y[:, i] - mean) / factors[:, i, i])

    return jax.lax.fori_loop(0, y.shape[-1], substitute, (jnp.zeros_like(y), jnp.zeros_like(y)))[0]


def make_train(model: nn.Module, *, batch: int, steps: int, learning_rate: float) -> tuple[Callable, Callable]:
    """start: seeds -> carry, and advance: (carry, first, last) -> (carry, mean loss of steps first .. last - 1).

    One model per seed, trained side by side; carry[0] holds their parameters.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, max(steps // 10, 1), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=1e-3))

    def start(seed):
        init_key, data_key = jax.random.split(jax.random.key(seed))
        params = model.init(init_key, jnp.zeros((1, NUM_POINTS, 4)))
        return params, optimizer.init(params), data_key

    def advance(carry, first, last):
        params, state, data_key = carry

        def update(step, carry):
            params, state, sum_of_losses = carry
            tokens, y, _, _ = draw(jax.random.fold_in(data_key, step), batch)

            def loss(params):
                return jnp.mean(jnp.square(model.apply(params, tokens) - y))

            value, gradient = jax.value_and_grad(loss)(params)
            change, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, change), state, sum_of_losses + value

        params, state, sum_of_losses = jax.lax.fori_loop(first, last, update, (params, state, 0.0))
        return (params, state, data_key), sum_of_losses / (last - first)

    return jax.jit(jax.vmap(start)), jax.jit(jax.vmap(advance, in_axes=(0, None, None)))


def train(name: str, model: nn.Module, *, seeds: int, steps: int, batch: int, learning_rate: float) -> tuple:
    """The parameters of one model per seed, and their mean losses in the last tenth of the steps; says how it goes."""
    start, advance = make_train(model, batch=batch, steps=steps, learning_rate=learning_rate)
    carry = start(jnp.arange(seeds))
    begin = time.perf_counter()
    for tenth in range(min(10, steps)):
        first, last = (steps * n // min(10, steps) for n in (tenth, tenth + 1))
        carry, losses = advance(carry, first, last)
        print(
            f"{name:<18} step {last:>{len(str(steps))}} of {steps}   loss {float(jnp.mean(losses)):.4f}   "
            f"{(time.perf_counter() - begin) * (steps - last) / last:.0f} s left",
            flush=True,
        )
    return carry[0], losses


def rmse_by_position(model: nn.Module, params, test: tuple[jax.Array, ...]) -> np.ndarray:
    """[seeds, L] against the noiseless function."""
    tokens, _, f, _ = test

    @jax.jit
    def one(params):
        error = jax.lax.map(lambda row: model.apply(params, row[0][None])[0] - row[1], (tokens, f), batch_size=100)
        return jnp.sqrt(jnp.mean(jnp.square(error), axis=0))

    return np.stack([one(jax.tree.map(lambda a, i=i: a[i], params)) for i in range(len(jax.tree.leaves(params)[0]))])


def total(by_position: np.ndarray) -> np.ndarray:
    """RMSE over all positions: [..., L] -> [...]."""
    return np.sqrt(np.mean(np.square(by_position), axis=-1))


def interval(values: np.ndarray) -> tuple[float, float]:
    """(mean, half the width of its 95 % confidence interval) of independent values."""
    return float(np.mean(values)), float(_T_QUANTILE[len(values) - 1] * np.std(values, ddof=1) / math.sqrt(len(values)))


def parameter_count(model: nn.Module) -> int:
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, NUM_POINTS, 4)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def experiment(recursions: list[int], path: pathlib.Path, **settings) -> dict:
    """Trains and measures all models; returns what goes to the JSON file at `path`.

    A model's numbers are written as soon as they are known, and those already there are kept: a run that was stopped
    goes on where it was. Raises UserError for a file of other settings.
    """
    models = {"softmax attention": Regressor(None)} | {f"CEM T={t}": Regressor(t) for t in recursions}
    results = finished(path, settings)
    test = jax.jit(draw, static_argnums=1)(jax.random.key(2**31 - 1), settings["test_functions"])
    exact = np.sqrt(np.mean(np.square(np.asarray(test[3]) - np.asarray(test[2])), axis=0))
    for name, model in models.items():
        if name not in results:
            begin = time.perf_counter()
            params, loss = train(name, model, **{k: v for k, v in settings.items() if k != "test_functions"})
            by_position = rmse_by_position(model, params, test)
            mean, half = interval(total(by_position))
            results[name] = {
                "parameters": parameter_count(model),
                "rmse": mean,
                "half_width": half,
                "rmse_by_seed": total(by_position).tolist(),
                "train_loss_by_seed": np.asarray(loss).tolist(),
                "rmse_by_position": by_position.mean(axis=0).tolist(),
                "seconds": time.perf_counter() - begin,
            }
            write(path, {"settings": settings, "results": results})
    results = {name: results[name] for name in models}
    record = {
        "settings": settings,
        "results": results,
        "exact": float(total(exact)),
        "exact_by_position": exact.tolist(),
        "differences": differences(results, recursions),
        "environment": environment(),
    }
    write(path, record)
    return record


def write(path: pathlib.Path, record: dict) -> None:
    write_atomically(path, (json.dumps(record, indent=2) + "\n").encode())


def finished(path: pathlib.Path, settings: dict) -> dict:
    """{name: numbers} of the models that an earlier run with these settings has finished."""
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_text())
        results = record["results"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a file of this program ({error}): choose another --output") from error
    if record["settings"] != settings:
        raise UserError(f"{path} holds results of other settings, {record['settings']}: choose another --output")
    print(f"{path}: kept {', '.join(results)}", flush=True)
    return results


def table(record: dict) -> Iterator[str]:
    """The lines of a Markdown table: a model, its parameters, its RMSE."""
    yield "| model | parameters | RMSE, 95 % interval | seconds |"
    yield "| --- | --- | --- | --- |"
    for name, r in record["results"].items():
        yield f"| {name} | {r['parameters']:,} | {r['rmse']:.4f} ± {r['half_width']:.4f} | {r['seconds']:.0f} |"
    yield f"| exact posterior | | {record['exact']:.4f} | |"


def differences(results: dict, recursions: list[int]) -> dict[str, tuple[float, float]]:
    """What each larger T changes in RMSE, paired by seed: {"T=1 to T=2": [mean, half width of the interval]}."""

    def seeds(t):
        return np.asarray(results[f"CEM T={t}"]["rmse_by_seed"])

    pairs = list(itertools.pairwise(recursions))
    if len(recursions) > 2:
        pairs.append((recursions[0], recursions[-1]))
    return {f"T={a} to T={b}": interval(seeds(b) - seeds(a)) for a, b in pairs}


def conclusion(differences: dict[str, tuple[float, float]]) -> Iterator[str]:
    """One sentence per pair of depths, on whether the larger has the lower RMSE beyond what seeds explain."""
    for name, (mean, half) in differences.items():
        verdict = "undecided"
        if abs(mean) > half:
            verdict = "lower RMSE" if mean < 0 else "higher RMSE"
        yield f"{name}: {mean:+.4f} ± {half:.4f}, {verdict}"


def plot(record: dict, path: pathlib.Path) -> None:
    """RMSE against T, and against the number of points seen."""
    figure, (left, right) = plots.pyplot().subplots(1, 2, figsize=(10, 4))
    deep = {int(name.removeprefix("CEM T=")): r for name, r in record["results"].items() if name.startswith("CEM")}
    left.errorbar(
        list(deep),
        [r["rmse"] for r in deep.values()],
        [r["half_width"] for r in deep.values()],
        marker="o",
        capsize=4,
        label="CEM, 95 % interval over seeds",
    )
    softmax = record["results"]["softmax attention"]
    low, high = (softmax["rmse"] + sign * softmax["half_width"] for sign in (-1, 1))
    left.axhspan(low, high, color="C1", alpha=0.3)
    left.axhline(softmax["rmse"], color="C1", label="softmax attention")
    left.axhline(record["exact"], color="black", linestyle="--", label="exact posterior")
    left.set(xlabel="recursions T", ylabel="RMSE", xscale="log", xticks=list(deep), xticklabels=list(deep))
    for name, result in record["results"].items():
        right.plot(result["rmse_by_position"], label=name)
    right.plot(record["exact_by_position"], color="black", linestyle="--", label="exact posterior")
    right.set(xlabel="points seen", ylabel="RMSE")
    left.minorticks_off()
    left.legend(loc=(0.03, 0.1))
    right.legend()
    figure.tight_layout()
    plots.save(figure, path)


def chosen(flag_values: flags.FlagValues) -> tuple[list[int], dict]:
    """(values of T, settings of the experiment) of the flags. --quick changes those that are not given."""
    values = {name: flag_values[name].value for name in ("recursions", *_SETTINGS)}
    if flag_values.quick:
        values |= {name: value for name, value in _QUICK.items() if not flag_values[name].present}
    return integers("recursions", values.pop("recursions"), lowest=0), values


def main() -> None:
    recursions, settings = chosen(flags.FLAGS)
    json_path, png_path = output_files(flags.FLAGS.output)
    plots.pyplot()
    record = experiment(recursions, json_path, **settings)
    print(*table(record), *conclusion(record["differences"]), sep="\n")
    plot(record, png_path)


if __name__ == "__main__":
    define_flags()
    cli.run(main)
