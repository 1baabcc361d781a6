"""The balance of a run with experts and thresholds: saved, read by all that uses it, missed."""

import numpy as np
import pytest
from run_helpers import PLAIN, results, saved_arrays

from nag_jax.errors import UserError
from nag_jax.parameters import flatten
from nag_jax.runs import load_run
from nag_jax.training.checkpoints import CheckpointReader, Checkpoints
from nag_jax.training.loop import train
from nag_jax.training.start import parse_init_from

KEYS = PLAIN | {
    "model.feedforward.kind": "moe",
    "model.feedforward.num_experts": (4,),
    "model.feedforward.balance_rate": 0.1,
    "model.connection.kind": "nag",
    "model.skipping.kind": "threshold",
    "train.steps": 6,
    "checkpoint.every": 6,
    "checkpoint.keep_best": 0,
}


@pytest.fixture(autouse=True)
def compiled(place):
    with place.in_process():
        yield


def config_of(place, **changes):
    keys = {name.replace(".", "__"): value for name, value in KEYS.items()}
    return place.config(**keys | changes)


@pytest.mark.slow
def test_a_runs_balance_is_saved_and_read(place, tmp_path, capsys):
    """Loaded, the run scores as it did; a run from it says what becomes of the balance."""
    outcome = train(config_of(place), tmp_path / "run")
    balance = {
        path: x for path, x in saved_arrays(tmp_path / "run", 6).items() if path.startswith("bal")
    }
    bias = balance["balance/stage_0/blocks/feedforward/bias"]
    assert np.abs(bias).max() > 0.1
    for name in ("attention", "feedforward"):
        assert np.all(balance[f"balance/stage_0/blocks/skipping/{name}"] > 0)
    lines = [line for line in results(tmp_path / "run") if "train/loss" in line]
    assert all(line["train/feedforward_load_over_mean_max"] >= 1 for line in lines)
    # The same steps with evaluations between them end with the same balance.
    train(config_of(place, evaluation__every=2), tmp_path / "evaluated")
    for path, x in saved_arrays(tmp_path / "evaluated", 6).items():
        if path.startswith("balance"):
            np.testing.assert_array_equal(x, balance[path])

    run = load_run(tmp_path / "run")
    evaluation = run.evaluate_validation()
    for path, x in flatten(run.balance).items():
        np.testing.assert_array_equal(x, balance[f"balance/{path}"])
    assert evaluation.bits_per_byte == pytest.approx(outcome.evaluation.bits_per_byte, rel=1e-5)
    assert len(run.generate("a", max_tokens=3).tokens) <= 3
    assert run.loglikelihood([("a", " b")], progress=False)[0].log_likelihood < 0

    capsys.readouterr()
    for carry, words in ((("params",), True), (("params", "balance"), False)):
        asked = parse_init_from(str(tmp_path / "run"), carry)
        train(config_of(place, train__steps=2), tmp_path / "-".join(carry), asked)
        assert (
            "the balance (of routers, of skipping) starts anew" in capsys.readouterr().out
        ) == words


def test_a_missing_balance_is_named(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, {"params": {"w": np.ones(2)}, "balance": {}}, {})
    checkpoints.close()
    wanted = {"balance": {"stage_0": {"bias": np.zeros(2, np.float32)}}}
    with pytest.raises(UserError, match="balance/stage_0/bias"):
        CheckpointReader(tmp_path).restore(1, wanted)
