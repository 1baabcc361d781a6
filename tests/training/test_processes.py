"""Two processes train as one does; what one of them finds wrong ends both with a sentence."""

import numpy as np
import pytest
from process_helpers import DEVICES, start_job
from run_helpers import PLAIN, results, saved_arrays, saved_position, saved_steps

import nag_jax
from nag_jax.errors import UserError
from nag_jax.training import processes

STEPS = 6
KEYS = PLAIN | {"train.steps": STEPS, "checkpoint.every": 3, "evaluation.every": 3}


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


def test_a_mistake_of_one_process_ends_all(place, tmp_path):
    job = start_job(
        place, tmp_path / "run", KEYS, 2, one_only={1: ("--config.train.batch_size=16",)}
    )
    ended = job.end()
    assert [run.returncode for run in ended] == [2, 2]
    assert ended[0].stderr == (
        "process 0: error: config and flags must be the same on all processes: train.batch_size: "
        "8 on process 0, 16 on process 1\n"
    )
    assert ended[1].stderr in ("", ended[0].stderr.replace("process 0:", "process 1:", 1))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("127.0.0.1:1", None, 0, False), "without --processes: several processes need"),
        ((None, 2, None, False), "--processes without --coordinator and --process: "),
        (("localhost", 2, 0, False), "--coordinator=localhost must be host:port"),
        (("a:1", 0, 0, False), "--processes=0 must be at least 1"),
        (("a:1", 2, 2, False), "--process=2 must be between 0 and 1, as --processes=2"),
        ((None, 2, None, True), "--distributed finds --processes by itself"),
    ],
)
def test_flags_that_describe_no_job(flags, sentence):
    with pytest.raises(UserError, match=sentence):
        processes.join(*flags)


def test_alone_everything_is_what_it_is():
    assert (processes.count(), processes.index()) == (1, 0)
    assert processes.from_first(lambda: 3) == processes.agreed(lambda: 3) == 3
    assert processes.prefixed("failed: x") == "failed: x"
    with pytest.raises(UserError, match="^no$"):

        def mistake():
            raise UserError("no")

        processes.first_before_others(mistake)
