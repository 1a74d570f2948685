"""Wrong and unusual inputs of the programs, for experiments.mistakes: runs, checkpoints, disks, signals, machines."""

import os
import pathlib
import shutil
import signal
from collections.abc import Callable

from experiments.support.mistake_inputs import RUN, Case, chain, copy_run, write


def steps(run: pathlib.Path) -> list[pathlib.Path]:
    """The folders of a run's checkpoints, oldest first."""
    return sorted((p for p in (run / "checkpoints").iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))


def parameter_file(run: pathlib.Path) -> pathlib.Path:
    """The largest file of the newest checkpoint's parameters."""
    return max((p for p in (steps(run)[-1] / "params").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def _flip(folder: pathlib.Path, shared: pathlib.Path) -> None:
    path = parameter_file(folder / "run")
    content = bytearray(path.read_bytes())
    for place in range(len(content) // 2, len(content) // 2 + 8):
        content[place] ^= 0xFF
    path.write_bytes(content)


def _cut(folder: pathlib.Path, shared: pathlib.Path) -> None:
    path = parameter_file(folder / "run")
    os.truncate(path, path.stat().st_size // 2)


def _damaged(
    what: str, damage: Callable, program: str = "evaluate", arguments: tuple[str, ...] = (), **options
) -> Case:
    micro = program == "train"
    return Case(
        "Runs and checkpoints",
        program,
        arguments if micro else (RUN, *arguments),
        what,
        micro=micro,
        files=chain(copy_run, damage),
        **options,
    )


def _nothing(folder: pathlib.Path, shared: pathlib.Path) -> None:
    pass


def _replace_metrics(folder: pathlib.Path, shared: pathlib.Path) -> None:
    (folder / "run" / "metrics.jsonl").unlink()
    (folder / "run" / "metrics.jsonl").mkdir()


def _parameters_of_nan(folder: pathlib.Path, shared: pathlib.Path) -> None:
    """A run of the same config whose only checkpoint has parameters that are not finite."""
    import jax
    import jax.numpy as jnp

    from cubit_jax.model import LanguageModel, ModelConfig
    from cubit_jax.training import workdir
    from cubit_jax.training.checkpoint import Checkpoints
    from cubit_jax.training.step import init_state

    for path in steps(folder / "run"):
        shutil.rmtree(path)
    config = workdir.read_config(folder / "run")
    state = jax.jit(lambda: init_state(LanguageModel(ModelConfig.from_config(config)), config))()
    state["params"] = jax.tree.map(lambda x: x * jnp.nan, state["params"])
    checkpoints = Checkpoints(folder / "run")
    checkpoints.save(2, state, b"{}")
    checkpoints.close()


def _remove_all_checkpoints(folder: pathlib.Path, shared: pathlib.Path) -> None:
    for path in steps(folder / "run"):
        shutil.rmtree(path)


def _empty_newest(folder: pathlib.Path, shared: pathlib.Path) -> None:
    (folder / "run" / "checkpoints" / "35").mkdir()


def _other_text(folder: pathlib.Path, shared: pathlib.Path) -> None:
    (folder / "other").mkdir()
    for number in range(8):
        (folder / "other" / f"{number}.txt").write_text(f"quite another text, of number {number}! " * 40)


_PASSED = "passed over.* 35 "
_MORE = ("--config.num_steps=4",)
RUNS = [
    _damaged("another width than the run's", _nothing, "train", ("--config.model.model_dim=64",)),
    _damaged("another mixer than the run's", _nothing, "train", ("--config.model.mixers=cubit",)),
    _damaged("another batch than the run's", _nothing, "train", ("--config.batch_size=4",)),
    _damaged("other data than the run's", _other_text, "train", ("--config.data.path={dir}/other/*.txt",)),
    _damaged("config.json was cut", write("run/config.json", '{"seed": 0,')),
    _damaged("config.json was cut", write("run/config.json", '{"seed": 0,'), "train", _MORE),
    _damaged("no config.json", lambda folder, shared: (folder / "run" / "config.json").unlink()),
    _damaged("no checkpoint", _remove_all_checkpoints),
    _damaged("an empty folder as the newest checkpoint", _empty_newest, code=0, says=_PASSED),
    _damaged(
        "an empty folder as the newest checkpoint", _empty_newest, "train", _MORE, code=0, says="passed over.* 35 "
    ),
    _damaged("bytes flipped in a parameter file", _flip),
    _damaged("bytes flipped in a parameter file", _flip, "train", _MORE),
    _damaged("a parameter file that was cut", _cut),
    _damaged("a parameter file that was cut", _cut, "generate", ("--prompt=a",)),
    _damaged("parameters that are not finite", _parameters_of_nan),
    _damaged("metrics.jsonl is a folder", _replace_metrics, "train", _MORE),
    Case("Runs and checkpoints", "evaluate", ("--workdir={dir}/file",), "a file", files=write("file", "text")),
    Case("Runs and checkpoints", "train", ("--workdir={dir}/file",), "a file", micro=True, files=write("file", "text")),
    Case("Runs and checkpoints", "train", ("--workdir={dir}/[lr=1e-3] run",), micro=True, code=0, says="^done"),
    Case(
        "Runs and checkpoints",
        "train",
        ("--config.init_from={shared}/run", "--config.data.path={dir}/other/*.txt"),
        "a start from another run's parameters on other text",
        micro=True,
        files=_other_text,
        code=0,
        says="^done",
    ),
    Case("Runs and checkpoints", "train", ("--config.init_from={shared}/texts",), "not a run", micro=True),
    Case(
        "Runs and checkpoints",
        "train",
        ("--config.init_from={shared}/run", "--config.model.model_dim=64"),
        "a start from a run of another width",
        micro=True,
    ),
]
_PREPARE = ("--input={shared}/texts/*.txt", "--output={dir}/out", "--train_tokenizer=300")
_LONG_RUN = ("--config.num_steps=100000", "--config.log_every=1")


def _closed(folder: pathlib.Path, shared: pathlib.Path) -> None:
    (folder / "closed").mkdir(mode=0o555)


MACHINES = [
    Case("Disk full", "train", what="no file above 4 kB can be written", micro=True, max_file_bytes=4096),
    Case("Disk full", "train", (), "no file above 40 kB: no checkpoint", micro=True, max_file_bytes=40_000),
    Case("Disk full", "prepare", _PREPARE, "no file above 1 kB can be written", max_file_bytes=1024),
    Case("Read-only", "train", ("--workdir=/proc/run",), micro=True),
    Case(
        "Read-only",
        "train",
        ("--workdir={dir}/closed/run",),
        "a folder without the right to write",
        micro=True,
        files=_closed,
        unprivileged=True,
    ),
    Case(
        "Read-only",
        "prepare",
        (_PREPARE[0], "--output={dir}/closed/out", _PREPARE[2]),
        "a folder without the right to write",
        files=_closed,
        unprivileged=True,
    ),
    Case("Read-only", "plan", ("--config=configs/cubit.py:tiny", "--topology=v5e:2x4", "--json=/proc/plan.json")),
    Case(
        "Signals",
        "train",
        _LONG_RUN,
        "SIGTERM after a step",
        micro=True,
        signal=signal.SIGTERM,
        code=0,
        says="^saved at step",
    ),
    Case(
        "Signals",
        "train",
        _LONG_RUN,
        "Ctrl-C after a step",
        micro=True,
        signal=signal.SIGINT,
        code=0,
        says="^saved at step",
    ),
    *[
        Case("Machine", "train", micro=True, environment=(("JAX_PLATFORMS", name),), own_process=True)
        for name in ("cuda", "tpu", "gpuu")
    ],
    Case(
        "Machine",
        "generate",
        ("--workdir={shared}/run", "--prompt=a"),
        environment=(("JAX_PLATFORMS", "cuda"),),
        own_process=True,
    ),
    *[
        Case("Machine", "train", micro=True, environment=values, own_process=True, code=0, says="^done")
        for values in ((("PYTHONIOENCODING", "ascii"),), (("LC_ALL", "C"), ("PYTHONUTF8", "0")))
    ],
    Case(
        "Machine",
        "generate",
        ("--workdir={shared}/run", "--prompt=\u00e9", "--max_new_tokens=5"),
        environment=(("PYTHONIOENCODING", "ascii"),),
        own_process=True,
        code=0,
    ),
]
