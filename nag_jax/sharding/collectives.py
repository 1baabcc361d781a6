"""What a compiled program sends between devices: collectives by kind and bytes.

Read from the text of the compiled program, loops counted as often as they run, so that what a mesh
costs is known before any device is there.
"""

import math
import re
from collections import defaultdict
from typing import NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2}
_BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_COLLECTIVE = re.compile(rf"= (.+?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")
_GROUPS = re.compile(
    r"replica_groups=(\{\{[\d,{} ]*\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(.*?\)\)?)? \{([^}]*)\}")
_CALLS = re.compile(
    r"\b(?:calls|to_apply|body|condition|(?:branch|true|false)_computations?)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_DEFINITION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+\(.*)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_FUSED = ("fused_computation", "async_collective_fusion")
_TRIPS = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')


class Collective(NamedTuple):
    """One collective of a program.

    Attributes:
        kind: One of `KINDS`.
        devices: Devices in each group that exchanges.
        bytes: What one device receives from others each time, a ring assumed: for n devices and
            a whole array of b bytes (n-1)/n b, an all-reduce twice that, a permutation all of b.
            Of a ragged all-to-all the whole buffer, of which the rows there are may fill less.
        times: How often it runs in one execution of the program; None in a loop whose text does not
            say how often it does.
        conditional: Whether it lies in a branch and may not run at all.
        shape: Its result, in the compiler's words.
        source: The place in the model that it comes from, where the compiler knows.
    """

    kind: str
    devices: int
    bytes: int
    times: int | None
    conditional: bool
    shape: str
    source: str


def collectives(text: str, num_devices: int) -> list[Collective]:
    """The collectives of a compiled program that send anything.

    Args:
        text: `compiled.as_text()`.
        num_devices: Devices that the program runs on.

    Raises:
        ValueError: If this is no such text.
    """
    program = _Program(text)
    found: list[Collective] = []
    # On TPU an asynchronous collective is named in each fusion that it passes through.
    channels: set[str] = set()

    def visit(name: str, times: int | None, conditional: bool) -> None:
        for line in program.bodies.get(name, ()):
            match = _COLLECTIVE.search(line)
            if match:
                channel = _CHANNEL.search(line)
                if channel and name.startswith(_FUSED):
                    if channel[1] in channels:
                        continue
                    channels.add(channel[1])
                one = _collective(line, match, times, conditional, num_devices)
                if one.devices > 1:
                    found.append(one)
            inner = times
            if re.search(r"\bwhile\(", line):
                trips = _trips(program, name, line)
                inner = times * trips if trips is not None and times is not None else None
            branch = conditional or re.search(r"\bconditional\(", line) is not None
            for called in _CALLS.findall(line):
                for callee in re.findall(r"[\w.\-]+", called):
                    visit(callee, inner, branch)

    visit(program.entry, 1, False)
    return found


def totals(found: list[Collective]) -> dict[str, tuple[int, int]]:
    """Number of runs and bytes that a device receives, by kind.

    Raises:
        ValueError: If it is not known how often one of them runs.
    """
    sums: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for one in found:
        if one.times is None:
            raise ValueError(f"unknown number of iterations around {one.kind} of {one.source}")
        count, size = sums[one.kind]
        sums[one.kind] = (count + one.times, size + one.times * one.bytes)
    return dict(sums)


class _Program:
    """Lines of each computation of a program by its name, and the entry's name."""

    def __init__(self, text: str):
        self.bodies: dict[str, list[str]] = {}
        self.entry = current = ""
        for line in text.splitlines():
            header = _HEADER.match(line)
            if header:
                current = header[2]
                self.bodies[current] = []
                self.entry = current if header[1] else self.entry
            elif current:
                self.bodies[current].append(line)
        if not self.entry:
            raise ValueError("this is no text of a compiled program: it has no ENTRY")
        self._definitions: dict[str, dict[str, str]] = {}

    def operation(self, computation: str, name: str) -> str:
        """What a name in a computation stands for, without its type; copies are looked through."""
        if computation not in self._definitions:
            found = (_DEFINITION.match(line) for line in self.bodies.get(computation, ()))
            self._definitions[computation] = {match[1]: match[2] for match in found if match}
        told = self._definitions[computation].get(name, "")
        copied = re.match(r"copy\(%?([\w.\-]+)\)", told)
        return self.operation(computation, copied[1]) if copied else told

    def element(self, computation: str, tuple_name: str, index: int) -> str:
        """What the element of a tuple stands for that this computation puts together."""
        inside = re.match(r"tuple\((.*?)\)", self.operation(computation, tuple_name))
        names = re.findall(r"%([\w.\-]+)", inside[1]) if inside else []
        return self.operation(computation, names[index]) if index < len(names) else ""

    def root(self, computation: str) -> str:
        """Name of a computation's result."""
        for line in reversed(self.bodies.get(computation, ())):
            match = re.match(r"\s*ROOT %?([\w.\-]+) = ", line)
            if match:
                return match[1]
        return ""


def _trips(program: _Program, computation: str, line: str) -> int | None:
    """How often a loop runs; None if neither it nor its counter says so.

    Compilers for TPU say nothing, but their text shows where the counter starts, what is added to
    it, and the constant that it stays below: JAX's own loops count by 1, those that the partitioner
    makes of a product and a collective, to overlap them, by 2.
    """
    told = _TRIPS.search(line)
    if told:
        return int(told[1])
    names = re.search(r"while\(%?([\w.\-]+)\), condition=%?([\w.\-]+), body=%?([\w.\-]+)", line)
    if names is None:
        return None
    start_of, condition, body = names.groups()

    def constant(inside: str, name: str) -> int | None:
        match = re.match(r"constant\((-?\d+)\)", program.operation(inside, name))
        return int(match[1]) if match else None

    def counter(inside: str, name: str) -> int | None:
        match = re.match(r"get-tuple-element\(.*?\), index=(\d+)", program.operation(inside, name))
        return int(match[1]) if match else None

    test = re.match(
        r"compare\(%?([\w.\-]+), %?([\w.\-]+)\), direction=LT",
        program.operation(condition, program.root(condition)),
    )
    if test is None:
        return None
    index, limit = counter(condition, test[1]), constant(condition, test[2])
    if index is None or limit is None:
        return None
    start = re.match(r"constant\((-?\d+)\)", program.element(computation, start_of, index))
    added = re.match(
        r"add\(%?([\w.\-]+), %?([\w.\-]+)\)", program.element(body, program.root(body), index)
    )
    if start is None or added is None or counter(body, added[1]) != index:
        return None
    step = constant(body, added[2])
    return max(0, -(-(limit - int(start[1])) // step)) if step and step > 0 else None


def _collective(
    line: str, match: re.Match, times: int | None, conditional: bool, num_devices: int
) -> Collective:
    shape, kind, asynchronous = match[1], match[2], bool(match[3])
    if asynchronous and kind != "all-reduce":
        shape = _elements(shape)[1]  # (inputs, outputs, and what the device needs)
    arrays = _ARRAY.findall(shape)
    size = sum(_size(dtype, lengths) for dtype, lengths in arrays)
    devices = num_devices if kind == "collective-permute" else _group_size(line, num_devices)
    share = (devices - 1) / devices
    sent = {
        "all-gather": size * share,
        "all-reduce": 2 * size * share,
        "reduce-scatter": size * (devices - 1),
        "all-to-all": size * share,
    }.get(kind, size)
    name = re.search(r'op_name="([^"]*)"', line)
    source = name[1] if name else ""
    return Collective(kind, devices, round(sent), times, conditional, shape, source)


def _elements(shape: str) -> list[str]:
    """The parts of a tuple's shape, "(a, (b, c), d)", at its outermost level."""
    parts, depth = [""], 0
    for character in shape[1:-1]:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _size(dtype: str, lengths: str) -> int:
    size = _BYTES.get(dtype, 1 if dtype.startswith("f8") else 4)
    for length in filter(None, lengths.split(",")):
        size *= int(length)
    return size


def _group_size(line: str, num_devices: int) -> int:
    """Devices in a group; without any groups, all of them.

    Groups are written "{{0,1},{2,3}}", "[groups,size]<=[...]" or by the axes of a mesh,
    "mesh['a'=2,'b'=4] {'b'}", of which one may be taken in part, "'b':(1)2".
    """
    match = _AXES.search(line)
    if match:
        lengths = dict(re.findall(r"'([^']+)'=(\d+)", match[1]))
        named = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part or lengths[axis]) for axis, part in named)
    match = _GROUPS.search(line)
    if match is None or match[1] == "{}":
        return num_devices
    if match[1].startswith("["):
        return int(match[1].split("]")[0].split(",")[-1])
    return len(match[1].lstrip("{").split("}")[0].split(","))
