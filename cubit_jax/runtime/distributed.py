"""One run of several processes: how they find each other, wait for each other, and end together.

jax.distributed does the work: it connects the processes, notices a lost one, and agrees on a step to stop at. A program
of one process touches none of it. Every host must see the same files.

`in_turn`, `from_first`, `agree` and `barrier` use the key-value store of jax.distributed, not
`jax.experimental.multihost_utils`, whose functions are collectives on the devices: those time out where one process
waits for hours, as for the preparation of data, and need arrays.
"""

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

import jax
from absl import flags, logging
from jax._src.distributed import global_state  # the key-value store of jax.distributed has no public name

from cubit_jax.runtime.errors import UserError, missing_device

_FLAGS = ("coordinator_address", "num_processes", "process_id")
_WEEK = 7 * 24 * 3600 * 1000  # ms. Waiting needs no limit of its own: whatever goes wrong ends the process.
_CONNECT_WITHIN = 300  # seconds until all processes must have been started
_FAILURE = "cubit_jax/failure"
_LOST = re.compile(r"Gloo|NCCL|[Cc]onnection|[Hh]eartbeat|Socket closed|UNAVAILABLE|DEADLINE_EXCEEDED|CANCELLED")
_AGAIN = "the same command, started again on all hosts, goes on from the last checkpoint"
Result = TypeVar("Result")
_ending, _closing = threading.Lock(), threading.Event()


def define_flags() -> None:
    """Flags of a program that may be several processes."""
    flags.DEFINE_string(
        "coordinator_address",
        None,
        "HOST:PORT of process 0, the same for all. These three flags are "
        "not needed on Cloud TPU, under SLURM (srun), Open MPI or a Kubernetes indexed job.",
    )
    flags.DEFINE_integer("num_processes", None, "How many processes form the run. 1, alone, looks for no others.")
    flags.DEFINE_integer("process_id", None, "Number of this process, from 0.")
    flags.DEFINE_integer(
        "heartbeat_timeout_seconds",
        100,
        "A process that is silent for so long counts as lost, which "
        "ends all others; started again they go on from the last checkpoint.",
        lower_bound=1,
    )
    for name in (*_FLAGS, "heartbeat_timeout_seconds"):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])  # for the program's --help


def run(main: Callable[[], None], stop_together: bool = False) -> None:
    """Calls `main()` as one of the processes that the flags or the cluster name; alone if they name none.

    An error of one process ends them all with its message and exit code 1, wherever they are.

    Args:
      main: function of no arguments. Errors it raises reach the caller only in a run of one process.
      stop_together: SIGTERM is left to `jax.experimental.multihost_utils.reached_preemption_sync_point`.

    Raises:
      UserError: the flags do not fit each other, or the other processes cannot be found.
    """
    if not _connect(stop_together):
        main()
        return
    watcher = threading.Thread(target=_watch, name="failures of others", daemon=True)
    watcher.start()
    try:
        main()
        barrier("end")
    except BaseException as error:
        _fail(error)
    _closing.set()
    jax.distributed.shutdown()
    watcher.join()


def process_index() -> int:
    """Number of this process in its run; unlike JAX's own it does not wait for the devices."""
    return global_state.process_id


def require_one_process(program: str) -> None:
    """Raises UserError if the cluster has started this program in several processes."""
    if (cluster := _cluster()) and (cluster[1] or 1) > 1:
        raise UserError(
            f"{program} runs in one process, but {cluster[0]} has started several; start it on one host alone"
        )


def in_turn(fn: Callable[[], Result], name: str) -> Result:
    """fn() on process 0, and when it has returned on all others: they find what it has written. `name` is unique."""
    if global_state.client is None:
        return fn()
    if global_state.process_id == 0:
        result = fn()
        global_state.client.key_value_set(f"cubit_jax/done/{name}", "")
    else:
        global_state.client.blocking_key_value_get(f"cubit_jax/done/{name}", _WEEK)
        result = fn()
    barrier(f"together/{name}")  # a collective, which may come next, waits for the slowest half a minute only
    return result


def from_first(value: str, name: str) -> str:
    """The string that process 0 gives, on every process. `name` is unique."""
    if global_state.client is None:
        return value
    if global_state.process_id == 0:
        global_state.client.key_value_set(f"cubit_jax/value/{name}", value)
    return global_state.client.blocking_key_value_get(f"cubit_jax/value/{name}", _WEEK)


def agree(value: str, name: str) -> None:
    """Raises UserError if a process has another string than process 0. `name` is unique, and stands in the message."""
    if from_first(value, name) != value:
        raise UserError(
            f"process {global_state.process_id} has other {name} than process 0: give all processes the same"
        )


def barrier(name: str) -> None:
    """Returns when all processes have come here. `name` is unique."""
    if global_state.client is not None:
        global_state.client.wait_at_barrier(f"cubit_jax/{name}", _WEEK)


def _connect(stop_together):
    """Joins the other processes; whether there may be any. Must come before anything asks JAX for its devices."""
    given = {name: getattr(flags.FLAGS, name) for name in _FLAGS}
    cluster = None
    if given == dict.fromkeys(_FLAGS) | {"num_processes": 1}:
        return False
    if any(value is not None for value in given.values()):
        _check(**given)
        given["cluster_detection_method"] = "deactivate"
    else:
        cluster = _cluster()
        if cluster is None or cluster[1] == 1:
            return False
        given = {}
    jax.config.update("jax_enable_preemption_service", stop_together)
    where = f"at {given['coordinator_address']}" if cluster is None else f"of {cluster[0]}"
    # Where processes are missing or lost jax.distributed ends this one by abort(). What it says then must not be buried
    # under absl's dump of all threads.
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    logging.info("waiting for the other processes %s, for %d s at most", where, _CONNECT_WITHIN)
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=_CONNECT_WITHIN,
            heartbeat_timeout_seconds=flags.FLAGS.heartbeat_timeout_seconds,
        )
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, ValueError) and cluster == ("Cloud TPU", None):  # TPUs of one host, as in a notebook
            logging.info("JAX knows of no other hosts: this process is the run")
            return False
        raise UserError(
            f"cannot join the other processes {where}: {error}; --num_processes=1 runs without them"
        ) from error
    if global_state.process_id == 0:
        logging.info(
            "%d processes; one that is lost ends the others after %d s without a sign of life",
            global_state.num_processes,
            flags.FLAGS.heartbeat_timeout_seconds,
        )
    else:
        logging.set_verbosity(logging.WARNING)
    return True


def _check(coordinator_address, num_processes, process_id):
    missing = [
        f"--{name}" for name, value in zip(_FLAGS, (coordinator_address, num_processes, process_id)) if value is None
    ]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} missing: give --coordinator_address, --num_processes and "
            "--process_id together, or none of them"
        )
    if not re.fullmatch(r".+:\d+", coordinator_address):
        raise UserError(f"--coordinator_address={coordinator_address} must be HOST:PORT")
    try:
        socket.getaddrinfo(*coordinator_address.rsplit(":", 1))
    except OSError as error:
        raise UserError(f"--coordinator_address={coordinator_address}: {error.strerror}") from error
    if not 0 <= process_id < num_processes:
        raise UserError(f"--process_id={process_id} must be from 0 to --num_processes - 1 = {num_processes - 1}")


def _cluster():
    """(name, number of processes or None if JAX has to ask for it) of the cluster around this process, or None.

    JAX asks the network about some clusters; this looks at the environment alone.
    """
    environment = os.environ
    # Of a step that srun has started; a shell inside an allocation has not all of them.
    if {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"} <= environment.keys():
        return "SLURM", int(environment["SLURM_NTASKS"])
    if {"OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE"} <= environment.keys():
        return "Open MPI", int(environment["OMPI_COMM_WORLD_SIZE"])
    # JAX chooses "tpu,cpu" by itself where there are TPU chips and libtpu.
    if "tpu" in (jax.config.jax_platforms or "").split(","):
        hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
        if hosts:
            return "Cloud TPU", len(hosts.split(",")) * int(environment.get("MEGASCALE_NUM_SLICES") or 1)
        if "TPU_SKIP_MDS_QUERY" not in environment:
            return "Cloud TPU", None
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys():
        return "Kubernetes", None
    return None


def _watch():
    """Ends this process when another one has failed, or when process 0, which knows, is gone."""
    try:
        failure = global_state.client.blocking_key_value_get(_FAILURE, _WEEK)
    except jax.errors.JaxRuntimeError:
        if not _closing.is_set():
            _end(f"process 0 was lost; {_AGAIN}", 1, lost=True)
        return
    _end(failure, 1)


def _fail(error):
    """Ends all processes because of an exception in this one."""
    message = " ".join(str(error).split())
    if _is_loss(error):
        if "CoordinationService" not in message:
            time.sleep(2)  # if the other process could say what was wrong, _watch ends this one with that
        _end(f"lost another process ({message[:160]}); {_AGAIN}", 1, lost=True)
    if isinstance(error, KeyboardInterrupt):
        _end("interrupted", 130, tell=True)
    if device := missing_device(error):
        _end(device, 1, tell=True)
    if not isinstance(error, (UserError, NotImplementedError)):
        traceback.print_exception(error)
        message = f"{type(error).__name__}: {message}"
    _end(message, 1, tell=True)


def _is_loss(error):
    """Whether an exception, or what it was raised from, comes of a process that is gone."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) and _LOST.search(str(error)):
            return True
        error = error.__cause__
    return False


def _end(message, code, *, tell=False, lost=False):
    """Prints the error and ends this process at once, as its threads may wait for other processes.

    The others are told first, unless they know (`tell`); where one is lost jax.distributed ends them.
    """
    if not _ending.acquire(blocking=False):
        threading.Event().wait()  # the other thread ends the process
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if lost:
        os._exit(code)
    client, process = global_state.client, global_state.process_id
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # lost in this very moment
        if tell:
            client.key_value_set(_FAILURE, f"process {process}: {message}", allow_overwrite=True)
        if process:
            client.key_value_set(f"cubit_jax/ended/{process}", "")
        else:  # the store ends with this process: the others read it first
            deadline = time.monotonic() + 5
            for other in range(1, global_state.num_processes):
                left = max(1, int(1000 * (deadline - time.monotonic())))
                client.blocking_key_value_get(f"cubit_jax/ended/{other}", left)
    os._exit(code)
