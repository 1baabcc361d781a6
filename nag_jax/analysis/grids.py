"""Which runs a sweep has: products, zips and lists of overrides, each run with a name of its own.

Nothing is run here.
"""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from nag_jax.errors import UserError

_UNSAFE = re.compile(r"[^A-Za-z0-9_.+=-]+")


class Variant(NamedTuple):
    """One run of a sweep.

    Attributes:
        name: Of its folder.
        values: Text of each override that the sweep varies, by key.
    """

    name: str
    values: dict[str, str]


def variants(grids: Sequence[str], zips: Sequence[str], lists: Sequence[str]) -> list[Variant]:
    """Every run that the flags ask for.

    Args:
        grids: "key=a,b,c": each value with all that the others say. A value with commas stands in
            parentheses: "(1,2),(3,4)".
        zips: "key=a,b;other=c,d": the first values together, then the second ones.
        lists: "key=a other=b;key=c": runs one by one; keys may differ.

    Returns:
        The product of all grids, zips and lists, in order.

    Raises:
        UserError: Something that cannot be read, keys that a zip gives different numbers of values,
            a key that is named twice, or runs that are the same.
    """
    factors = [
        *([{key: value} for value in values] for key, values in map(_assignment, grids)),
        *map(_zipped, zips),
        *map(_listed, lists),
    ]
    if not factors:
        raise UserError("nothing varies: give --grid, --zip or --list")
    found = []
    for chosen in itertools.product(*factors):
        keys = [key for part in chosen for key in part]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise UserError(f"{twice[0]} is varied twice")
        found.append({key: value for part in chosen for key, value in part.items()})
    names = [_name(values) for values in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"two runs are the same or would have the same folder, {twice[0]}")
    return [Variant(name, values) for name, values in zip(names, found, strict=True)]


def _assignment(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.strip().partition("=")
    if not (equals and key and values.strip()):
        raise UserError(f"{text!r} cannot be read: it must be key=value,value,...")
    return key.strip(), _split(values)


def _split(text: str) -> list[str]:
    """Values between commas that lie in no parentheses; a whole value's own are taken off."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if depth or not all(part.strip() for part in parts):
        raise UserError(f"the values {text!r} cannot be read: an empty one, or a parenthesis alone")
    return [
        part[1:-1] if part.startswith("(") and part.endswith(")") else part
        for part in (part.strip() for part in parts)
    ]


def _zipped(text: str) -> list[dict[str, str]]:
    columns = dict(_assignment(part) for part in text.split(";"))
    lengths = {key: len(values) for key, values in columns.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise UserError(f"--zip={text}: all keys need as many values: {told}")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _listed(text: str) -> list[dict[str, str]]:
    runs = []
    for part in text.split(";"):
        pairs = [item.partition("=") for item in part.split()]
        if not pairs or not all(key and equals and value for key, equals, value in pairs):
            raise UserError(f"--list={text}: {part.strip()!r} must be key=value key=value ...")
        runs.append({key: value for key, _, value in pairs})
    return runs


def _name(values: dict[str, str]) -> str:
    """The last part of each key, or as much of it as tells it from the others, with its value."""
    parts = {key: key.split(".") for key in values}

    def short(key):
        for length in range(1, len(parts[key]) + 1):
            tail = parts[key][-length:]
            if sum(other[-length:] == tail for other in parts.values()) == 1:
                return ".".join(tail)
        return key

    told = (f"{short(key)}={value.replace(',', '+')}" for key, value in values.items())
    return ",".join(_UNSAFE.sub("_", part) for part in told)
