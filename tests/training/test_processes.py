"""What one of two processes finds wrong ends both with a sentence; flags that describe no job."""

import pytest
from process_helpers import start_job
from run_helpers import PLAIN

from nag_jax.errors import UserError
from nag_jax.training import processes

KEYS = PLAIN | {"train.steps": 6}


def test_a_mistake_of_one_process_ends_all(place, tmp_path):
    job = start_job(
        place, tmp_path / "run", KEYS, 2, one_only={1: ("--config.train.batch_size=16",)}
    )
    ended = job.end()
    assert ended[0].returncode == 2
    assert ended[0].stderr == (
        "process 0: error: config and flags must be the same on all processes: train.batch_size: "
        "8 on process 0, 16 on process 1\n"
    )
    # The other one finds it too, or, on a busy machine, first hears that process 0 has ended.
    if ended[1].returncode == 2:
        assert ended[1].stderr in ("", ended[0].stderr.replace("process 0:", "process 1:", 1))
    else:
        assert ended[1].returncode == 1 and "as another process of this job" in ended[1].stderr
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
