"""The instructions of a compiled program, and how often each of them runs.

Read from the program's text, so that what it does is known before any device is there.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_CALLS = re.compile(
    r"\b(?:calls|to_apply|body|condition|(?:branch|true|false)_computations?)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_DEFINITION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+\(.*)")
# What is run by itself where it is called; all else is part of the caller.
_OPENS = re.compile(r"\b(?:while|conditional|call)\(")
_TRIPS = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')


class Instruction(NamedTuple):
    """One line of a program.

    Attributes:
        line: The line.
        computation: Name of the computation that it stands in.
        times: How often it runs in one execution of the program; None in a loop whose text does not
            say how often it does.
        conditional: Whether it lies in a branch and may not run at all.
        fused: Whether it is a part of another instruction.
    """

    line: str
    computation: str
    times: int | None
    conditional: bool
    fused: bool


def instructions(text: str) -> Iterator[Instruction]:
    """All instructions that a program reaches, those of a called computation after each call.

    Args:
        text: `compiled.as_text()`.

    Raises:
        ValueError: If this is no such text.
    """
    program = _Program(text)

    def visit(
        name: str, times: int | None, conditional: bool, fused: bool
    ) -> Iterator[Instruction]:
        for line in program.bodies.get(name, ()):
            yield Instruction(line, name, times, conditional, fused)
            inner = times
            if re.search(r"\bwhile\(", line):
                trips = _trips(program, name, line)
                inner = times * trips if trips is not None and times is not None else None
            branch = conditional or re.search(r"\bconditional\(", line) is not None
            part = fused or _OPENS.search(line) is None
            for called in _CALLS.findall(line):
                for callee in re.findall(r"[\w.\-]+", called):
                    yield from visit(callee, inner, branch, part)

    yield from visit(program.entry, 1, False, False)


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
