"""Which parameter is a matrix, along which axes, and which group of the optimizer owns it.

The answers come from a model's own metadata (`nag_jax.parameters.ParamInfo`) or, for any other
parameter tree, from glob patterns over its paths.
"""

import fnmatch
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax

from nag_jax.errors import UserError
from nag_jax.parameters import ROLES, flatten


class MatrixAxes(NamedTuple):
    """The axes that form a leaf's matrix in the layout [in, out]; every other axis is a batch axis.

    A query projection stacked over layers, [layers, embed, heads, head_dim], has
    `rows=(1,), columns=(2, 3)`: one embed x (heads * head_dim) matrix for each layer.

    Attributes:
      rows: positions of the input side's axes.
      columns: positions of the output side's axes.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]


MatrixSpecs = Any
"""Nested mapping whose "/"-joined keys are globs and whose leaves are (rows, columns), None or one
of the words of `WORDS`."""

WORDS = ("matrix", "stacked_matrix", "adamw")


def path_string(path: tuple[Any, ...]) -> str:
    """Returns a key path of `jax.tree_util` as "outer/inner"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def role_tree(infos: Mapping[str, Any]) -> Any:
    """Returns the tree of role names of a tree of metadata.

    Raises:
      UserError: a role is none of `ROLES`; the message has the parameter's path.
    """
    for path, info in flatten(infos).items():
        if info.role not in ROLES:
            raise UserError(
                f"parameter {path} has the unknown role {info.role!r}; "
                f"the roles are {', '.join(ROLES)}"
            )
    return jax.tree.map(lambda info: info.role, infos)


def check_paths(infos: Mapping[str, Any], params: Any) -> None:
    """Raises `UserError` unless parameters and metadata name the same paths."""
    described = set(flatten(infos))
    present = {path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    if not present:  # optax.tree_map_params asks for the state of an empty tree
        return
    if unknown := sorted(described - present):
        raise UserError(f"metadata describes {unknown[0]}, but no parameter has that path")
    if undescribed := sorted(present - described):
        raise UserError(f"parameter {undescribed[0]} has no metadata, so no role")


def find_matrices(tree: Any, matrices: MatrixSpecs = None) -> dict[str, MatrixAxes]:
    """Finds the leaves that are matrices.

    The first pattern that matches a path decides; `None` there says "no matrix". A leaf that no
    pattern matches is a matrix if it has two axes: rows (0,), columns (1,).

    Args:
      tree: arrays, or anything with a `shape`. Leaves that optax has masked are not returned, but
        patterns may match them.
      matrices: patterns as of `fnmatch` ("*" also matches "/") over "/"-joined paths, each with a
        pair (rows, columns), a `MatrixAxes` or None; or "matrix" (the two axes of the leaf),
        "stacked_matrix" (its last two axes, stacked over the others) or "adamw" (as None); or a
        tree shaped as the parameters with such leaves, which is read as one pattern a leaf.

    Returns:
      {path: MatrixAxes}, axes counted from the front, for the leaves that are matrices.

    Raises:
      UserError: a pattern matches no leaf, or its axes do not fit the leaf.
    """
    patterns = {
        path_string(path): spec
        for path, spec in jax.tree_util.tree_leaves_with_path(matrices or {}, is_leaf=_is_spec)
    }
    unused = set(patterns)
    found = {}
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_masked)
    for key_path, leaf in leaves:
        path = path_string(key_path)
        hits = [glob for glob in patterns if fnmatch.fnmatchcase(path, glob)]
        unused.difference_update(hits)
        if _is_masked(leaf):
            continue
        if hits:
            spec = patterns[hits[0]]
        else:
            spec = MatrixAxes((0,), (1,)) if len(leaf.shape) == 2 else None
        if spec not in (None, "adamw"):
            found[path] = _checked(path, leaf.shape, spec)
    # optax.tree_map_params asks for the state of an empty tree, where nothing can match.
    if unused and leaves:
        raise UserError(f"the matrix pattern {sorted(unused)[0]!r} matches no parameter")
    return found


def all_matrices(tree: Any, matrices: MatrixSpecs = None) -> dict[str, MatrixAxes]:
    """As `find_matrices`, for a tree in which every leaf must be a matrix.

    Raises:
      UserError: a leaf is no matrix, or as `find_matrices`.
    """
    found = find_matrices(tree, matrices)
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if path_string(key_path) not in found:
            raise UserError(
                f"parameter {path_string(key_path)} of shape {tuple(leaf.shape)} is no matrix; "
                "name its rows and columns in `matrices`, or give it another optimizer"
            )
    return found


def matrix_shape(shape: tuple[int, ...], axes: MatrixAxes) -> tuple[int, int]:
    """Returns (input size, output size) of one matrix of a leaf."""
    return math.prod(shape[i] for i in axes.rows), math.prod(shape[i] for i in axes.columns)


def _is_masked(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)


def _is_spec(value: Any) -> bool:
    if value is None or isinstance(value, str) or hasattr(value, "rows"):
        return True
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(side, tuple) and all(isinstance(i, int) for i in side) for side in value)
    )


def _checked(path: str, shape: tuple[int, ...], spec: Any) -> MatrixAxes:
    if isinstance(spec, str):
        spec = _of_word(path, shape, spec)
    rows, columns = (spec.rows, spec.columns) if hasattr(spec, "rows") else spec
    axes = (*rows, *columns)
    in_range = all(-len(shape) <= axis < len(shape) for axis in axes)
    positions = [axis % len(shape) for axis in axes] if in_range else []
    if not (rows and columns and in_range) or len(set(positions)) < len(positions):
        raise UserError(
            f"parameter {path} of shape {tuple(shape)} cannot be a matrix with rows {rows} and "
            f"columns {columns}; both must name axes of it, none twice"
        )
    return MatrixAxes(tuple(positions[: len(rows)]), tuple(positions[len(rows) :]))


def _of_word(path: str, shape: tuple[int, ...], word: str) -> MatrixAxes:
    if word not in WORDS:
        raise UserError(
            f"the matrix pattern of parameter {path} says {word!r}; it must be axes, None, or one "
            f"of {', '.join(WORDS)}"
        )
    if len(shape) < 2 or (word == "matrix" and len(shape) > 2):
        raise UserError(
            f"parameter {path} of shape {tuple(shape)} is no {word}: that has "
            f"{'two axes' if word == 'matrix' else 'two axes or more'}"
        )
    return MatrixAxes((len(shape) - 2,), (len(shape) - 1,))
