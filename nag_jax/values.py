"""Typed config values: how a value, or its text on the command line, becomes the type of a default.

A leaf is a bool, int, float, str or a tuple of one of these. Whole trees, keys that do not exist
and combinations of values are not known here.
"""

from __future__ import annotations

import math
import re
from typing import Any

from nag_jax.errors import UserError

Leaf = bool | int | float | str | tuple

TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}

# A tuple's item type is that of its default's first item; these defaults are empty.
EMPTY_TUPLE_ITEMS: dict[str, type] = {"checkpoint.keep_steps": int}

_TUPLE_ITEM = re.compile(r"""\s*(?:'([^']*)'|"([^"]*)"|([^,]*?))\s*(?:,|$)""")


def check_default(key: str, value: Any) -> None:
    """Raises a UserError where `value` cannot be the default of a leaf (it must show its type)."""
    if type(value) in TYPE_NAMES:
        return
    if type(value) is tuple:
        types = {type(item) for item in value} or {EMPTY_TUPLE_ITEMS.get(key)}
        if len(types) == 1 and types <= TYPE_NAMES.keys():
            return
    raise UserError(
        f"the default of {key} is {value!r}, but a default must be a bool, int, float, str or a "
        "tuple of one of these with at least one item, so that the type is known"
    )


def describe_type(key: str, default: Leaf) -> str:
    """The type a leaf takes, in words: "a whole number", "a tuple, each item text"."""
    if isinstance(default, tuple):
        return f"a tuple, each item {TYPE_NAMES[_item_type(key, default)]}"
    return TYPE_NAMES[type(default)]


def convert(key: str, value: Any, default: Leaf) -> Leaf:
    """Converts a Python value (from a config file or JSON) to the type of `default`.

    An int field takes a float with a whole value, a float field an int; nothing else changes type.

    Raises:
      UserError: the value has another type, or is not finite; names key, value and type.
    """
    if isinstance(default, tuple):
        if not isinstance(value, tuple | list):
            raise _wrong_type(key, value, default)
        item_type = _item_type(key, default)
        items = [_convert_scalar(item, item_type) for item in value]
        if any(item is None for item in items):
            raise _wrong_type(key, value, default)
        return tuple(items)
    converted = _convert_scalar(value, type(default))
    if converted is None:
        raise _wrong_type(key, value, default)
    return converted


def parse(key: str, text: str, default: Leaf) -> Leaf:
    """Converts the text of a command-line override to the type of `default`.

    Text is taken literally; an int may be written `1e5` or `100_000`, a bool `true`, `false`, `1`
    or `0`, a tuple `1,2`, `(1, 2)` or `('c', 'd')`, the empty tuple `()`.

    Raises:
      UserError: the text is no such value; names key, text and type.
    """
    if isinstance(default, tuple):
        item_type = _item_type(key, default)
        items = [_parse_scalar(item, item_type) for item in _split_tuple(text)]
        if any(item is None for item in items):
            raise _wrong_type(key, text, default)
        return tuple(items)
    parsed = _parse_scalar(text, type(default))
    if parsed is None:
        raise _wrong_type(key, text, default)
    return parsed


def _item_type(key: str, default: tuple) -> type:
    return type(default[0]) if default else EMPTY_TUPLE_ITEMS[key]


def _wrong_type(key: str, value: Any, default: Leaf) -> UserError:
    return UserError(f"{key} must be {describe_type(key, default)}, not {value!r}")


def _convert_scalar(value: Any, wanted: type) -> Leaf | None:
    """The value as `wanted`, or None where it is of another type."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()  # a NumPy or jax scalar
    if wanted in (bool, str):
        return value if type(value) is wanted else None
    if type(value) is int:
        if wanted is int:
            return value
        try:
            return float(value)
        except OverflowError:
            return None
    if type(value) is float and math.isfinite(value):
        if wanted is float:
            return value
        return int(value) if value.is_integer() else None
    return None


def _parse_scalar(text: str | None, wanted: type) -> Leaf | None:
    """The value that `text` spells, or None where it spells none."""
    if text is None or wanted is str:
        return text
    if wanted is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.strip().lower())
    try:
        return _convert_scalar(int(text), wanted)
    except ValueError:
        pass
    try:
        return _convert_scalar(float(text), wanted)
    except ValueError:
        return None


def _split_tuple(text: str) -> list[str | None]:
    """The items of a tuple's text, quotes taken off; None stands for a missing item."""
    text = text.strip()
    if text[:1] + text[-1:] in ("()", "[]"):
        text = text[1:-1].strip()
    text = text.removesuffix(",")
    if not text.strip():
        return []
    items: list[str | None] = []
    position = 0
    while position <= len(text):
        match = _TUPLE_ITEM.match(text, position)
        single, double, bare = match.groups()
        quoted = single if single is not None else double
        items.append(quoted if quoted is not None else bare or None)
        if match.end() == len(text) and not match.group().endswith(","):
            break
        position = match.end()
    return items
