"""What a compiled program sends between devices: collectives by kind and bytes.

Read from the text of the compiled program, loops counted as often as they run, so that what a mesh
costs is known before any device is there.
"""

import math
import re
from collections import defaultdict
from typing import NamedTuple

from nag_jax.sharding.programs import instructions

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

_COLLECTIVE = re.compile(rf"= (.+?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")
_GROUPS = re.compile(
    r"replica_groups=(\{\{[\d,{} ]*\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(.*?\)\)?)? \{([^}]*)\}")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_FUSED = ("fused_computation", "async_collective_fusion")


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
    found: list[Collective] = []
    # On TPU an asynchronous collective is named in each fusion that it passes through.
    channels: set[str] = set()
    for one in instructions(text):
        match = _COLLECTIVE.search(one.line)
        if match is None:
            continue
        channel = _CHANNEL.search(one.line)
        if channel and one.computation.startswith(_FUSED):
            if channel[1] in channels:
                continue
            channels.add(channel[1])
        collective = _collective(one.line, match, one.times, one.conditional, num_devices)
        if collective.devices > 1:
            found.append(collective)
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
