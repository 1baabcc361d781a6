"""From the config's mesh to devices."""

import jax
import pytest
from ml_collections import ConfigDict

from nag_jax.errors import UserError
from nag_jax.sharding.mesh import make_mesh, mesh_shape, single_device_mesh
from nag_jax.sharding.rules import constrain, gather_weight


@pytest.mark.parametrize(
    "data, fsdp, devices, expected",
    [
        (-1, 1, 8, (8, 1)),
        (-1, 4, 8, (2, 4)),
        (2, -1, 8, (2, 4)),
        (4, 2, 8, (4, 2)),
        (1, 1, 1, (1, 1)),
    ],
)
def test_shape(data, fsdp, devices, expected):
    assert mesh_shape(ConfigDict({"data": data, "fsdp": fsdp}), devices) == expected


@pytest.mark.parametrize("data, fsdp", [(3, 1), (-1, 3), (16, 1), (2, 2)])
def test_a_mesh_of_another_size_is_refused(data, fsdp):
    with pytest.raises(UserError, match=f"mesh.data={data} and mesh.fsdp={fsdp} .*devices, 8"):
        mesh_shape(ConfigDict({"data": data, "fsdp": fsdp}), 8)


def test_meshes_of_this_process():
    mesh = make_mesh(ConfigDict({"data": -1, "fsdp": 1}), jax.devices()[:1])
    assert mesh.axis_names == ("data", "fsdp") and mesh.devices.shape == (1, 1)
    assert single_device_mesh().devices.size == 1


def test_constraints_do_nothing_without_a_mesh():
    x = jax.numpy.ones((2, 3))
    assert constrain(x, "batch", None) is x
    assert gather_weight(x) is x
