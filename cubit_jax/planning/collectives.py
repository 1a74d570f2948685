"""What the devices exchange in one run of a compiled program, read from its text (`compiled.as_text()`)."""

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}  # of other types the name tells
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")


@dataclasses.dataclass
class Traffic:
    """The collectives of one kind in one run of the program.

    count: how many run. sent: bytes that one device sends, if rings are used: of a result of S bytes in a group of n,
    S (n - 1) / n for all-gather and all-to-all, twice that for all-reduce, S (n - 1) for reduce-scatter, whose result
    is one part of n, and S for collective-permute. across: the bytes of `sent` in groups that span several slices. For
    TPUs these are parts of their own: within a slice, and then what the host sends on, whose S bytes count as they are.
    """

    count: int = 0
    sent: int = 0
    across: int = 0

    def add(self, times: int, sent: float, spans: bool) -> None:
        """Counts `times` collectives of `sent` bytes each; `spans` tells whether their groups span slices."""
        self.count += times
        self.sent += round(times * sent)
        self.across += round(times * sent) if spans else 0


def traffic(text: str, slices: Sequence[int]) -> tuple[dict[str, Traffic], list[str]]:
    """({kind: Traffic} of the kinds that occur, the names of loops with collectives whose length is not known).

    A loop counts as many times as its condition or its annotation tells, one of unknown length once; all branches of a
    conditional count. An all-reduce whose devices keep only their part of the sum counts as a reduce-scatter. What
    the TPU compiler spreads over several fusions, also inside a loop, to run beside other work, stands in each of them
    and counts once.

    Args:
      text: of a program after compilation, HLO.
      slices: for every device, in the order of the mesh, the slice it belongs to.
    """
    entry, computations = _computations(text)
    result, unknown = {}, []

    def walk(name, times, seen, scattered=False):
        for label, shape, operation, rest in computations.get(name, ()):
            kind = operation.removesuffix("-start")
            if kind in KINDS and not operation.endswith(("-done", "-update")):
                if "chain_id=" in rest:  # a part; the channel alone is not enough, all of a jax.shard_map have the same
                    identity = (kind, *re.findall(r'channel_id=\d+|chain_id="\d+"', rest))
                    if identity in seen:
                        continue
                    seen.add(identity)
                count, spans = _group(kind, rest, slices)
                size = _bytes(shape, operation)
                if scattered and kind == "all-reduce":
                    kind, size = "reduce-scatter", size / count
                sent = {
                    "all-gather": size * (count - 1) / count,
                    "all-to-all": size * (count - 1) / count,
                    "all-reduce": 2 * size * (count - 1) / count,
                    "reduce-scatter": size * (count - 1),
                    "collective-permute": size,
                }[kind]
                if count > 1:
                    result.setdefault(kind, Traffic()).add(times, sent, spans)
            elif operation == "send" and (transfer := re.search(r'megascale_transfer_type="(\w+)"', rest)):
                kind = transfer[1].lower().replace("_", "-")
                kind = kind if kind in KINDS else "collective-permute"
                result.setdefault(kind, Traffic()).add(times, _bytes(shape, operation), True)
            elif operation == "while":
                body, condition = (re.search(rf"{part}=%?([\w.\-]+)", rest)[1] for part in ("body", "condition"))
                trips = _trip_count(rest, computations.get(condition, ()))
                before = sum(value.count for value in result.values())
                walk(body, times * (1 if trips is None else trips), set(seen))
                if trips is None and sum(value.count for value in result.values()) > before:
                    unknown.append(label)
            elif not operation.endswith(("-done", "-update")):
                branches = re.search(r"branch_computations=\{([^}]*)\}", rest)
                called = _CALLED.findall(rest) + re.findall(r"[\w.\-]+", branches[1] if branches else "")
                for inner in called:
                    walk(inner, times, seen, "all-reduce-scatter" in label or "all-reduce-scatter" in inner)

    walk(entry, 1, set())
    return {kind: result[kind] for kind in KINDS if kind in result}, unknown


def _computations(text):
    """(name of the entry, {computation: [(name, type, operation, operands and attributes)]})."""
    entry, current, result = None, None, {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = result.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif current is not None and (instruction := _INSTRUCTION.match(line)):
            current.append(instruction.groups())
    if entry is None:
        raise ValueError("the text has no ENTRY computation: it is not a compiled program")
    return entry, result


def _trip_count(attributes, condition):
    """How often a loop runs: as annotated, or the constant that its counter, which starts at 0, is compared with."""
    if known := re.search(r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)', attributes):
        return int(known[1])
    limits = {
        name: int(number[1])
        for name, shape, operation, rest in condition
        if operation == "constant" and re.match(r"[su]\d+\[\]", shape) and (number := re.match(r"(\d+)\)", rest))
    }
    for _, _, operation, rest in condition:
        if operation == "compare" and (direction := re.search(r"direction=(LT|LE)", rest)):
            used = [name for name in re.findall(r"[\w.\-]+", rest.partition(")")[0]) if name in limits]
            return limits[used[0]] + (direction[1] == "LE") if used else None
    return next(iter(limits.values())) if len(limits) == 1 else None  # the comparison is inside a fusion


def _bytes(shape, operation):
    """Bytes of a result. An operation that has only started has its operands in the tuple, too, and scalars."""
    parts = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    if operation in ("all-gather-start", "reduce-scatter-start", "collective-permute-start"):
        parts = [part for part in parts if part != ("u32", "")]
        parts = parts[len(parts) // 2 :]
    if operation == "send":  # the array, a context and a token
        parts = parts[:1]
    return sum(math.prod(map(int, filter(None, dims.split(",")))) * _bits(dtype) for dtype, dims in parts) / 8


def _bits(dtype):
    if dtype in _BITS:
        return _BITS[dtype]
    number = re.match(r"[a-z]+(\d+)", dtype)
    return int(number[1]) if number else 0  # token


def _group(kind, rest, slices):
    """(devices of a group, whether groups have devices of several slices)."""
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", rest)
        groups = [list(map(int, pair)) for pair in re.findall(r"(\d+),(\d+)", pairs[1])] if pairs else []
        return 2, any(slices[a] != slices[b] for a, b in groups)
    groups = _replica_groups(rest, len(slices))
    return groups.shape[1], any(len({slices[i] for i in group}) > 1 for group in groups)


def _replica_groups(rest, devices):
    """[groups, devices of a group], from any of the three ways in which they are written."""
    attribute = re.search(r"replica_groups=(.*)", rest)
    text = attribute[1] if attribute else ""
    if mesh := re.match(r"mesh\[(.*?)\](?:, device_ids=\((\S+)\))? \{(.*?)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        # An axis may be split: 'name':(2)4 is the part of size 4 after one of size 2.
        used = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", mesh[3])
        dims, grouped = [], []
        for name, size in sizes.items():
            parts = [(int(before), int(part)) for other, before, part in used if other == name and part]
            if parts:
                before, part = parts[0]
                grouped.append(len(dims) + 1)
                dims += [before, part, size // before // part]
            else:
                if any(other == name for other, _, _ in used):
                    grouped.append(len(dims))
                dims.append(size)
        ids = (_device_ids(mesh[2]) if mesh[2] else np.arange(devices)).reshape(dims)
        rest_axes = [axis for axis in range(len(dims)) if axis not in grouped]
        count = math.prod(dims[axis] for axis in grouped)
        return ids.transpose(*rest_axes, *grouped).reshape(-1, count)
    if iota := re.match(r"\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
        return _device_ids(iota[3]).reshape(int(iota[1]), int(iota[2]))
    groups = re.findall(r"\{([\d,]+)\}", text[: text.find("}}") + 2])
    if groups:
        return np.array([[int(n) for n in group.split(",")] for group in groups])
    return np.arange(devices)[None]  # {}: all of them


def _device_ids(text):
    """The order of devices: "[2,8]T(1,0)" counts in that shape and then transposes it; or the numbers themselves."""
    if not (iota := re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)):
        return np.array([int(n) for n in text.split(",")])
    dims = [int(n) for n in iota[1].split(",")]
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose([int(n) for n in iota[2].split(",")]) if iota[2] else ids
