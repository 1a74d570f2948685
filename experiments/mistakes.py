"""What do the programs say to a wrong input? About a hundred of them, each a command; writes docs/mistakes.md.

    python -m experiments.mistakes                       # all of them, within ten minutes on two CPU cores
    python -m experiments.mistakes --only='tokenizer'    # those whose line of the page has this pattern; no page

An input is wrong if the program should end with exit code 1 and one line, "error: ...", that names the value, what was
expected and what to do. Others are only unusual: the program should do its work and end with exit code 0. This program
ends with exit code 1 if a case prints a traceback, ends with another exit code than the right one, prints no error line
or several, or does not end at all.

Programs run in forks of this process, which has imported what they need; where the environment matters, anew.
"""

import contextlib
import ctypes
import os
import pathlib
import re
import resource
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable

import jax
from absl import flags

from cubit_jax.runtime import cli
from cubit_jax.runtime.files import write_atomically
from experiments.support import mistake_inputs, mistake_runs
from experiments.support.mistake_inputs import Case

ROOT = pathlib.Path(__file__).parents[1]
CASES = (
    *mistake_inputs.FLAGS,
    *mistake_inputs.CONFIG,
    *mistake_inputs.DATA,
    *mistake_inputs.TOKENIZERS,
    *mistake_runs.RUNS,
    *mistake_runs.MACHINES,
)
_OWN_FLAGS = ("only", "output", "timeout", "keep")
# Linux' numbers, of linux/capability.h.
_VERSION, _DAC_OVERRIDE, _DAC_READ_SEARCH = 0x20080522, 1, 2


def define_flags() -> None:
    """In a function, so that several of these programs can be imported into one process."""
    flags.DEFINE_string("only", None, "Cases whose command or description has this pattern; writes no page.")
    flags.DEFINE_string("output", str(ROOT / "docs" / "mistakes.md"), "The page.")
    flags.DEFINE_integer("timeout", 120, "Seconds that a case may take.", lower_bound=1)
    flags.DEFINE_bool("keep", False, "Leave the temporary folder, for a look at what a case has printed.")


def run_here(case: Case, arguments: list[str]) -> int:
    """Runs a program in this process, a fork: its exit code."""
    if case.max_file_bytes:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write then fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (case.max_file_bytes, case.max_file_bytes))
    if case.unprivileged:
        give_up_roots_rights()
    flags.FLAGS.unparse_flags()
    for name in _OWN_FLAGS:
        delattr(flags.FLAGS, name)
    sys.argv = [case.program, *arguments]
    try:
        runpy.run_module(case.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def give_up_roots_rights() -> None:
    """From here on root, too, may write only where the permissions of a folder say so."""
    header = struct.pack("=Ii", _VERSION, 0)
    kept = 0xFFFFFFFF & ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH)
    libc = ctypes.CDLL(None, use_errno=True)
    held = ctypes.create_string_buffer(24)
    libc.capget(header, held)
    sets = [value & kept if place < 3 else value for place, value in enumerate(struct.unpack("=6I", held.raw))]
    if libc.capset(header, struct.pack("=6I", *sets)):
        raise OSError(ctypes.get_errno(), "capset")


def start(case: Case, arguments: list[str], log: pathlib.Path) -> int:
    """Starts a program that writes to `log`; its process id."""
    if case.own_process:
        with log.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, "-m", case.module, *arguments],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(case.environment),
            ).pid
    return fork(lambda: run_here(case, arguments), log)


def fork(function: Callable[[], int | None], log: pathlib.Path) -> int:
    """Calls `function` in a fork that prints to `log`, and ends with its result or 1; the id of that process."""
    process = os.fork()
    if process:
        return process
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for stream in (1, 2):
        os.dup2(handle, stream)
    code = 1
    try:
        code = function() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(process: int, case: Case, log: pathlib.Path, timeout: float) -> int | None:
    """The exit code of a process, which is sent the case's signal at its first step; None where it was killed."""
    to_send, deadline = case.signal, time.monotonic() + timeout
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if to_send and re.search(r"^step \d", log.read_text(errors="replace") if log.exists() else "", re.MULTILINE):
            os.kill(process, to_send)
            to_send = None
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def judge(case: Case, code: int | None, output: str) -> tuple[str, str | None]:
    """(the line to show, what is wrong with the outcome or None)."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    if code is None:
        return "", "it does not end"
    if "Traceback (most recent call last)" in output:
        return lines[-1], "a traceback"
    if code != case.code:
        return (errors or lines or [""])[-1], f"exit code {code} where {case.code} is right"
    if code and len(errors) != 1:
        return (errors or lines or [""])[-1], f"{len(errors)} error lines"
    shown = errors if code else [line for line in lines if re.search(case.says or "note|warning", line)]
    if case.says and not any(re.search(case.says, line) for line in shown):
        return (shown or [""])[-1], f"no line with {case.says!r}"
    return (shown or ["(it does its work)"])[0], None


def run(case: Case, folder: pathlib.Path, shared: pathlib.Path, timeout: float) -> tuple[int | None, str, str | None]:
    """(exit code, line, what is wrong or None) of a case, in its own new folder."""
    folder.mkdir()
    log = folder.with_suffix(".log")
    if case.files and os.waitpid(fork(lambda: (case.files(folder, shared), 0)[1], log), 0)[1]:
        return None, "", f"its files cannot be made, see {log}"
    arguments = [argument.format(dir=folder, shared=shared) for argument in case.command]
    code = wait(start(case, arguments, log), case, log, timeout)
    line, wrong = judge(case, code, log.read_text(errors="replace"))
    for path in (folder, shared):
        line = line.replace(str(path), "DIR")
    return code, line.replace(f"{ROOT}/", ""), wrong


def describe(case: Case) -> str:
    """The input as the page shows it."""
    arguments = [a for a in case.arguments if case.micro or a != mistake_inputs.RUN]
    names = [f"{name}={value}" for name, value in case.environment]
    command = " ".join([*names, case.program, *arguments]).replace("{dir}", "DIR").replace("{shared}", "DIR")
    return f"`{command}`" + (f": {case.what}" if case.what else "")


def page(results: list[tuple[Case, int, str]], seconds: float) -> str:
    """The page, in Markdown."""
    lines = [
        "# Mistakes",
        "",
        f"What {len(results)} wrong or unusual inputs give: the exit code, and the line that the program prints.",
        f"Made by `python -m experiments.mistakes` in {max(1, round(seconds / 60))} minutes.",
        "",
        "DIR is a temporary folder. Where `train` has no `--config`, it is a model of one layer on eight short texts.",
        "Exit code 0 is right where an input is unusual but not wrong; the line then says what was made of it.",
    ]
    for kind in dict.fromkeys(case.kind for case, *_ in results):
        lines += ["", f"## {kind}", "", "| input | exit code | line |", "| --- | --- | --- |"]
        for case, code, line in results:
            if case.kind == kind:
                text = line if len(line) <= 400 else f"{line[:400]}..."
                cells = [describe(case), str(code), re.sub(r"([<>*_|`])", r"\\\1", text)]
                lines.append("| " + " | ".join(cell.replace(" | ", " \\| ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    values = flags.FLAGS
    begin = time.monotonic()
    chosen = [case for case in CASES if not values.only or re.search(values.only, f"{case.kind} {describe(case)}")]
    warnings.filterwarnings("ignore", message=r"os\.fork\(\)")  # no backend of JAX is open in this process
    results, wrong = [], 0
    with contextlib.ExitStack() as stack:
        root = pathlib.Path(tempfile.mkdtemp(prefix="mistakes_"))
        if not values.keep:
            stack.callback(shutil.rmtree, root, ignore_errors=True)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(root / "compiled")
        jax.config.update("jax_compilation_cache_dir", str(root / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_disable_most_optimizations", True)
        shared = root / "shared"
        shared.mkdir()
        for number, case in enumerate(mistake_inputs.make_shared(shared)):
            code, line, problem = run(case, root / f"make{number}", shared, values.timeout)
            if problem:
                print(f"the inputs cannot be made: {describe(case)}: {problem}: {line}")
                return 1
        for number, case in enumerate(chosen):
            code, line, problem = run(case, root / f"case{number}", shared, values.timeout)
            results.append((case, code, line))
            wrong += problem is not None
            print(f"{'WRONG, ' + problem if problem else 'ok'}: {describe(case)} -> {code}: {line}", flush=True)
    print(f"{len(chosen)} inputs, {wrong} of them with another outcome than the right one")
    if not values.only:
        write_atomically(values.output, page(results, time.monotonic() - begin).encode())
        print(f"wrote {values.output}")
    return 1 if wrong else 0


if __name__ == "__main__":
    define_flags()
    cli.run(main)
