"""A disk that takes no more, by a real limit on the size of files: one sentence, nothing lost."""

import re
import resource

import pytest
from run_helpers import assert_same_run, assert_same_state, saved_steps
from test_resume import KEYS, STEPS, dunder, reference

from nag_jax.training.errors import RunFailed
from nag_jax.training.loop import train


def limit_files(run, size):
    """From now on the run can make no file longer than this."""
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.slow
def test_a_save_that_fails(place, tmp_path):
    """In mid-run; with room again the same command goes on."""
    every = 40
    reference(place)  # its programs are in the cache, which cannot be written under the limit
    keys = KEYS | {"checkpoint.every": every, "train.log_every": 100}
    run = place.start(tmp_path, keys)
    run.wait_for((tmp_path / "checkpoints" / f"{every:08d}").exists)
    limit_files(run, 20_000)
    failed = run.end()
    assert failed.returncode == 1
    sentence = re.fullmatch(
        r"failed: saving the checkpoint of step (\d+) in \S+ failed \(File too large\); "
        r"the last good checkpoint is step (\d+)\n",
        failed.stderr,
    )
    assert sentence, failed.stderr
    step, good = map(int, sentence.groups())
    assert (step, good) == (2 * every, every)
    assert saved_steps(tmp_path) == (good,)
    with place.in_process():
        train(place.config(**dunder(keys)), tmp_path)
    assert_same_state(tmp_path, reference(place), STEPS)


@pytest.mark.slow
def test_metrics_that_cannot_be_written(place, tmp_path, capsys):
    reference(place)
    keys = KEYS | {"checkpoint.every": 100}
    run = place.start(tmp_path, keys)
    run.wait_for((tmp_path / "checkpoints" / "00000100").exists)
    limit_files(run, (tmp_path / "metrics.jsonl").stat().st_size + 5_000)
    failed = run.end()
    assert failed.returncode == 1
    assert re.fullmatch(
        r"failed: metrics cannot be written in \S+: File too large; step 100 is saved, and the "
        r"same command goes on from there\n",
        failed.stderr,
    ), failed.stderr

    # Nor can they be when it is started again.
    metrics = tmp_path / "metrics.jsonl"
    metrics.rename(tmp_path / "aside")
    metrics.mkdir()
    config = place.config(**dunder(keys))
    with place.in_process():
        with pytest.raises(RunFailed, match="Is a directory; step 100 is saved"):
            train(config, tmp_path)
        metrics.rmdir()
        (tmp_path / "aside").rename(metrics)
        train(config, tmp_path)
    assert_same_run(tmp_path, reference(place), STEPS)
