"""Where the time of a program compiled for TPU goes, by the compiler's own estimates."""

import re
from collections import defaultdict
from typing import NamedTuple

from nag_jax.sharding.programs import instructions

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_PLACE = re.compile(r'op_name="([^"]*)"')
# JAX's own wrapping, which says nothing of a place in the model.
_WRAPPING = re.compile(
    r"^(while|body|closed_call|jit\(.*\)|.*jvp.*|checkpoint|rematted_computation|.*->.*)$"
)


class Place(NamedTuple):
    """A place in the model and what its operations take.

    Attributes:
        name: The last names that JAX gave it, with the pass.
        cycles: By the compiler's estimate, in one execution of the program.
        runs: How many operations are run.
    """

    name: str
    cycles: int
    runs: int


def places(text: str) -> list[Place]:
    """The places of a program, the slowest first; none where the compiler estimates nothing.

    Operations of Pallas kernels carry no estimate, those that wait for other devices one that says
    little, and branches are left out, as are loops that do not say how often they run.

    Args:
        text: `compiled.as_text()`.
    """
    cycles: defaultdict[str, int] = defaultdict(int)
    runs: defaultdict[str, int] = defaultdict(int)
    for one in instructions(text):
        told = _CYCLES.search(one.line)
        if told and one.times and not (one.fused or one.conditional):
            name = _name(one.line)
            cycles[name] += one.times * int(told[1])
            runs[name] += one.times
    found = [Place(name, spent, runs[name]) for name, spent in cycles.items()]
    return sorted(found, key=lambda place: -place.cycles)


def _name(line: str) -> str:
    told = _PLACE.search(line)
    if told is None:
        return "without a name"
    words = [word for word in told[1].split("/") if not _WRAPPING.match(word)]
    again, backward = "rematted_computation" in told[1], "transpose(" in told[1]
    return "/".join(words[-2:]) + (", again" if again else ", backward" if backward else "")
