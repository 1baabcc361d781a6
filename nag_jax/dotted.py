"""Nested dicts and their leaves by dotted path, such as "model.connection.kind"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from nag_jax.errors import UserError


def flatten(tree: Mapping[str, Any] | ConfigDict, prefix: str = "") -> dict[str, Any]:
    """A nested dict as one dict by dotted path; an empty inner dict stays as a value.

    Keys may be dotted already: `{"model.d_model": 64}` is `{"model": {"d_model": 64}}`.
    """
    leaves: dict[str, Any] = {}
    for name, value in (tree.to_dict() if isinstance(tree, ConfigDict) else tree).items():
        if isinstance(value, Mapping | ConfigDict) and value:
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict of which `leaves` is the flat form.

    Raises:
      UserError: a path is both a value and a group of keys.
    """
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        *groups, name = key.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
            if not isinstance(node, dict):
                raise UserError(f"{key} is set, yet {group} is set as a value, not a group of keys")
        node[name] = value
    return tree
