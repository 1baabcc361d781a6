"""Logical axes to mesh axes: where parameters live and where activations are pinned.

The rules say nothing of any module: a parameter brings its logical axes, and this file alone knows
which of them is split over which mesh axis.
"""

import functools
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nag_jax.parameters import AXES, ParamInfo

MESH_AXES = ("data", "fsdp", "tensor", "expert")

# Devices of one tensor group hold the same rows.
BATCH_AXES = ("data", "fsdp", "expert")

# What a weight is split over where it is used: each device has its own heads, hidden units, rows of
# the vocabulary and experts.
USE_RULES: dict[str, tuple[str, ...]] = dict.fromkeys(AXES, ()) | {
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "hidden": ("tensor",),
    "vocabulary": ("tensor",),
    "expert": ("expert",),
}

# Parameters are stored split along the model width as well, which every large leaf has; those that
# are no experts also over the expert axis, which is one more axis of rows to them.
PARAMETER_RULES = USE_RULES | {"embed": ("fsdp", "expert")}


def parameter_spec(info: ParamInfo, mesh: Mesh, path: str) -> P:
    """Partition spec of one parameter leaf, as it is stored.

    Args:
        info: The parameter's record.
        mesh: Mesh with the axes of `MESH_AXES`.
        path: The parameter's path, for the error.

    Returns:
        The spec. An axis whose length a mesh axis does not divide is not split over it, no mesh
        axis is named twice, and none of length 1 is named.

    Raises:
        ValueError: If a logical axis has no rule.
    """
    for name in info.axes:
        if name not in PARAMETER_RULES:
            raise ValueError(f"parameter {path} has logical axis {name!r}, which has no rule")
    return stored_spec(info.axes, info.shape, mesh)


def stored_spec(axes: tuple[str, ...], shape: tuple[int, ...], mesh: Any) -> P:
    """Partition spec by which a parameter, or what is made of one, is split where it is stored."""
    return _spec(tuple(axes), tuple(shape), mesh, PARAMETER_RULES)


def mesh_axes(spec: P, axis: int, mesh: Any) -> tuple[str, ...]:
    """The mesh axes longer than 1 over which a spec splits an axis."""
    over = spec[axis] if axis < len(spec) else None
    names = (over,) if isinstance(over, str) else over or ()
    return tuple(name for name in names if mesh.shape[name] > 1)


def _spec(
    axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh, table: dict[str, tuple[str, ...]]
) -> P:
    # Experts stay apart even where their number does not divide the mesh axis.
    taken = {"expert"} if "expert" in axes else set()
    spec = []
    for name, length in zip(axes, shape, strict=True):
        over: tuple[str, ...] = ()
        for mesh_axis in table[name]:
            parts = mesh.shape[mesh_axis] * math.prod(mesh.shape[axis] for axis in over)
            free = name == mesh_axis or mesh_axis not in taken
            if mesh.shape[mesh_axis] > 1 and length % parts == 0 and free:
                over += (mesh_axis,)
        taken |= set(over)
        spec.append(over if len(over) > 1 else next(iter(over), None))
    return P(*spec)


def derived_sharding(
    sharding: NamedSharding, shape: tuple[int, ...], derived: tuple[int, ...]
) -> NamedSharding:
    """Sharding of an array that is made of a parameter: a factor, a basis, a vector of scales.

    Args:
        sharding: The parameter's.
        shape: Its shape.
        derived: Shape of the array: stack axes as the parameter's, then axes of its own.

    Returns:
        Stack axes are split as the parameter's; mesh axes that split others of its axes split the
        first axis of the array that they divide.
    """
    spec = [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
    stack = 0
    while stack < min(len(shape), len(derived)) - 2 and shape[stack] == derived[stack]:
        stack += 1
    names: list[list[str]] = [[] for _ in derived]
    for axis, over in enumerate(spec):
        for name in (over,) if isinstance(over, str) else over or ():
            places = [axis] if axis < stack else range(len(derived))
            for place in places:
                parts = math.prod(sharding.mesh.shape[n] for n in (*names[place], name))
                if derived[place] % parts == 0:
                    names[place].append(name)
                    break
    return NamedSharding(sharding.mesh, P(*(tuple(n) or None for n in names)))


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


def rows_spec(count: int, mesh: Any) -> P:
    """Split of an activation's rows over `BATCH_AXES`, or whole where these do not divide them."""
    return P(BATCH_AXES) if not mesh.empty and count % batch_shards(mesh) == 0 else P()


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a batch: rows over `BATCH_AXES`, everything else whole."""
    return NamedSharding(mesh, P(BATCH_AXES))


def in_use(mesh: Any) -> bool:
    """Whether there is a mesh over which the partitioner splits what is computed."""
    return not (mesh.empty or mesh.are_all_axes_manual)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins an activation's layout when a mesh is set, and does nothing otherwise or in `shard_map`.

    Args:
        x: The activation.
        *axes: Per axis of `x`, "batch", a logical axis by whose rule weights in use are split, or
            None for whole. A logical axis whose length the mesh axis does not divide is whole.

    Returns:
        `x`, with the sharding constraint.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not in_use(mesh):
        return x
    split = [
        BATCH_AXES
        if axis == "batch"
        else None
        if axis is None
        else _spec((axis,), (length,), mesh, USE_RULES)[0]
        for axis, length in zip(axes, x.shape, strict=True)
    ]
    return jax.lax.with_sharding_constraint(x, P(*split))


def gather_weight(w: jax.Array, axes: tuple[str, ...] | None = None) -> jax.Array:
    """Asks for a copy of a weight that is whole along the model width where it is used.

    Left alone, the partitioner may split a contraction over the stored layout and sum activations
    instead, which moves more bytes than the weight has. The gradient is not pinned: it is summed
    into the stored layout, and never needs to be whole anywhere.

    Args:
        w: The weight.
        axes: Its logical axes, by which it stays split; None for a copy whole along every axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not in_use(mesh):
        return w
    return _pinned(w, P() if axes is None else use_spec(axes, w.shape, mesh))


def use_spec(axes: tuple[str, ...], shape: tuple[int, ...], mesh: Any) -> P:
    """Partition spec by which a weight or a row of an activation is split where it is used."""
    return _spec(tuple(axes), tuple(shape), mesh, USE_RULES)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _pinned(w: jax.Array, spec: P) -> jax.Array:
    return jax.lax.with_sharding_constraint(w, spec)


_pinned.defvjp(lambda w, spec: (_pinned(w, spec), None), lambda spec, _, cotangent: (cotangent,))
