"""Builds the device mesh that a config asks for."""

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
    fixed = int(np.prod([length for length in lengths if length != -1]))
    if -1 in lengths and num_devices % fixed == 0:
        lengths[lengths.index(-1)] = num_devices // fixed
    if int(np.prod(lengths)) != num_devices:
        asked = ", ".join(f"mesh.{name}={options[name]}" for name in MESH_AXES)
        raise UserError(
            f"{asked} does not fit {num_devices} device{'s' * (num_devices != 1)}: the product of the "
            f"axes must be {num_devices}, for instance mesh.data={num_devices} with mesh.fsdp=1, or "
            "mesh.data=-1 with an fsdp that divides it."
        )
    return tuple(lengths)


def make_mesh(options: ConfigDict, devices: list | None = None) -> Mesh:
    """Mesh with axes `MESH_AXES` over the given devices, all of them by default.

    Axis types are Auto: the partitioner follows the constraints of `rules`.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(options, len(devices))
    return Mesh(
        np.asarray(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)
    )


def single_device_mesh() -> Mesh:
    """Mesh of the first device alone, for evaluation and use outside training."""
    return make_mesh(ConfigDict({"data": 1, "fsdp": 1}), jax.devices()[:1])
