"""Where a run's numbers go: metrics.jsonl and TensorBoard.

Keys: step, time (seconds since 1970), tokens_seen, train/loss, eval/loss, eval/bits_per_byte, learning_rate,
gradient_norm, parameter_norm, tokens_per_second, model_flop_utilization (devices of known peak only), skipped_updates,
diagnostics/... (a number per layer). Step 0 has the evaluation of the untrained model.
"""

import errno
import json
import math
import os
import pathlib
import time

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from cubit_jax.runtime.errors import named_errors
from cubit_jax.runtime.files import write_atomically


class JsonLines:
    """Appends one JSON object a step to a file; numbers that are not finite become null.

    A run that goes on from step n first drops the lines beyond n, and a line that a killed process left unfinished, so
    that each step stands in the file once.
    """

    def __init__(self, path, resume_step):
        self._path = pathlib.Path(path)
        with self._named_errors():
            if self._path.exists():
                self._drop_after(resume_step)
            # Unbuffered: nothing is left over that closing the file would try to write once more on a full disk.
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (open for as long as the run)

    def write(self, step, values):
        numbers = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record = {"step": step, "time": round(time.time(), 3)} | numbers
        line = (json.dumps(record) + "\n").encode()
        with self._named_errors():
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self):
        self._file.close()

    def _drop_after(self, step):
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith(b"\n") and _step_of(line) <= step]
        if kept != lines:
            write_atomically(self._path, b"".join(kept))

    def _named_errors(self):
        return named_errors(f"cannot write {self._path}")


def _step_of(line):
    """The step of a line of metrics.jsonl; infinity where it is not one, as a power failure can leave it."""
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return math.inf


class TensorBoard:
    """Scalars for TensorBoard; what an earlier process wrote beyond the step it goes on from is hidden.

    tensorboardX's synchronous writer: the thread of its SummaryWriter dies on a full disk, and closing waits for it.
    """

    def __init__(self, folder, resume_step):
        self._folder = folder
        with self._named_errors():
            folder.mkdir(parents=True, exist_ok=True)
            self._events = EventsWriter(str(folder / "events"))
            self._events.write_event(
                Event(wall_time=time.time(), step=resume_step + 1, session_log=SessionLog(status=SessionLog.START))
            )

    def write(self, step, values):
        with self._named_errors():
            for name, value in values.items():
                if not math.isfinite(value):  # tensorboardX would warn of each
                    continue
                self._events.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
            self._events.flush()

    def close(self):
        with self._named_errors():
            self._events.close()

    def _named_errors(self):
        return named_errors(f"cannot write {self._folder}")


class Writers:
    """Several writers as one; without any (processes other than the first) it does nothing."""

    def __init__(self, *writers):
        self._writers = writers

    def write(self, step, values):
        """Writes {name: number} of one step, once a step and in rising order; UserError if a file cannot be written."""
        for writer in self._writers:
            writer.write(step, values)

    def close(self):
        for writer in self._writers:
            writer.close()


def open_writers(workdir: str, resume_step: int, process_index: int = 0) -> Writers:
    """The writers of a run that goes on after step `resume_step`, -1 at its start. Only process 0 writes."""
    if process_index:
        return Writers()
    folder = pathlib.Path(workdir)
    return Writers(JsonLines(folder / "metrics.jsonl", resume_step), TensorBoard(folder / "tensorboard", resume_step))
