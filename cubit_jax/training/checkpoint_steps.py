"""The steps in a run's checkpoint folder: which are complete, which one to load, and which to remove.

checkpoints/STEP/ is a checkpoint. A folder with another name (a save that was cut off, a removal that was cut off) and
one that lacks a file is never taken for one.
"""

import contextlib
import json
import math
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator

from absl import logging

from cubit_jax.runtime import digests, distributed
from cubit_jax.runtime.errors import UserError

ITEMS = ("params", "training", "data", "metrics")
_NEEDED = (
    "params/_METADATA",
    "params/manifest.ocdbt",
    "training/_METADATA",
    "training/manifest.ocdbt",
    "data/metadata",
)
_REMOVING = ".removing"  # a step is renamed before its files are removed, so that no part of it looks like a step
# Orbax looks for the parts of a save by a glob of the folder's name, which fails for [, and TensorStore takes a
# backslash for a slash and no bytes that are not UTF-8. Non-ASCII letters depend on the locale.
_PLAIN = re.compile(r"[\w ./@%+=:,~^#-]{1,3500}", re.ASCII)


def checkpoint_folder(workdir: str | pathlib.Path) -> pathlib.Path:
    """workdir/checkpoints, as an absolute path."""
    return pathlib.Path(workdir).absolute() / "checkpoints"


@contextlib.contextmanager
def plain_path(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path to `folder` that Orbax and TensorStore can take: itself, or a symbolic link with a plain name."""
    if _PLAIN.fullmatch(str(folder)):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="cubit_jax_") as temporary:
        link = pathlib.Path(temporary, "checkpoints")
        if not _PLAIN.fullmatch(str(link)):
            raise UserError(f"cannot keep checkpoints in {folder}: set TMPDIR to a folder with a plain name")
        link.symlink_to(folder, target_is_directory=True)
        yield link


def find_steps(folder: pathlib.Path) -> tuple[dict[int, float | None], dict[int, str]]:
    """The checkpoints in `folder`, oldest first, as process 0 sees them.

    Returns:
      ({step: its held-out loss, None where it was not measured} of the complete ones, {step: what is missing} of the
      others).
    """
    complete, incomplete = {}, {}
    for path in sorted(folder.iterdir(), key=lambda path: path.name.zfill(20)):
        if path.name.isdecimal() and path.name.isascii():
            if missing := _missing(path):
                incomplete[int(path.name)] = missing
            else:
                complete[int(path.name)] = _read_loss(path)
    return complete, incomplete


def choose_step(workdir: str | pathlib.Path, wanted: int | str = "latest") -> int:
    """The step to load: the newest complete one, the one with the lowest held-out loss, or the one with that number.

    Args:
      workdir: the run's folder.
      wanted: "latest", "best" or a number.

    Raises:
      UserError: there is no such step; the steps there are stand in the message.
    """
    folder = checkpoint_folder(workdir)
    if not folder.is_dir():
        raise UserError(f"no checkpoint in {workdir}: {folder} is missing")
    losses, incomplete = find_steps(folder)
    if not losses:
        raise UserError(f"no checkpoint in {workdir}: {_none_complete(folder, incomplete)}")
    there = ", ".join(
        f"{step}{'' if loss is None else f' (held-out loss {loss:.4f})'}" for step, loss in losses.items()
    )
    if wanted == "latest":
        tell_passed_over(folder, max(losses), incomplete)
        return max(losses)
    if wanted == "best":
        if not (ranked := rank(losses)):
            raise UserError(
                f"no checkpoint in {workdir} has a held-out loss, so none is the best; the steps are {there}"
            )
        return ranked[0]
    if not str(wanted).isdecimal():
        raise UserError(f"step {wanted!r} must be a number, best or latest; the steps are {there}")
    if int(wanted) not in losses:
        reason = f": {incomplete[int(wanted)]}" if int(wanted) in incomplete else ""
        raise UserError(f"{workdir} has no complete checkpoint of step {wanted}{reason}; the steps are {there}")
    return int(wanted)


def newest_step(folder: pathlib.Path, losses: dict[int, float | None], incomplete: dict[int, str]) -> int | None:
    """The newest complete step, None in a folder without any; UserError if there are incomplete ones only."""
    if not losses and incomplete:
        raise UserError(
            f"{_none_complete(folder, incomplete)}; put the missing files back, or train in another --workdir"
        )
    if losses:
        tell_passed_over(folder, max(losses), incomplete)
    return max(losses, default=None)


def tell_passed_over(folder: pathlib.Path, taken: int, incomplete: dict[int, str]) -> None:
    """Logs one line if there are newer, incomplete steps than the one taken."""
    newer = [f"{step} ({reason})" for step, reason in incomplete.items() if step > taken]
    if newer and distributed.process_index() == 0:
        logging.warning("passed over in %s, as incomplete: %s; taken: step %d", folder, ", ".join(newer), taken)


def rank(losses: dict[int, float | None]) -> list[int]:
    """The steps with a finite held-out loss, lowest loss first; of equals the later step."""
    known = [step for step, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return sorted(known, key=lambda step: (losses[step], -step))


def superfluous(losses: dict[int, float | None], keep: int, keep_best: int) -> list[int]:
    """The steps that are neither among the last `keep` nor among the `keep_best` of lowest held-out loss."""
    kept = {*sorted(losses)[-keep:], *rank(losses)[:keep_best]}
    return [step for step in losses if step not in kept]


def remove_step(folder: pathlib.Path, step: int) -> None:
    """Removes a checkpoint. A process killed in the middle leaves a folder that is not taken for a step."""
    path = folder / f"{step}{_REMOVING}"
    shutil.rmtree(path, ignore_errors=True)
    (folder / str(step)).rename(path)
    shutil.rmtree(path)


def set_aside(folder: pathlib.Path, step: int) -> None:
    """Gives what lies at the place of a checkpoint, and is none, another name."""
    path = folder / str(step)
    if path.exists() or path.is_symlink():
        path.rename(pathlib.Path(tempfile.mkdtemp(prefix=f"{step}.incomplete.", dir=folder), str(step)))


def remove_unfinished(folder: pathlib.Path) -> None:
    """Removes what a killed process left: saves and removals that were cut off."""
    for path in folder.iterdir():
        if re.fullmatch(rf"\d+(\.orbax-checkpoint-tmp.*|{re.escape(_REMOVING)})", path.name):
            shutil.rmtree(path, ignore_errors=True)


def _missing(path: pathlib.Path) -> str | None:
    """What a checkpoint lacks, None if nothing. Of those with digests every file is known."""
    if not path.is_dir():
        return "is a file"
    try:
        names = digests.read_digests(path)
    except (OSError, ValueError) as error:
        return f"{digests.FILE_NAME}: {error}"
    # Saved by an older version, a checkpoint has no digests.
    missing = [name for name in names or _NEEDED if not (path / name).is_file()]
    more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
    return f"{missing[0]}{more} missing" if missing else None


def _read_loss(path: pathlib.Path) -> float | None:
    try:
        loss = json.loads((path / "metrics/metadata").read_bytes()).get("eval/loss")
    except FileNotFoundError:  # saved by an older version
        return None
    except (OSError, ValueError, AttributeError):  # damaged: found when it is restored
        return None
    return float(loss) if isinstance(loss, int | float) else None


def _none_complete(folder: pathlib.Path, incomplete: dict[int, str]) -> str:
    if not incomplete:
        return f"{folder} is empty"
    found = ", ".join(f"{step} ({reason})" for step, reason in incomplete.items())
    return f"none in {folder} is complete: {found}"
