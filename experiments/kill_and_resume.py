"""Does a run that is killed at any moment end as the same run?

    python -m experiments.kill_and_resume --kills=50 --seed=0

A small run trains undisturbed. The same run is then killed (SIGKILL) at random moments, half of them counted from the
start and half from the first step, and started again each time, until it is complete; then the same from the beginning,
until there were --kills kills. Checked after every kill: no complete checkpoint is lost but by a newer one, and at most
two intervals of steps are lost (one save may be under way while the next interval runs). Checked at each end:
parameters, moments, position in the data and every number of metrics.jsonl but the speeds are those of the undisturbed
run, bit for bit. Ends with exit code 1 at a fault.
"""

import dataclasses
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from configs import cubit
from cubit_jax import train
from cubit_jax.model import LanguageModel
from cubit_jax.runtime import cli
from cubit_jax.runtime.errors import UserError
from cubit_jax.training import checkpoint_steps, config_check
from cubit_jax.training import step as train_step
from cubit_jax.training.checkpoint import Checkpoints

_EVERY = 5  # steps between checkpoints


def define_flags() -> None:
    """In a function, so that several of these programs can be imported into one process."""
    flags.DEFINE_integer("kills", 50, "How often to kill.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Of the moments.")
    flags.DEFINE_integer("steps", 60, "Steps of the run.", lower_bound=2 * _EVERY)


@dataclasses.dataclass(frozen=True)
class Wait:
    """When to kill: so many seconds after the start of the process, or after its first step."""

    after_first_step: bool
    seconds: float


@dataclasses.dataclass
class Killed:
    """Kills of a run, the most steps that one of them lost, and what was wrong."""

    kills: int = 0
    most_lost: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)


def make_config(texts: pathlib.Path, num_steps: int) -> ConfigDict:
    """A run of cubit that makes many steps and saves in a second; writes its few documents to `texts`."""
    words = ("the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "over", "hills", "to", "find", "its", "red")
    for number in range(8):
        source = random.Random(number)
        lines = [" ".join(source.choices(words, k=8)) for _ in range(12)]
        (texts / f"{number}.txt").write_text("\n".join(lines), encoding="utf-8")
    config = cubit.get_config("tiny")
    config.model.update(vocab_size=300, num_layers=2, model_dim=16, num_heads=2, head_dim=8, mlp_dim=32)
    config.update(seq_len=32, num_steps=num_steps, checkpoint_every=_EVERY, log_every=1, eval_every=20, keep_best=1)
    config.data.update(source="files", path=f"{texts}/*.txt", heldout_fraction=0.2)
    return config


def start(config: ConfigDict, folder: pathlib.Path, log: pathlib.Path) -> multiprocessing.Process:
    """Starts, or goes on with, the run in a process of its own, whose output is appended to `log`."""
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=(config, folder, log))
    process.start()
    return process


def _run(config, folder, log):
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    train.train(config, str(folder))


def newest(folder: pathlib.Path) -> int:
    """The newest complete checkpoint, 0 before the first."""
    checkpoints = folder / "checkpoints"
    return max(checkpoint_steps.find_steps(checkpoints)[0], default=0) if checkpoints.is_dir() else 0


def reached(folder: pathlib.Path) -> int:
    """The last step whose numbers were written; a line that was cut off counts for nothing."""
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"\n")), default=0)


def outcome(config: ConfigDict, folder: pathlib.Path) -> tuple[list[np.ndarray], bytes, list[dict[str, float]]]:
    """What two runs must have in common: the arrays of the last state, the position in the data, the metrics."""
    model_config, mesh = config_check.check(config)
    shapes = train_step.state_shapes(LanguageModel(model_config), config, mesh)[0]
    checkpoints = Checkpoints(folder)
    state, position = checkpoints.restore(shapes)
    checkpoints.close()
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    numbers = [
        {name: row.get(name) for name in ("step", "train/loss", "eval/loss", "gradient_norm")} for row in metrics
    ]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)], position, numbers


def same(one: tuple, other: tuple) -> bool:
    """Whether two outcomes agree in every bit."""
    arrays = all(a.tobytes() == b.tobytes() for a, b in zip(one[0], other[0], strict=True))
    return arrays and one[1:] == other[1:]


def wait_for_steps(process: multiprocessing.Process, metrics: pathlib.Path, before: float) -> None:
    """Returns when the process has written numbers of a step since the time `before`, or has ended."""
    while process.exitcode is None and not (metrics.exists() and metrics.stat().st_mtime > before):
        process.join(0.01)


def kill_until_complete(config: ConfigDict, folder: pathlib.Path, log: pathlib.Path, waits: Iterator[Wait]) -> Killed:
    """Runs `config` in `folder`, killed after each of `waits`, or until it is complete."""
    result, kept = Killed(), 0
    while True:
        begun = time.time()
        process = start(config, folder, log)
        wait = next(waits, None)
        if wait and wait.after_first_step:
            wait_for_steps(process, folder / "metrics.jsonl", begun)
        process.join(wait.seconds if wait else None)
        if process.exitcode is None:
            process.kill()
            process.join()
        if process.exitcode != -signal.SIGKILL:
            if process.exitcode:
                end = log.read_text(encoding="utf-8", errors="replace")[-2000:]
                result.faults.append(f"ended with exit code {process.exitcode}: {end}")
            return result
        at, last = reached(folder), newest(folder)
        since = "its first step" if wait.after_first_step else "the start"
        print(
            f"{folder.name}  killed {wait.seconds:5.2f} s after {since:14}  at step {at:4}, newest checkpoint {last:4}"
        )
        sys.stdout.flush()
        if last < kept:
            result.faults.append(f"checkpoint {kept} is gone, the newest is {last}")
        if at - last > 2 * _EVERY:
            result.faults.append(f"steps {last} to {at} are lost")
        result.kills += 1
        result.most_lost = max(result.most_lost, at - last)
        kept = last


def main() -> int:
    values = flags.FLAGS
    multiprocessing.get_context("forkserver").set_forkserver_preload(["cubit_jax.train"])
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(temporary)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(root / "compiled"))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        (root / "texts").mkdir()
        config = make_config(root / "texts", values.steps)
        for name in ("warm_up", "undisturbed"):  # the second time with all programs compiled
            begun, metrics = time.time(), root / name / "metrics.jsonl"
            process = start(config, root / name, root / "log")
            wait_for_steps(process, metrics, begun)
            first = time.time()
            process.join()
            if process.exitcode:
                raise UserError(f"the undisturbed run failed: {(root / 'log').read_bytes().decode(errors='replace')}")
        last = metrics.stat().st_mtime
        expected = outcome(config, root / "undisturbed")
        print(f"undisturbed: {values.steps} steps from {first - begun:.1f} to {last - begun:.1f} s after the start")
        moments = random.Random(values.seed)
        # Half of them from the first step on: where starting takes longest, most others fall into it.
        draws = (Wait(bool(moments.getrandbits(1)), moments.random()) for _ in itertools.count())
        waits = (
            dataclasses.replace(wait, seconds=wait.seconds * (last - (first if wait.after_first_step else begun)))
            for wait in draws
        )
        total, runs = Killed(), 0
        while total.kills < values.kills and not total.faults:
            runs += 1
            left = itertools.islice(waits, values.kills - total.kills)
            result = kill_until_complete(config, root / f"run_{runs}", root / "log", left)
            if not result.faults and not same(outcome(config, root / f"run_{runs}"), expected):
                result.faults.append("ended with other numbers than the undisturbed run")
            total.kills += result.kills
            total.most_lost = max(total.most_lost, result.most_lost)
            total.faults += [f"run_{runs}: {fault}" for fault in result.faults]
    print(
        f"{total.kills} kills in {runs} runs: {len(total.faults)} faults; at most {total.most_lost} steps lost at "
        f"once, with a checkpoint every {_EVERY}"
    )
    for fault in total.faults:
        print(f"fault: {fault}")
    return 1 if total.faults else 0


if __name__ == "__main__":
    define_flags()
    cli.run(main)
