"""A new run from another run's weights: what is carried, what is told, and what is refused."""

import numpy as np
import pytest
from run_helpers import PLAIN, results, saved_arrays, saved_position, saved_steps

from nag_jax.errors import UserError
from nag_jax.training import start
from nag_jax.training.loop import train
from nag_jax.training.tree_paths import flatten

STEPS = 20
KEYS = PLAIN | {
    "train.steps": STEPS,
    "checkpoint.every": 10,
    "optimizer.schedule.warmup_steps": 4,
}


@pytest.fixture(autouse=True)
def compiled(place):
    with place.in_process():
        yield


@pytest.fixture
def config(place):
    """Makes configs; "__" stands for a dot."""

    def make(**changes):
        return place.config(**{name.replace(".", "__"): x for name, x in KEYS.items()} | changes)

    return make


@pytest.fixture
def source(place, config):
    """A finished run with checkpoints of steps 10 and 20."""
    return place.once("source_of_branches", lambda folder: train(config(), folder))


class Started(Exception):
    """Ends a run where its first step would be compiled."""


@pytest.fixture
def begin(monkeypatch, tmp_path):
    """Starts a run and returns the state and position of its start."""
    original = start.start_state

    def stop(*args):
        raise Started(*original(*args))

    def run(config, init_from, *carry):
        monkeypatch.setattr(start, "start_state", stop)
        asked = start.parse_init_from(str(init_from), carry or ("params",))
        with pytest.raises(Started) as started:
            train(config, tmp_path / "branch", asked)
        state, position = started.value.args
        arrays = {
            f"{item}/{path}": np.asarray(leaf)
            for item in ("params", "opt_state")
            for path, leaf in flatten(getattr(state, item)).items()
        }
        assert int(state.step) == position.step == 0
        return arrays, position.rows_consumed

    return run


def same(left, right, prefix):
    paths = [path for path in right if path.startswith(prefix)]
    assert paths
    return all(left[path].tobytes() == right[path].tobytes() for path in paths)


def test_parameters_only(config, source, begin, capsys):
    arrays, rows = begin(config(), source)
    saved = saved_arrays(source, STEPS)
    assert same(arrays, saved, "params/")
    moments = [path for path in arrays if "/mu/" in path or "/nu/" in path]
    assert moments and not any(arrays[path].any() for path in moments)
    assert rows == 0
    said = capsys.readouterr().out
    assert f"Starting from step {STEPS} of {source / 'checkpoints'}, carrying params:" in said
    assert "new, as initialised: none" in said and "dropped, without a place here: none" in said


def test_a_step_of_the_past(config, source, begin):
    saved = saved_arrays(source, 10)
    arrays, _ = begin(config(), f"{source}@10")
    assert same(arrays, saved, "params/")
    arrays, _ = begin(config(), source / "checkpoints" / "00000010")
    assert same(arrays, saved, "params/")


def test_optimizer_is_carried_but_its_schedule_starts_anew(config, source, begin, capsys):
    arrays, rows = begin(config(optimizer__learning_rate=1e-3), source, "params", "opt")
    saved = saved_arrays(source, STEPS)
    assert arrays.keys() == saved.keys()
    changed = [path for path in arrays if arrays[path].tobytes() != saved[path].tobytes()]
    # Of the whole state only the schedules' counts are not the saved ones.
    assert changed and all(path.endswith("/count") for path in changed)
    assert all(saved[path] == STEPS and arrays[path] == 0 for path in changed)
    kept = [path for path in arrays if path.endswith("/count") and path not in changed]
    assert kept and all(arrays[path] == STEPS for path in kept)  # Adam's own
    assert rows == 0
    assert "arrays of the optimizer's state" in capsys.readouterr().out


def test_the_new_run_trains_on_with_the_rows_that_come_next(
    config, source, tmp_path, rows_seen, capsys
):
    asked = start.parse_init_from(str(source), ("params", "opt", "data"))
    train(config(optimizer__learning_rate=1e-3), tmp_path, asked)
    assert list(rows_seen) == list(range(8 * STEPS, 16 * STEPS))
    assert saved_position(tmp_path, STEPS)["rows_consumed"] == 16 * STEPS
    lines = [line for line in results(tmp_path) if "train/loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[0]["train/learning_rate"] == pytest.approx(1e-3 / 4)  # warm-up of 4 steps
    before = [line for line in results(source) if "train/loss" in line]
    assert lines[0]["epoch"] > before[-1]["epoch"]
    # It starts where the other ended, not at the loss of fresh parameters.
    assert abs(lines[0]["train/loss"] - before[-1]["train/loss"]) < 0.3
    assert before[0]["train/loss"] - lines[0]["train/loss"] > 0.5


def test_another_size_of_model(config, source, begin, capsys):
    arrays, _ = begin(config(model__feedforward__hidden=48), source, "params", "opt")
    saved = saved_arrays(source, STEPS)
    told = dict(
        line.strip().split(": ", 1)
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  ")
    )
    new = [path for path in arrays if arrays[path].shape != saved[path].shape]
    parameters = [path for path in new if path.startswith("params/")]
    assert parameters and all("feedforward" in path for path in parameters)
    for words in ("new, as initialised", "dropped, without a place here"):
        listed = told[words].split(", ")
        assert listed[:-1] == parameters
        assert listed[-1] == f"{len(new) - len(parameters)} arrays of the optimizer's state"
    kept = [path for path in arrays if path.startswith("params/") and path not in new]
    assert told["kept"].split(", ")[:-1] == kept
    assert all(arrays[path].tobytes() == saved[path].tobytes() for path in kept)


def test_another_optimizer(config, source, begin):
    arrays, _ = begin(config(optimizer__kind="muon"), source, "params", "opt")
    assert same(arrays, saved_arrays(source, STEPS), "params/")
    assert all(np.isfinite(x).all() for x in arrays.values())


def test_another_tokenizer_is_told(config, source, begin, capsys):
    begin(config(), source)
    assert "another tokenizer" not in capsys.readouterr().out
    begin(config(data__tokenizer__kind="bpe", data__tokenizer__vocab_size=300), source)
    assert "NOTE: that run had another tokenizer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "init_from", "carry", "words"),
    [
        ({}, "{source}@15", "params", "no checkpoint of step 15 in .*checkpoints .10, 20."),
        ({}, "{source}@last", "params", "after @ comes a step"),
        ({}, "{source}/nowhere", "params", "no such file or folder"),
        ({}, "{source}", "params,momentum", "may add opt, balance, data"),
        ({}, "{source}", "opt", "must hold params"),
        ({}, "", "params,opt", "--init_from, which is not given"),
        ({"seed": 1}, "{source}", "params,data", "which its seed 0 decides, but seed=1"),
        ({"data__row_length": 8}, "{source}", "params,data", "the corpus has changed"),
        (
            {"model__d_model": 24, "model__feedforward__hidden": 80},
            "{source}",
            "params",
            "no parameter of step 20 of .* fits this config's model",
        ),
    ],
)
def test_refusals(config, source, tmp_path, changes, init_from, carry, words):
    with pytest.raises(UserError, match=words):
        asked = start.parse_init_from(init_from.format(source=source), carry.split(","))
        train(config(**changes), tmp_path / "branch", asked)
    assert saved_steps(tmp_path / "branch") == ()


def test_an_at_sign_in_a_folder_is_not_a_step():
    assert start.parse_init_from("me@home/run", ("params",)).path == "me@home/run"
    assert start.parse_init_from("me@home/run@7", ("params",)).step == 7


def test_the_same_command_goes_on(place, source, tmp_path):
    """A requeued job starts again with the flags it had."""
    # The real binary, since nothing else here reads these flags.
    flags = (f"--init_from={source}", "--carry=params,opt")
    done = place.run(source, KEYS, *flags)
    assert done.returncode == 0, done.stderr
    assert "Going on from step" in done.stdout and "Starting from" not in done.stdout


@pytest.mark.slow
def test_gains_stay_warm(config, tmp_path):
    """The warm-up of gains goes on where the weights were, or a new run would damage them."""
    changes = {
        "model__connection__kind": "nag",
        "model__connection__alpha_warmup_steps": 30,
        "train__steps": 10,
    }
    old = train(config(**changes), tmp_path / "old")
    asked = start.parse_init_from(str(tmp_path / "old"), ("params",))
    still = {"optimizer__learning_rate": 0.0, "checkpoint__every": 1, "train__steps": 5}
    new = train(config(**changes | still), tmp_path / "new", asked)
    ages = [
        saved_position(tmp_path / name, step)["age"] for name, step in (("old", 10), ("new", 5))
    ]
    assert ages == [10, 15]
    # The same weights at gains warmed 16/30 instead of 11/30; started anew it would be 6/30.
    ratio = np.asarray(new.evaluation.taps["gain"]) / np.asarray(old.evaluation.taps["gain"])
    np.testing.assert_allclose(ratio, 16 / 11, rtol=0.05)
