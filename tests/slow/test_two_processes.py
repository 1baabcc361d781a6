"""Two processes print, log and save what one process with two devices does."""

import numpy as np
import pytest
from process_helpers import DEVICES, start_job
from run_helpers import (
    PLAIN,
    place_of_session,
    results,
    saved_arrays,
    saved_position,
    saved_steps,
)

import nag_jax

STEPS = 6
KEYS = PLAIN | {"train.steps": STEPS, "checkpoint.every": 3, "evaluation.every": 3}


@pytest.fixture
def place(tmp_path_factory):
    return place_of_session(tmp_path_factory)


def test_two_processes_train_as_one(place, tmp_path):
    job = start_job(place, tmp_path / "two", KEYS, 2)
    alone = place.run(tmp_path / "one", KEYS, environment={"XLA_FLAGS": DEVICES.format(2)})
    assert alone.returncode == 0, alone.stderr
    first, second = job.end()
    assert (first.returncode, first.stderr) == (0, ""), first.stderr
    # The other one says nothing at all.
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert "Gloo" not in first.stdout and "2 x cpu" in first.stdout

    ours, theirs = results(tmp_path / "two"), results(tmp_path / "one")
    assert [line["step"] for line in ours] == [1, 2, 3, 3, 4, 5, 6, 6]
    for left, right in zip(ours, theirs, strict=True):
        assert left == pytest.approx(right, rel=1e-5, abs=1e-7)
    assert saved_steps(tmp_path / "two") == saved_steps(tmp_path / "one") == (3, STEPS)
    assert saved_position(tmp_path / "two", 6) == saved_position(tmp_path / "one", 6)
    # Its checkpoint is one process's, and used like it.
    arrays, expected = (saved_arrays(tmp_path / name, STEPS) for name in ("two", "one"))
    assert arrays.keys() == expected.keys()
    for path, array in arrays.items():
        np.testing.assert_allclose(array, expected[path], atol=1e-5, err_msg=path)
    assert nag_jax.load_run(tmp_path / "two").step == STEPS
