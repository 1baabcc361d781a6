"""Which rows a process reads follows from where its devices are in the mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from nag_jax.training.batches import local_rows, place_batch


class PartOfASharding:
    """The sharding of a batch as a process sees it that holds some of its shards."""

    def __init__(self, *parts):
        self.parts = parts

    def addressable_devices_indices_map(self, shape):
        return {device: (part,) for device, part in enumerate(self.parts)}


@pytest.mark.parametrize(
    ("parts", "rows"),
    [
        ([slice(None)], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([slice(4, 6), slice(6, 8)], [4, 5, 6, 7]),
        # Two devices that share their rows, as the tensor axis has it.
        ([slice(4, 8), slice(4, 8)], [4, 5, 6, 7]),
        # Devices that are not neighbours.
        ([slice(0, 2), slice(4, 6)], [0, 1, 4, 5]),
    ],
)
def test_rows_are_those_of_the_devices(parts, rows):
    assert local_rows(PartOfASharding(*parts), 8).tolist() == rows


def test_a_batch_is_placed_row_by_row():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, P(("data",)))
    rows = local_rows(sharding, 4)
    batch = {"tokens": np.arange(12).reshape(4, 3), "valid": np.ones((4, 3), bool)}
    placed = place_batch(sharding, 4, rows, batch)
    assert all(np.array_equal(placed[name], batch[name]) for name in batch)
    assert placed["tokens"].sharding == sharding
