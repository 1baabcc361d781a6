"""Logical axes to mesh axes: where parameters live and where activations are pinned.

The rules say nothing of any module: a parameter brings its logical axes, and this file alone knows
which of them is split over which mesh axis.
"""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nag_jax.parameters import AXES, ParamInfo

MESH_AXES = ("data", "fsdp")
BATCH_AXES = ("data", "fsdp")

# Parameters are stored split over fsdp along the model width, which every large leaf has.
PARAMETER_RULES: dict[str, str | None] = dict.fromkeys(AXES) | {"embed": "fsdp"}


def parameter_spec(info: ParamInfo, mesh: Mesh, path: str) -> P:
    """Partition spec of one parameter leaf.

    Args:
        info: The parameter's record.
        mesh: Mesh with the axes of `MESH_AXES`.
        path: The parameter's path, for the error.

    Returns:
        The spec; an axis whose length the mesh axis does not divide stays whole.

    Raises:
        ValueError: If a logical axis has no rule.
    """
    spec = []
    for name, length in zip(info.axes, info.shape, strict=True):
        if name not in PARAMETER_RULES:
            raise ValueError(f"parameter {path} has logical axis {name!r}, which has no rule")
        mesh_axis = PARAMETER_RULES[name]
        divides = mesh_axis is not None and length % mesh.shape[mesh_axis] == 0
        spec.append(mesh_axis if divides else None)
    return P(*spec)


def parameter_shardings(infos: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Shardings of all parameters, as a tree like the parameters'."""
    return jax.tree_util.tree_map_with_path(
        lambda path, info: NamedSharding(
            mesh, parameter_spec(info, mesh, "/".join(str(key.key) for key in path))
        ),
        infos,
        is_leaf=lambda node: isinstance(node, ParamInfo),
    )


def batch_shards(mesh: Mesh) -> int:
    """Number of devices, or groups of devices, that share the rows of a batch."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a batch: rows over the data and fsdp axes, everything else whole."""
    return NamedSharding(mesh, P(BATCH_AXES))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins an activation's layout when a mesh is set, and does nothing otherwise.

    Args:
        x: The activation.
        *axes: Per axis of `x`, "batch" or None.

    Returns:
        `x`, with the sharding constraint.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    spec = P(*(BATCH_AXES if axis == "batch" else None for axis in axes))
    return jax.lax.with_sharding_constraint(x, spec)


@jax.custom_vjp
def gather_weight(w: jax.Array) -> jax.Array:
    """Asks for a whole copy of a weight where it is used.

    Left alone, the partitioner may split a contraction over the stored layout and sum activations
    instead, which moves more bytes than the weight has. The gradient is not pinned: it is summed
    into the stored layout, and never needs to be whole anywhere.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return w
    return jax.lax.with_sharding_constraint(w, P())


gather_weight.defvjp(lambda w: (gather_weight(w), None), lambda _, cotangent: (cotangent,))
