"""Builds the device mesh that a config asks for."""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict

from nag_jax.errors import UserError
from nag_jax.sharding.rules import MESH_AXES


def mesh_shape(options: ConfigDict, num_devices: int) -> tuple[int, ...]:
    """Resolves the mesh of a config for a number of devices.

    Args:
        options: The config's `mesh` node; -1 for one axis means all remaining devices.
        num_devices: Number of devices to use.

    Returns:
        Length of each axis of `MESH_AXES`.

    Raises:
        UserError: If no such mesh has exactly `num_devices` devices.
    """
    lengths = [int(options[name]) for name in MESH_AXES]
    fixed = math.prod(length for length in lengths if length != -1)
    if -1 in lengths and num_devices % fixed == 0:
        lengths[lengths.index(-1)] = num_devices // fixed
    if math.prod(lengths) != num_devices:
        asked = [f"mesh.{name}={options[name]}" for name in MESH_AXES]
        others = math.prod(abs(length) for length in lengths[1:])
        works = (
            f"mesh.data={num_devices // others} with the other axes as they are"
            if -1 not in lengths[1:] and num_devices % others == 0
            else f"mesh.data={num_devices} with all other axes 1"
        )
        raise UserError(
            f"{', '.join(asked[:-1])} and {asked[-1]} do not fit the number of devices, "
            f"{num_devices}: their product must be {num_devices}, such as {works}"
        )
    return tuple(lengths)


def make_mesh(options: ConfigDict, devices: list) -> Mesh:
    """Mesh with axes `MESH_AXES` over the given devices, in their order.

    Axis types are Auto: the partitioner follows the constraints of `rules`.

    Raises:
        UserError: If the config's mesh is not made of that many devices.
    """
    return _mesh(devices, mesh_shape(options, len(devices)))


def single_device_mesh() -> Mesh:
    """Mesh of this process's first device alone, for use outside training."""
    return _mesh(jax.local_devices()[:1], (1,) * len(MESH_AXES))


def _mesh(devices: list, shape: tuple[int, ...]) -> Mesh:
    return Mesh(
        np.asarray(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)
    )
