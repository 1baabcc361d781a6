"""Experts wherever they are: one device against NumPy, then meshes of eight simulated devices."""

import jax
import numpy as np
import pytest
from eight_devices import run_on_eight_devices
from experts_on_devices import EXPERTS, check

from nag_jax.errors import UserError
from nag_jax.sharding import experts


@pytest.mark.parametrize("rows, length, k", [(3, 5, 2), (1, 1, 1), (1, 1, 3), (2, 3, EXPERTS)])
def test_one_device(rows, length, k):
    """Empty experts, one hot expert, no expert, odd counts, one token, all experts."""
    check(None, "gather", rows, k, length)


@pytest.mark.slow
def test_eight_devices():
    out = run_on_eight_devices("experts_on_devices.py")
    assert out.count("checked") == 10


def test_routes_of_an_example():
    """Two devices with two experts each; device 0 has 1, 0, 2, 0 rows for them, device 1 one each.

    On arrival device 0 holds [expert 0: 0's, 1's; expert 1: 1's], device 1 [expert 2: 0's two, 1's;
    expert 3: 1's].
    """
    sizes = np.asarray([[1, 0, 2, 0], [1, 1, 1, 1]], np.int32)
    there, back = experts.routes(jax.numpy.asarray(sizes), jax.numpy.asarray(1))
    assert [list(map(int, piece)) for piece in there] == [
        [0, 1, 2, 3],  # device 1's rows by expert
        [1, 1, 1, 1],
        [1, 2, 2, 3],
        [2, 0, 1, 1],  # of experts 2 and 3, from device 0 and from itself
    ]
    assert [list(map(int, piece)) for piece in back] == [
        [0, 3, 2, 3],
        [2, 0, 1, 1],
        [1, 3, 2, 3],
        [1, 1, 1, 1],
    ]


def test_choices():
    assert experts.choose("auto", "cpu", 4).row == (
        "exchange with experts",
        "gather",
        "no ragged_all_to_all on CPU",
    )
    assert experts.choose("auto", "tpu").name == "ragged" == experts.choose("auto", "gpu").name
    assert experts.choose("gather", "tpu", 4).name == "gather"
    assert experts.choose("auto", "gpu", 1).name == "local"
    with pytest.raises(UserError, match="allowed there: auto, gather"):
        experts.choose("ragged", "cpu", 2)
    assert experts.choose("ragged", "cpu", 1).name == "local"
