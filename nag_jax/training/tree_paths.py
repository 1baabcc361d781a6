"""Trees of arrays as a flat path -> leaf, so that two can be compared and their difference told.

A path is such as "layers/query" or, in an optimizer's state, "0/mu/layers/query".
"""

import urllib.parse
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any

_LISTED = 20  # differences of one kind that are told


def flatten(tree: PyTree) -> dict[str, Any]:
    """Path -> leaf, in the tree's order. Empty nodes leave no trace.

    Raises:
      ValueError: two leaves would have the same path, or the tree is a bare leaf.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
    if len(leaves) != len(flat) or "" in leaves:
        raise ValueError("the leaves of a checkpoint item need distinct paths that are not empty")
    return leaves


def unflatten(tree: PyTree, leaves: Mapping[str, Any]) -> PyTree:
    """A tree with the structure of `tree` and the given leaves."""
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves[path] for path in flatten(tree)])


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Plain nested dicts of the leaves: a form that depends on no optimizer's class.

    Orbax joins names with dots, so that {"a.b": x} and {"a": {"b": y}} would overwrite each other:
    dots inside a name are escaped here, and `unnest` undoes it.
    """
    nested: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.replace("%", "%25").replace(".", "%2E").split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return nested


def unnest(nested: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `nest`."""
    return {urllib.parse.unquote(path): leaf for path, leaf in flatten(nested).items()}


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array; the default device where there is no sharding."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def describe(leaf: Any) -> dict[str, Any]:
    """Shape and dtype of a leaf in JSON's terms."""
    return {"shape": list(np.shape(leaf)), "dtype": str(jnp.result_type(leaf))}


def fits(saved: Mapping[str, Any], leaf: Any) -> bool:
    """Whether a described leaf can become `leaf`: equal shapes, and both floats or equal dtypes."""
    if tuple(saved["shape"]) != tuple(leaf.shape):
        return False
    there, here = jnp.dtype(saved["dtype"]), jnp.dtype(leaf.dtype)
    return there == here or all(jnp.issubdtype(dtype, jnp.floating) for dtype in (there, here))


def differences(
    saved: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Lines telling what differs, is missing, or is left over.

    Args:
      saved: item name -> path -> described leaf.
      wanted: item name -> path -> leaf; saved items that are not asked for are no difference.
    """
    changed, missing, extra = [], [], []
    for item, leaves in wanted.items():
        there = saved.get(item, {})
        for path, leaf in leaves.items():
            asked = _text(describe(leaf))
            if path not in there:
                missing.append(f"  not in the checkpoint: {item}/{path} {asked}")
            elif not fits(there[path], leaf):
                was = _text(there[path])
                changed.append(f"  differs: {item}/{path} saved {was}, asked {asked}")
        extra += [
            f"  only in the checkpoint: {item}/{path} {_text(described)}"
            for path, described in there.items()
            if path not in leaves
        ]
    lines = []
    for kind in (changed, missing, extra):
        more = len(kind) - _LISTED
        lines += kind[:_LISTED] + ([f"  ... and {more} more"] if more > 0 else [])
    return lines


def _text(described: Mapping[str, Any]) -> str:
    return f"{described['dtype']}{described['shape']}"
