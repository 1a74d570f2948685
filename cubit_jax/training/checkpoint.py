"""Checkpoints of a run: parameters, the rest of the training state and the position in the data, saved as one.

workdir/checkpoints/STEP/ holds three orbax items: params; training (moments and counters); data (JSON). A folder gets
its final name only when everything in it is written, so that a process killed at any moment leaves the last whole one.
"""

import json
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from cubit_jax.runtime.errors import UserError

_SHOWN = 6  # differences listed before "and n more"


class SaveError(UserError):
    """A checkpoint could not be written. Threads of the failed save may still wait: end the process at once."""


class Checkpoints:
    """Saves a run's state in the background and finds it again.

    Args:
      workdir: the run's folder.
      keep: how many of the last checkpoints to keep.

    Raises:
      UserError: the folder cannot be made or read.
    """

    def __init__(self, workdir, keep=2):
        self._folder = _folder(workdir)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._manager = _manager(self._folder, options)
        except OSError as error:
            raise UserError(f"cannot use {self._folder}: {error.strerror or error}") from error
        self._unchecked = False  # a save runs, or ended with an outcome that nobody has looked at
        self._broken = False

    @property
    def latest_step(self):
        """The number of the last checkpoint, which is the number of batches it has seen; None before the first."""
        return self._manager.latest_step()

    def save(self, step, state, data_state):
        """Starts to save; returns when the arrays are copied, before they are on disk. A step is saved once.

        Args:
          step: number of batches consumed.
          state: the training state (see train_step).
          data_state: JSON bytes, the position in the data after exactly `step` batches.

        Raises:
          SaveError: the folder cannot be written, or the save before this one failed.
        """
        if self.latest_step == step:
            return
        try:
            self._wait()
            # Orbax notices a folder that is gone or read-only in a thread, and other threads then wait for that one.
            self._folder.mkdir(exist_ok=True)
            probe = self._folder / f"writable_{jax.process_index()}"
            probe.write_text("")
            probe.unlink()
            params, training = _split(state)
            self._unchecked = True
            self._manager.save(
                step,
                force=True,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(params),
                    training=ocp.args.StandardSave(training),
                    data=ocp.args.JsonSave(json.loads(data_state)),
                ),
            )
        except Exception as error:
            raise self._failed(error) from error

    def check(self):
        """Raises SaveError if a save that has ended in the background failed; waits for nothing."""
        if self._unchecked and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self):
        """Returns when the last save is whole on disk; SaveError if it failed."""
        try:
            self._wait()
        except Exception as error:
            raise self._failed(error) from error

    def close(self):
        """Waits for the last save and ends the background threads; after a SaveError it does nothing."""
        if not self._broken:
            self.wait()
            self._manager.close()

    def restore(self, state):
        """The last checkpoint, as arrays placed like those of `state`.

        Args:
          state: the training state of the same model, arrays or shapes with shardings.

        Returns:
          (state, data_state bytes).

        Raises:
          UserError: the checkpoint is of another model (the differences are listed), or cannot be read.
        """
        step = self.latest_step
        params, training = _split(state)
        where = f"checkpoint {self._folder / str(step)}"
        _check_same(where, _metadata(self._manager, step, where, "params"), params)
        _check_same(where, _metadata(self._manager, step, where, "training"), training)
        restored = _restore(
            self._manager,
            step,
            where,
            params=ocp.args.StandardRestore(_abstract(params)),
            training=ocp.args.StandardRestore(_abstract(training)),
            data=ocp.args.JsonRestore(),
        )
        return {"params": restored.params, **restored.training}, json.dumps(restored.data).encode()

    def _wait(self):
        self._manager.wait_until_finished()
        self._unchecked = False

    def _failed(self, error):
        self._broken = True
        last = [step for step in self._manager.all_steps() if (self._folder / str(step)).is_dir()]
        kept = f"the last good checkpoint is {max(last)}" if last else "no checkpoint has been written yet"
        return SaveError(f"cannot write a checkpoint to {self._folder}: {_reason(error)}; {kept}")


def load_params(workdir, model, shardings=None):
    """The parameters of the last checkpoint of a run, for evaluation, generation or the start of another run.

    Args:
      workdir: the run's folder.
      model: the LanguageModel they are for.
      shardings: tree of NamedSharding like the parameters; None places them on the first device.

    Returns:
      (params, step).

    Raises:
      UserError: there is no checkpoint, it is of another model (the differences are listed), or it cannot be read.
    """
    folder = _folder(workdir)
    if not folder.is_dir():
        raise UserError(f"no checkpoint in {workdir}: {folder} is missing")
    manager = _manager(folder, ocp.CheckpointManagerOptions(read_only=True))
    step = manager.latest_step()
    if step is None:
        raise UserError(f"no checkpoint in {workdir}: {folder} is empty")
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    where = f"checkpoint {folder / str(step)}"
    _check_same(where, _metadata(manager, step, where, "params"), shapes)
    if shardings is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: device, shapes)
    targets = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )
    restored = _restore(manager, step, where, params=ocp.args.StandardRestore(targets))
    manager.close()
    return restored.params, step


def differences(saved, expected):
    """What differs between two trees of arrays or shapes, one sentence a leaf; empty when they fit.

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


def _check_same(where, saved, expected):
    if found := differences(saved, expected):
        more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise UserError(f"{where} is of another model: {', '.join(found[:_SHOWN])}{more}")


def _restore(manager, step, where, **items):
    try:
        return manager.restore(step, args=ocp.args.Composite(**items))
    except Exception as error:  # a damaged file shows as anything from JSONDecodeError to TensorStore's own errors
        raise _damaged(where, error) from error


def _metadata(manager, step, where, item):
    """Shapes and dtypes of a saved item."""
    try:
        if (found := manager.item_metadata(step)[item]) is not None:
            return found
    except Exception as error:
        raise _damaged(where, error) from error
    raise _damaged(where, f"{item}/_METADATA is missing")


def _damaged(where, error):
    return UserError(f"cannot read {where}: {_reason(error)}; remove that folder to go on from the one before it")


def _leaves(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _split(state):
    return state["params"], {name: value for name, value in state.items() if name != "params"}


def _abstract(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def _folder(workdir):
    return pathlib.Path(workdir).absolute() / "checkpoints"


def _manager(folder, options):
    handlers = {
        "params": ocp.StandardCheckpointHandler(),
        "training": ocp.StandardCheckpointHandler(),
        "data": ocp.JsonCheckpointHandler(),
    }
    return ocp.CheckpointManager(folder, options=options, item_handlers=handlers)


def _reason(error):
    """The first line of an error; its end where the operating system's message stands at the end."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if code := re.search(r"os_error_code='(\d+)'", text):  # TensorStore puts the system's message anywhere
        return os.strerror(int(code[1]))
    return f"...{text[-160:]}" if len(text) > 200 else text
