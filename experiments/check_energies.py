"""Is every CEM layer the descent on its energy that it says it is?

    python -m experiments.check_energies                          # every option of the layers here, in float64
    python -m experiments.check_energies --energy=my_file:energy  # an energy of yours: my_file.py, from this folder

`energy(x, h, *params) -> [B, L]` may be any function of jax arrays x, h [B, L, D] whose value at a position reads x at
that position and h up to it. `--params=MODULE:FUNCTION` names params(key, model_dim) -> tuple of arrays, and `--step` a
hand-derived step(x, h, *params) -> [B, L, D] to be compared with minus the energy's gradient; without it the layer is
the gradient itself, and the check is of its differentiability, causality and descent.

Columns: "update" is the largest relative difference between x_T - h of the layer and of explicit steps along jax.grad
of the energy; "gradient" that between the layer's own derivative and finite differences; "before" and "after" the mean
energy at h and x_T; "small step" the largest rise of a position's energy by one plain step of 1e-3. Ends with exit
code 1 if a number is off.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
from absl import flags

from cubit_jax.runtime import cli
from cubit_jax.runtime.errors import UserError
from experiments.support import energy_checks

_COLUMNS = ("layer", "option", "preconditioner", "T", "update", "gradient", "before", "after", "small step", "")


def define_flags() -> None:
    """In a function, so that several of these programs can be imported into one process."""
    flags.DEFINE_string("energy", None, "An energy of your own, as MODULE:FUNCTION; default: the layers here.")
    flags.DEFINE_string("step", None, "Its hand-derived step, as MODULE:FUNCTION.")
    flags.DEFINE_string("params", None, "What makes its parameters, as MODULE:FUNCTION of a key and model_dim.")
    flags.DEFINE_integer("seed", 0, "Of parameters and inputs.")


def load(flag: str, path: str) -> Callable:
    """The function that MODULE:FUNCTION names; a UserError says what is wrong with it."""
    module, colon, name = path.partition(":")
    if not colon or not name:
        raise UserError(f"--{flag}={path}: give MODULE:FUNCTION, as my_file:energy")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise UserError(f"--{flag}={path}: {error}") from error
    if not callable(found):
        raise UserError(f"--{flag}={path}: {name} is not a function")
    return found


def user_cases(
    energy_path: str, step_path: str | None, params_path: str | None, seed: int
) -> Iterator[energy_checks.Case]:
    """The cases of the flags; a UserError where the functions do not fit."""
    energy = load("energy", energy_path)
    step = load("step", step_path) if step_path else None
    params = ()
    if params_path:
        params = tuple(load("params", params_path)(jax.random.key(seed), energy_checks.MODEL_DIM))
    h = jnp.zeros((energy_checks.BATCH, energy_checks.LENGTH, energy_checks.MODEL_DIM))
    for path, function, shape in ((energy_path, energy, h.shape[:2]), (step_path, step, h.shape)):
        if function is None:
            continue
        try:
            found = jax.eval_shape(function, h, h, *params).shape
        except (TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path} fails for x, h and {len(params)} parameters: {error}") from error
        if found != shape:
            raise UserError(f"{path} gives shape {found} for x and h of {h.shape}: it must be {shape}")
    return energy_checks.user_cases(energy_path, energy, step, params, seed)


def report(cases: Iterable[energy_checks.Case], seed: int) -> int:
    """Prints the table and returns the number of cases that are off."""
    print(_line(_COLUMNS))
    worst, failed, count = 0.0, 0, 0
    for case in cases:
        result = energy_checks.measure(case, seed)
        verdict = ", ".join(f"{name} is off" for name in result.failures)
        print(
            _line(
                (
                    *case.name,
                    f"{result.update:.1e}",
                    f"{result.gradient:.1e}",
                    f"{result.before:.4f}",
                    f"{result.after:.4f}",
                    f"{result.small_step:.1e}",
                    verdict or "ok",
                )
            ),
            flush=True,
        )
        worst, failed, count = max(worst, result.update), failed + bool(verdict), count + 1
    print(f"{count - failed} of {count} as they should be; largest relative difference of an update {worst:.1e}")
    return failed


def report_built_in(seed: int) -> int:
    """What concerns the layers here only: size, and the preconditioner's sign. Returns the number that are off."""
    failed = 0
    for name, size, ordinary, share in energy_checks.parameter_shares():
        right = abs(size - share * ordinary) < 1
        failed += not right
        print(f"parameters of {name}: {size:,} of {ordinary:,} = {size / ordinary:.4f}, {'ok' if right else 'off'}")
    shares = energy_checks.indefinite_share(seed=seed)
    print(
        "preconditioner diag(softplus(d)) + U V^T + V U^T, D = 64, R = 8, d normal: not positive definite in "
        + ", ".join(f"{share:.1%} of draws at {scale:g}" for scale, share in shares.items())
        + " standard deviation of the entries of U and V"
    )
    return failed


def _line(cells):
    widths = (14, 15, 16, 1, 7, 8, 9, 9, 10, 0)
    return "  ".join(
        f"{cell:>{width}}" if 3 < i < 9 else f"{cell:<{width}}" for i, (cell, width) in enumerate(zip(cells, widths))
    )


def main() -> int:
    values = flags.FLAGS
    if not values.energy and (values.step or values.params):
        raise UserError("--step and --params belong to an --energy: give --energy=MODULE:FUNCTION too")
    with jax.enable_x64(True):
        if values.energy:
            failed = report(user_cases(values.energy, values.step, values.params, values.seed), values.seed)
        else:
            failed = report(energy_checks.built_in_cases(values.seed), values.seed) + report_built_in(values.seed)
    return 1 if failed else 0


if __name__ == "__main__":
    define_flags()
    cli.run(main)
