"""Saves a run's parameters, the rest of its training state and its position in the data as one, and restores them.

workdir/checkpoints/STEP/ holds four Orbax items: params; training (moments and counters); data (JSON, the position in
the data); metrics (JSON, the held-out loss if it was measured), and SHA256SUMS, the digests of their files. It gets
this name when all files are written and were read back. Only then are older checkpoints removed.
"""

import contextlib
import json
import math
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from cubit_jax.runtime import digests, distributed
from cubit_jax.runtime.errors import UserError
from cubit_jax.training import checkpoint_steps as steps

_SHOWN = 6  # differences listed before "and n more"


class SaveError(UserError):
    """A checkpoint could not be written. Threads of the failed save may still wait: end the process at once."""


class Checkpoints:
    """Saves a run's state in the background, and restores the newest complete checkpoint.

    Args:
      workdir: the run's folder.
      keep: how many of the last checkpoints to keep, at least 1.
      keep_best: how many of those with the lowest held-out loss to keep besides.

    Attributes:
      latest_step: the step of the newest complete checkpoint, which is the number of batches it has seen; None before
        the first.

    Raises:
      UserError: the folder cannot be made or read, or none of the checkpoints in it is complete.
    """

    def __init__(self, workdir: str | pathlib.Path, keep: int = 2, keep_best: int = 0):
        self._folder = steps.checkpoint_folder(workdir)
        self._keep, self._keep_best = keep, keep_best
        self._cleanup = contextlib.ExitStack()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._losses, incomplete = _find(self._folder)
            if distributed.process_index() == 0:
                steps.remove_unfinished(self._folder)
        except OSError as error:
            raise UserError(f"cannot use {self._folder}: {error.strerror or error}") from error
        self.latest_step = steps.newest_step(self._folder, self._losses, incomplete)
        self._store = self._cleanup.enter_context(steps.plain_path(self._folder))
        self._saving: tuple[int, Any, float | None] | None = None  # step, shapes of the state, held-out loss
        self._checkpointer = ocp.AsyncCheckpointer(
            _handler(), async_options=ocp.options.AsyncOptions(post_finalization_callback=self._verify)
        )
        self._broken = False

    @property
    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, oldest first."""
        return sorted(self._losses)

    def save(self, step: int, state: Any, data_state: bytes, metrics: dict[str, float] | None = None) -> None:
        """Starts to save; returns when the arrays are copied, before they are on disk. A step is saved once.

        Args:
          step: number of batches consumed.
          state: the training state (see `training.step.init_state`).
          data_state: JSON bytes, the position in the data after exactly `step` batches.
          metrics: of an evaluation at this step; its "eval/loss" ranks the checkpoint.

        Raises:
          SaveError: the folder cannot be written, or the save before this one failed.
        """
        if step == self.latest_step or (self._saving and step == self._saving[0]):
            return
        try:
            self._wait()
            # Orbax notices a folder that is gone or read-only in a thread, and other threads then wait for that one.
            self._folder.mkdir(exist_ok=True)
            probe = self._folder / f"writable_{jax.process_index()}"
            probe.write_bytes(b"")
            probe.unlink()
            if distributed.process_index() == 0:
                steps.set_aside(self._folder, step)
            params, training = _split(state)
            metrics = metrics or {}
            self._saving = (step, _abstract(state), metrics.get("eval/loss"))
            self._checkpointer.save(
                self._store / str(step),
                ocp.args.Composite(
                    params=ocp.args.StandardSave(params),
                    training=ocp.args.StandardSave(training),
                    data=ocp.args.JsonSave(json.loads(data_state)),
                    metrics=ocp.args.JsonSave(metrics),
                ),
            )
        except Exception as error:
            raise self._failed(error) from error

    def check(self) -> None:
        """Raises SaveError if a save that has ended in the background failed; waits for nothing."""
        if self._saving is None:
            return
        try:
            self._checkpointer.check_for_errors()
            if (self._folder / str(self._saving[0])).exists():
                self._wait()
        except Exception as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Returns when the last save is whole on disk; SaveError if it failed."""
        try:
            self._wait()
        except Exception as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Waits for the last save and ends the background threads; after a SaveError it does nothing."""
        if not self._broken:
            self.wait()
            self._checkpointer.close()
            self._cleanup.close()

    def is_among_best(self, loss: float) -> bool:
        """Whether a checkpoint with this held-out loss would be kept for it."""
        if not math.isfinite(loss):
            return False
        better = [step for step in steps.rank(self._losses) if self._losses[step] < loss]
        return len(better) < self._keep_best

    def restore(self, state: Any) -> tuple[Any, bytes]:
        """The newest complete checkpoint, as arrays placed like those of `state`.

        Args:
          state: the training state of the same model, arrays or shapes with shardings.

        Returns:
          (state, data_state).

        Raises:
          UserError: the checkpoint is of another model (the differences are listed), or damaged.
        """
        params, training = _split(state)
        restored = _restore(
            self._folder,
            self._store,
            self.latest_step,
            params=ocp.args.StandardRestore(_abstract(params)),
            training=ocp.args.StandardRestore(_abstract(training)),
            data=ocp.args.JsonRestore(),
        )
        return {"params": restored.params, **restored.training}, json.dumps(restored.data).encode()

    def _wait(self) -> None:
        """Waits for the save, then removes what need not be kept any more."""
        self._checkpointer.wait_until_finished()
        if self._saving is None:
            return
        step, _, loss = self._saving
        if distributed.process_index() == 0 and not (self._folder / str(step) / digests.FILE_NAME).is_file():
            raise OSError(f"step {step} is not there after its save")
        self._saving = None
        self._losses[step] = loss
        self.latest_step = step
        for old in steps.superfluous(self._losses, self._keep, self._keep_best):
            if distributed.process_index() == 0:
                steps.remove_step(self._folder, old)
            del self._losses[old]

    def _verify(self) -> None:
        """Reads back what is saved, before it gets its final name. Called by Orbax on process 0, in a thread."""
        step, state, _ = self._saving
        (unfinished,) = self._store.glob(f"{step}.orbax-checkpoint-tmp*")
        params, training = _split(state)
        for name, expected in (("params", params), ("training", training)):
            if found := differences(_metadata(unfinished, name), expected):
                raise OSError(f"{name} was not saved whole: {found[0]}")
        digests.write_digests(unfinished, steps.ITEMS)

    def _failed(self, error: Exception) -> SaveError:
        self._broken = True
        good = f"the last good checkpoint is {self.latest_step}"
        if self.latest_step is None or not (self._folder / str(self.latest_step)).is_dir():
            good = "there is no earlier checkpoint"
        return SaveError(f"cannot write a checkpoint to {self._folder}: {_reason(error)}; {good}")


def load_params(
    workdir: str | pathlib.Path, model: Any, shardings: Any = None, step: int | str = "latest"
) -> tuple[Any, int]:
    """The parameters of a checkpoint of a run, for evaluation, generation or the start of another run.

    Args:
      workdir: the run's folder.
      model: the LanguageModel they are for.
      shardings: tree of NamedSharding like the parameters; None places them on the first device.
      step: a step's number, "latest", or "best": the one with the lowest held-out loss.

    Returns:
      (params, step).

    Raises:
      UserError: there is no such checkpoint, it is of another model (the differences are listed), or damaged.
    """
    if distributed.process_index() == 0:
        step = steps.choose_step(workdir, step)
    step = int(distributed.from_first(str(step), f"step of {workdir}"))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    if shardings is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: device, shapes)
    targets = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )
    folder = steps.checkpoint_folder(workdir)
    with steps.plain_path(folder) as store:
        return _restore(folder, store, step, params=ocp.args.StandardRestore(targets)).params, step


def differences(saved: Any, expected: Any) -> list[str]:
    """What differs between two trees of arrays or shapes, one sentence per leaf; empty when they fit.

    Args:
      saved, expected: trees whose leaves have shape and dtype.
    """
    saved, expected = _leaves(saved), _leaves(expected)
    result = [f"{path} is missing in the checkpoint" for path in expected if path not in saved]
    result += [f"{path} is in the checkpoint only" for path in saved if path not in expected]
    for path, leaf in expected.items():
        if path in saved and (saved[path].shape, saved[path].dtype) != (leaf.shape, leaf.dtype):
            result.append(
                f"{path} is {saved[path].dtype}{list(saved[path].shape)} in the checkpoint and "
                f"{leaf.dtype}{list(leaf.shape)} in the model"
            )
    return result


def _restore(folder: pathlib.Path, store: pathlib.Path, step: int, **items: Any) -> Any:
    """The items of a checkpoint, after a look at their digests and shapes; `store` is `folder` as Orbax may call it."""
    path = store / str(step)
    try:
        _check_digests(path, items)
        for name, arguments in items.items():
            if isinstance(arguments, ocp.args.StandardRestore):
                _check_same(folder / str(step), _metadata(path, name), arguments.item)
        return ocp.Checkpointer(_handler()).restore(path, ocp.args.Composite(**items))
    except UserError:
        raise
    except Exception as error:  # a damaged file shows as anything from JSONDecodeError to TensorStore's own errors
        raise _damaged(folder, step, error) from error


def _check_digests(path: pathlib.Path, items: Any) -> None:
    """Raises OSError if a file of `items` is not as it was saved. Each process reads its share of the files."""
    expected = digests.read_digests(path)
    if expected is None:  # saved by an older version
        return
    names = sorted(name for name in expected if name.partition("/")[0] in items)
    mine = names[jax.process_index() :: jax.process_count()]
    if changed := digests.changed_files(path, {name: expected[name] for name in mine}):
        more = f" and {len(changed) - 1} more files were" if len(changed) > 1 else " was"
        raise OSError(f"{changed[0]}{more} changed after it was saved (by {digests.FILE_NAME})")


def _check_same(path: pathlib.Path, saved: Any, expected: Any) -> None:
    if found := differences(saved, expected):
        more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise UserError(f"checkpoint {path} is of another model: {', '.join(found[:_SHOWN])}{more}")


def _metadata(path: pathlib.Path, item: str) -> Any:
    """Shapes and dtypes of a saved item, from the headers of its arrays."""
    if (found := ocp.Checkpointer(_handler()).metadata(path).item_metadata[item]) is None:
        raise OSError(f"{item}/_METADATA is missing")
    return found


def _damaged(folder: pathlib.Path, step: int, error: Exception) -> UserError:
    others = [other for other in steps.find_steps(folder)[0] if other != step]
    if others:
        offered = max([other for other in others if other < step], default=max(others))
        advice = (
            f"step {offered} is complete: --step={offered} evaluates or generates with it, and after `mv` of "
            f"{folder / str(step)} to another place train goes on from it"
        )
    else:
        advice = "there is no other checkpoint: put a copy of that folder back, or train in another --workdir"
    return UserError(f"cannot read checkpoint {folder / str(step)}: {_reason(error)}; {advice}")


def _find(folder: pathlib.Path) -> tuple[dict[int, float | None], dict[int, str]]:
    """`steps.find_steps` as process 0 sees the folder: all processes must choose the same step."""
    found = ""
    if distributed.process_index() == 0:
        found = json.dumps([list(part.items()) for part in steps.find_steps(folder)])
    losses, incomplete = json.loads(distributed.from_first(found, f"checkpoints in {folder}"))
    return dict(losses), dict(incomplete)


def _leaves(tree: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _split(state: Any) -> tuple[Any, Any]:
    return state["params"], {name: value for name, value in state.items() if name != "params"}


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def _handler() -> ocp.CompositeCheckpointHandler:
    return ocp.CompositeCheckpointHandler(
        params=ocp.StandardCheckpointHandler(),
        training=ocp.StandardCheckpointHandler(),
        data=ocp.JsonCheckpointHandler(),
        metrics=ocp.JsonCheckpointHandler(),
    )


def _reason(error: BaseException) -> str:
    """The first cause of an error, in one line, without TensorStore's dump of its settings."""
    while error.__cause__:
        error = error.__cause__
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if code := re.search(r"os_error_code='(\d+)'", text):  # TensorStore puts the system's message anywhere
        return os.strerror(int(code[1]))
    text = text.partition(" [tensorstore_spec")[0]
    return f"{text[:300]}..." if len(text) > 300 else text
