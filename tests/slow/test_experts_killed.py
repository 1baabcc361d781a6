"""A run with experts and SOAP that was killed ends as if it had not been, balance and bases too."""

import signal
import time

from run_helpers import assert_same_run, place_of_session, saved_arrays

KEYS = {
    "model.feedforward.kind": "moe_zaya",
    "model.feedforward.num_experts": (4,),
    "model.feedforward.load_balance_loss": 0.01,
    "optimizer.kind": "soap",
    "optimizer.refresh_every": 7,
    "checkpoint.keep_best": 0,
    "checkpoint.every": 20,
    "evaluation.every": 50,
    "train.steps": 200,
    "train.accumulation": 2,
}


def test_a_killed_run_with_experts(tmp_path_factory, tmp_path):
    place = place_of_session(tmp_path_factory)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = place.run(whole, KEYS)
    assert done.returncode == 0, done.stderr
    run = place.start(killed, KEYS)
    run.wait_for((killed / "checkpoints" / "00000040").exists)
    time.sleep(0.2)
    run.signal(signal.SIGKILL)
    assert run.end().returncode == -signal.SIGKILL
    resumed = place.run(killed, KEYS)
    assert resumed.returncode == 0, resumed.stderr
    paths = saved_arrays(killed, 200)
    assert any(path.startswith("balance/") for path in paths)
    assert any("/left_basis/" in path for path in paths)
    assert_same_run(killed, whole, 200)
