"""One trainer in a folder at a time."""

import contextlib
import datetime
import fcntl
import os
import pathlib
import socket
import time
from collections.abc import Iterator

from absl import logging

from cubit_jax.runtime import distributed
from cubit_jax.runtime.errors import UserError

_SEEN_WITHIN = 60  # seconds until a file that process 0 has written must be seen by all; network file systems cache


@contextlib.contextmanager
def lock(workdir: str | pathlib.Path) -> Iterator[None]:
    """Makes the folder and keeps other trainers out of it until the block ends or the process dies.

    Process 0 of a run holds the lock; the others wait until they see its note in workdir/lock, which shows that they
    share the folder.

    Raises:
      UserError: another trainer is at work there; the processes of this run do not share the folder; it cannot be made.
    """
    path, note = pathlib.Path(workdir, "lock"), f"process {os.getpid()} on {socket.gethostname()}, {now()}"
    if distributed.process_index():
        _await(path, distributed.from_first(note, "lock"))
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (open for as long as the lock is held)
    except OSError as error:
        raise UserError(
            f"cannot use --workdir={workdir}: {error.strerror}; give a folder that can be written"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"another trainer is at work in {workdir} ({file.read().strip() or 'it has just begun'}); "
                "stop it or use another --workdir"
            ) from None
        except OSError as error:
            logging.warning("two trainers at once would go unnoticed: %s cannot be locked (%s)", path, error.strerror)
        try:
            file.truncate(0)
            file.write(note)
            file.flush()
        except OSError as error:
            file.truncate(0)  # what could not be written is not tried again when the file is closed
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        distributed.from_first(note, "lock")
        try:
            yield
        finally:
            file.truncate(0)


def _await(path, content):
    deadline = time.monotonic() + _SEEN_WITHIN
    while not path.exists() or path.read_bytes() != content.encode():
        if time.monotonic() > deadline:
            raise UserError(
                f"process {distributed.process_index()} does not see in {path.parent} what process 0 has "
                "written there: the workdir must be on a file system that all hosts share"
            )
        time.sleep(0.1)


def now() -> str:
    """The local time with its time zone, to the second."""
    return datetime.datetime.now().astimezone().isoformat(" ", "seconds")
