"""Does a run fit, and what will its devices exchange? python -m cubit_jax.plan --config=... --topology=v5e:16x16

Compiles the training step, the one that train runs, for devices that are not there. Ends with exit code 0 if it fits,
with 2 and one line if it does not, with 1 and one line for a mistake.
"""

import dataclasses
import functools
import json
import math
import os
import re
import sys
import time

import jax
from absl import flags

from cubit_jax import partitioning
from cubit_jax.flops import flops_per_token
from cubit_jax.model import LanguageModel, count_parameters
from cubit_jax.model_config import drop_replaced_options
from cubit_jax.ops import dispatch
from cubit_jax.planning import advice as plan_advice
from cubit_jax.planning import topology
from cubit_jax.planning.collectives import traffic
from cubit_jax.planning.topology import GIB
from cubit_jax.runtime import cli
from cubit_jax.runtime.devices import peak_flops
from cubit_jax.runtime.errors import UserError
from cubit_jax.runtime.files import write_atomically
from cubit_jax.training import config_check
from cubit_jax.training import step as train_step

_FORWARD_AGAIN = {"none": 1.0, "full": 4 / 3, "dots": 1.0}  # of operations, with what remat repeats


def define_flags():
    cli.define_config()
    flags.DEFINE_string("topology", None, f"Devices to compile for. Known: {topology.KNOWN}.")
    flags.DEFINE_integer("num_slices", 1, "TPU slices of this topology; mesh.replica should be as large.")
    flags.DEFINE_integer(
        "tries",
        2,
        "If it does not fit: how many other settings to compile, in search of one that "
        "does. 0: the one suggested is an estimate.",
    )
    flags.DEFINE_string("json", None, "File to write the plan to as JSON, also if it does not fit.")


@dataclasses.dataclass
class Plan:
    """What is known of a run before it starts. Bytes are those of one device; a step is one update.

    parameters, optimizer: bytes of the state. peak: bytes in use at the fullest moment; peak_is_bound: it is the sum of
    state, batch, temporaries and code, which may be more. Where the compiler refused, what it says it needs; where the
    state alone is too much, the state. available: what the compiler lets a program use. temporary: None where it did
    not compile.
    flops: of the model a step, all devices together (flops_per_token); None where a layer does not state its own.
    flops_executed: with what remat computes again, the forward pass once more for "full"; "dots" computes little again,
    which is not counted. seconds_at_peak: flops_executed at the devices' peak, and nothing else: no step can be faster.
    None where the peak is not known.
    collectives: {kind: {count, sent, across}} as collectives.Traffic. unknown_loops: loops counted once there.
    """

    settings: dict
    topology: str
    num_slices: int
    num_devices: int
    device_kind: str
    compiler: str
    mesh: dict
    num_parameters: int
    parameters: int
    optimizer: int
    available: int
    peak: int
    fits: bool
    flops: float | None
    flops_executed: float | None
    seconds_at_peak: float | None
    peak_is_bound: bool = False
    temporary: int | None = None
    collectives: dict | None = None
    unknown_loops: list | None = None
    implementations: dict | None = None
    compile_seconds: float | None = None
    suggestion: dict | None = None
    suggestion_peak: int | None = None
    suggestion_compiled: bool = False


def main():
    values = flags.FLAGS
    if values.tries < 0:
        raise UserError(f"--tries={values.tries} must be at least 0")
    if values.json:
        path = os.path.abspath(values.json)
        if os.path.isdir(path) or not os.access(os.path.dirname(path), os.W_OK):
            raise UserError(
                f"cannot write --json={values.json}: it is a folder, or its folder is not there or not writable"
            )
    drop_replaced_options(values.config, cli.given_options())
    topology.prepare()
    target = topology.open_topology(values.topology, values.num_slices)
    plan = make_plan(values.config, target, values.num_slices, values.tries)
    if values.json:
        record = {"config": cli.config_name()} | dataclasses.asdict(plan)
        write_atomically(path, json.dumps(record, indent=1).encode())
    print(describe(plan) if plan.fits else refusal(plan), flush=True)
    return 0 if plan.fits else 2


def make_plan(config, target, num_slices=1, tries=0):
    """The Plan of the run `config` on a topology.Topology.

    Args:
      tries: how many other settings to compile if this one does not fit.

    Raises:
      UserError: the config is wrong, the mesh does not match the devices, or the compiler fails for another reason than
        memory.
    """
    plan = _compile(config, target, num_slices)
    if plan.fits:
        return plan
    known = [plan]
    while True:
        found = plan_advice.suggest(config, known, functools.partial(_state_bytes, target=target))
        plan.suggestion, plan.suggestion_peak = found or (None, None)
        if found is None or len(known) > tries:
            return plan
        _say("does not fit; trying " + plan_advice.as_flags(plan.suggestion))
        tried = _compile(plan_advice.changed(config, plan.suggestion), target, num_slices)
        if tried.fits:
            plan.suggestion_peak, plan.suggestion_compiled = tried.peak, True
            return plan
        known.append(tried)


def _compile(config, target, num_slices):
    """The Plan of one setting, without a suggestion."""
    model, mesh = _checked(config, target)
    devices, kind = target.devices, target.devices[0].device_kind
    with jax.set_mesh(mesh), dispatch.backend(target.platform):
        shapes, shardings = train_step.state_shapes(model, config, mesh)
        count = count_parameters(shapes["params"])
        parameters, moments = (_bytes(shapes[name]) for name in ("params", "opt_state"))
        flops, executed, peak = flops_per_token(model.config, count), None, peak_flops(kind)
        if flops is not None:
            flops *= config.batch_size * config.seq_len
            executed = flops * _FORWARD_AGAIN[config.model.remat]
        plan = Plan(
            settings=plan_advice.settings(config),
            topology=target.name,
            num_slices=num_slices,
            num_devices=len(devices),
            device_kind=kind,
            compiler=f"jax {jax.__version__}, {target.compiler}",
            mesh=dict(mesh.shape),
            num_parameters=count,
            parameters=parameters,
            optimizer=moments,
            available=target.memory,
            peak=parameters + moments,
            fits=False,
            flops=flops,
            flops_executed=executed,
            seconds_at_peak=executed / len(devices) / peak if peak and executed else None,
        )
        if plan.peak > plan.available:
            return plan  # without anything computed yet
        _say(f"compiling the training step for {len(devices)} x {kind}: minutes, of one CPU core")
        start = time.monotonic()
        try:
            with dispatch.recorded() as choices:
                compiled = train_step.compile_train_step(
                    model, config, shapes, shardings, partitioning.batch_sharding(mesh)
                )
        except jax.errors.JaxRuntimeError as error:
            plan.peak = _required(error)
            return plan
        plan.compile_seconds = time.monotonic() - start
    memory = compiled.memory_analysis()
    plan.temporary = memory.temp_size_in_bytes
    plan.peak, plan.peak_is_bound = memory.peak_memory_in_bytes, target.platform != "tpu"
    if plan.peak_is_bound:  # other compilers leave the temporaries out of it
        plan.peak = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.generated_code_size_in_bytes
        )
    plan.fits = plan.peak <= plan.available
    found, plan.unknown_loops = traffic(compiled.as_text(), [target.group(device) for device in mesh.devices.flat])
    plan.collectives = {name: dataclasses.asdict(value) for name, value in found.items()}
    plan.implementations = {op: sorted(names) for op, names in choices.items()}
    return plan


def _checked(config, target):
    """(LanguageModel, mesh of the topology's devices); UserError as train would raise it."""
    try:
        model_config, mesh = config_check.check(config, target.devices)
    except ValueError as error:
        raise UserError(f"{error} (on {target.name})") from error
    return LanguageModel(model_config), mesh


def _state_bytes(config, target):
    """Bytes of (parameters, optimizer state) a device; ValueError where the setting is not allowed."""
    try:
        model, mesh = _checked(config, target)
    except UserError as error:
        raise ValueError(error) from error
    with jax.set_mesh(mesh), dispatch.backend(target.platform):
        shapes, _ = train_step.state_shapes(model, config, mesh)
    return tuple(_bytes(shapes[name]) for name in ("params", "opt_state"))


def _bytes(shapes):
    """Bytes of one device's share."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)
    )


def _required(error):
    """The bytes that the program needs, as the compiler's refusal says; UserError if it refused for another reason."""
    text = " ".join(str(error).split())
    need = re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM|Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm", text)
    if "RESOURCE_EXHAUSTED" not in text or not need:
        raise UserError(f"the compiler refuses the training step: {text[:400]}") from error
    number, unit = need[1] or need[3], need[2] or need[4]
    return int(float(number) * 2 ** (10 * (1 + "KMGT".index(unit))))


def describe(plan):
    """The plan as text of some lines."""
    memory = [("parameters", plan.parameters), ("optimizer state", plan.optimizer), ("temporary", plan.temporary)]
    lines = [
        f"topology    {_where(plan)}: {plan.num_devices} x {plan.device_kind}, mesh {_mesh(plan.mesh)}",
        f"run         {', '.join(f'{name}={value}' for name, value in plan.settings.items())}",
        f"model       {plan.num_parameters:,} parameters; "
        + ", ".join(f"{op}: {' and '.join(names)}" for op, names in plan.implementations.items()),
        f"compiled    in {plan.compile_seconds:.0f} s by {plan.compiler}",
        "memory      a device: "
        + ", ".join(f"{name} {_size(size)}" for name, size in memory)
        + f"; peak {'at most ' * plan.peak_is_bound}{plan.peak / GIB:.2f} GiB of {plan.available / GIB:.2f}: it fits",
    ]
    if plan.flops is None:
        lines.append("compute     not known: a layer of the model does not state its multiply-adds")
    else:
        lines.append(
            f"compute     a step: {plan.flops:.3g} FLOPs of the model (closed form, 2 a multiply-add, causal half of "
            f"L x L), {plan.flops_executed:.3g} with recomputation"
        )
    if plan.seconds_at_peak is not None:
        lines.append(
            f"            {plan.seconds_at_peak * 1e3:.4g} ms at the devices' peak; no step is faster, and "
            "memory, network and what is not a matrix product are not in it"
        )
    lines.append("exchange    a step, sent by each device:")
    groups = "hosts" if plan.topology.startswith("gpu") else "slices"
    for name, value in plan.collectives.items():
        across = f", {_size(value['across'])} of it between {groups}" if value["across"] else ""
        lines.append(f"            {name:18} {value['count']:6,} times {_size(value['sent']):>12}{across}")
    if not plan.collectives:
        lines.append("            nothing")
    if plan.unknown_loops:
        lines.append(f"            loops of unknown length, counted once: {', '.join(plan.unknown_loops)}")
    return "\n".join(lines)


def refusal(plan):
    """One line: what is needed, what there is, and what to try."""
    what = f"needs {plan.peak / GIB:.2f} GiB a device"
    if plan.peak == plan.parameters + plan.optimizer:
        what = f"needs {plan.peak / GIB:.2f} GiB a device for the state alone"
    line = (
        f"does not fit: {_where(plan)} {what} and a {plan.device_kind} has {plan.available / GIB:.2f} "
        f"(parameters {plan.parameters / GIB:.2f}, optimizer state {plan.optimizer / GIB:.2f}, mesh "
        f"{_mesh(plan.mesh)})"
    )
    if plan.suggestion is None:
        return line + "; found no mesh, micro-batch or remat with which it would: more devices, or a smaller batch"
    how = "compiled" if plan.suggestion_compiled else "estimated"
    return f"{line}; try {plan_advice.as_flags(plan.suggestion)} ({how}: {plan.suggestion_peak / GIB:.2f} GiB)"


def _where(plan):
    return plan.topology + (f" x {plan.num_slices} slices" if plan.num_slices > 1 else "")


def _mesh(sizes):
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "of one device"


def _size(number):
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,} B"


def _say(text):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    define_flags()
    cli.run(main, required=["config", "topology"])
