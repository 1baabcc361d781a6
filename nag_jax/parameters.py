"""How a parameter is declared, and what the rest of the code may ask about it.

Every parameter is made by `declare`, which records its logical axes and its role as plain metadata
on the Flax Variable. Optimizer groups, sharding, decay and FLOP counts read that record, so a
module of a user's own gets all of them right by declaring its parameters in the same way.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

ROLES = ("matrix", "embedding", "head", "gate", "router", "scale", "bias", "conv")
AXES = (
    "layers",
    "embed",
    "heads",
    "kv_heads",
    "head_dim",
    "hidden",
    "vocabulary",
    "directions",
    "lags",
    "expert",
    "choices",
    "router_width",
)
STACK_AXIS = "layers"


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """What is known of one parameter leaf.

    Attributes:
        axes: Logical name of each axis of the leaf, the stack axis included.
        role: One of `ROLES`; decides optimizer group, rate and decay.
        rows: Positions of the axes that form a matrix's input side (empty unless a matrix).
        columns: Positions of the axes that form its output side.
        centred: Whether the mean over the embed axis is held at zero.
        shape: Shape of the leaf.
        dtype: Dtype of the leaf.
    """

    axes: tuple[str, ...]
    role: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    centred: bool
    shape: tuple[int, ...]
    dtype: Any

    @property
    def size(self) -> int:
        """Number of elements."""
        total = 1
        for length in self.shape:
            total *= length
        return total


def declare(
    value: jax.Array,
    axes: tuple[str, ...],
    role: str,
    *,
    rows: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
    centred: bool = False,
) -> nnx.Param:
    """Makes a parameter with its record.

    Args:
        value: Initial value, one axis per name in `axes`.
        axes: Logical axis names from `AXES`, without the stack axis, which scanning adds.
        role: One of `ROLES`.
        rows: For a matrix, the axes of its input side; axes in neither side are batch axes.
        columns: For a matrix, the axes of its output side.
        centred: Whether the optimizer keeps the mean over "embed" at zero (norm-agnostic tables).

    Returns:
        The Flax parameter.

    Raises:
        ValueError: If a name is unknown or the record does not fit the value.
    """
    _check_names((*axes, *rows, *columns), role)
    if len(axes) != value.ndim:
        raise ValueError(f"{len(axes)} axis names {axes} for a value of shape {value.shape}")
    if (role == "matrix") != bool(rows and columns):
        raise ValueError("rows and columns are named for matrices, and for matrices only")
    if not set(rows) | set(columns) <= set(axes):
        raise ValueError(f"rows {rows} and columns {columns} must be among the axes {axes}")
    return nnx.Param(value, axes=axes, role=role, rows=rows, columns=columns, centred=centred)


def _check_names(axes: tuple[str, ...], role: str) -> None:
    unknown = [name for name in axes if name not in AXES]
    if unknown:
        raise ValueError(f"unknown logical axis {unknown[0]!r}; known axes: {', '.join(AXES)}")
    if role not in ROLES:
        raise ValueError(f"unknown parameter role {role!r}; known roles: {', '.join(ROLES)}")


def info_of(variable: nnx.Variable, path: str) -> ParamInfo:
    """Reads one parameter's record.

    Args:
        variable: The parameter; its value may be abstract and may have one stack axis in front.
            A record written as plain metadata, without `declare`, serves as well.
        path: Its path, for the errors.

    Returns:
        The record with positions resolved for the (stacked) leaf.

    Raises:
        ValueError: If the parameter has no record, or a name in it is unknown.
    """
    metadata = variable.get_metadata()
    if "axes" not in metadata or "role" not in metadata:
        raise ValueError(
            f"parameter {path} has no logical axes and role; make it with "
            "nag_jax.parameters.declare"
        )
    shape = tuple(variable.shape)
    axes, role = tuple(metadata["axes"]), metadata["role"]
    rows, columns = (tuple(metadata.get(side, ())) for side in ("rows", "columns"))
    try:
        _check_names((*axes, *rows, *columns), role)
    except ValueError as error:
        raise ValueError(f"parameter {path}: {error}") from error
    if len(shape) == len(axes) + 1:
        axes = (STACK_AXIS, *axes)
    if len(shape) != len(axes):
        raise ValueError(f"parameter {path} has shape {shape} but axes {axes}")
    return ParamInfo(
        axes=axes,
        role=role,
        rows=tuple(axes.index(name) for name in rows),
        columns=tuple(axes.index(name) for name in columns),
        centred=metadata.get("centred", False),
        shape=shape,
        dtype=variable.dtype,
    )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts into {"a/b/c": leaf}."""
    flat = {}
    for name, value in tree.items():
        path = f"{prefix}/{name}" if prefix else str(name)
        if isinstance(value, Mapping):
            flat.update(flatten(value, path))
        else:
            flat[path] = value
    return flat
