"""From the config's mesh to devices."""

import jax
import pytest
from ml_collections import ConfigDict

from nag_jax.errors import UserError
from nag_jax.sharding.mesh import make_mesh, mesh_shape, single_device_mesh
from nag_jax.sharding.rules import constrain, gather_weight


def axes(data=1, fsdp=1, tensor=1, expert=1):
    return ConfigDict({"data": data, "fsdp": fsdp, "tensor": tensor, "expert": expert})


@pytest.mark.parametrize(
    "options, devices, expected",
    [
        (axes(data=-1), 8, (8, 1, 1, 1)),
        (axes(data=-1, fsdp=4), 8, (2, 4, 1, 1)),
        (axes(data=2, fsdp=-1), 8, (2, 4, 1, 1)),
        (axes(data=-1, tensor=2, expert=2), 8, (2, 1, 2, 2)),
        (axes(fsdp=4, tensor=-1), 8, (1, 4, 2, 1)),
        (axes(expert=-1), 8, (1, 1, 1, 8)),
        (axes(), 1, (1, 1, 1, 1)),
    ],
)
def test_shape(options, devices, expected):
    assert mesh_shape(options, devices) == expected


@pytest.mark.parametrize(
    "options, works",
    [
        (axes(data=3), "mesh.data=8 with"),
        (axes(data=-1, fsdp=3), "mesh.data=8 with all other axes 1"),
        (axes(data=16), "mesh.data=8 with"),
        (axes(data=2, fsdp=2), "mesh.data=4 with the other axes as they are"),
        (axes(data=8, tensor=2), "mesh.data=4 with the other axes as they are"),
        (axes(data=-1, expert=16), "mesh.data=8 with all other axes 1"),
        (axes(data=3, fsdp=-1), "mesh.data=8 with all other axes 1"),
    ],
)
def test_a_mesh_of_another_size_is_refused(options, works):
    with pytest.raises(UserError, match=f"number of devices, 8: .* must be 8, .*{works}") as error:
        mesh_shape(options, 8)
    assert all(f"mesh.{name}={length}" in str(error.value) for name, length in options.items())


def test_meshes_of_this_process():
    mesh = make_mesh(axes(data=-1), jax.devices()[:1])
    assert mesh.axis_names == ("data", "fsdp", "tensor", "expert")
    assert mesh.devices.shape == (1, 1, 1, 1)
    assert single_device_mesh().devices.size == 1


def test_constraints_do_nothing_without_a_mesh():
    x = jax.numpy.ones((2, 3))
    assert constrain(x, "batch", None) is x
    assert gather_weight(x) is x
