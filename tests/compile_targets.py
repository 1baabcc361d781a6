"""Meshes of accelerators that are not there, to compile for. Tests skip where none can be made."""

import contextlib

import numpy as np
import pytest
from jax.sharding import Mesh

from nag_jax.errors import UserError
from nag_jax.sharding.rules import MESH_AXES
from nag_jax.sharding.topologies import absent_devices

SQUARE = (2, 2, 1, 1)


def tpu_mesh(topology: str = "v5e:2x2", shape: tuple[int, ...] = SQUARE) -> Mesh:
    """v5e chips, with the given lengths of `MESH_AXES`."""
    return _mesh(topology, shape)


def gpu_mesh(count: int = 4, shape: tuple[int, ...] = SQUARE) -> Mesh:
    """H200 of one host, with the given lengths of `MESH_AXES`."""
    return _mesh(f"h200:{count}", shape)


def _mesh(topology: str, shape: tuple[int, ...]) -> Mesh:
    with skip_without_compiler():
        devices = absent_devices(topology)
    return Mesh(np.array(devices).reshape(shape), MESH_AXES)


@contextlib.contextmanager
def skip_without_compiler():
    """Skips where a topology cannot be compiled for, because a package or ptxas is missing."""
    try:
        yield
    except UserError as error:
        if "must be installed" in str(error) or "ptxas" in str(error):
            pytest.skip(str(error))
        raise
