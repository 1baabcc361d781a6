"""The training loop in this process: what it saves, records, refuses to save, and trains on."""

import os
import re
import shutil
import signal
import types

import numpy as np
import pytest
from run_helpers import PLAIN, results, saved_arrays, saved_position, saved_steps

from nag_jax import train as binary
from nag_jax.data import pipeline
from nag_jax.errors import UserError
from nag_jax.training.loop import train
from nag_jax.training.metrics import read_metrics

STEPS = 20  # the same everywhere, so that most runs share one compiled program


@pytest.fixture(autouse=True)
def compiled(place):
    with place.in_process():
        yield


@pytest.fixture
def config(place):
    """Makes configs; "__" stands for a dot."""

    def make(**changes):
        plain = {name.replace(".", "__"): value for name, value in PLAIN.items()}
        changes = {"checkpoint__every": STEPS, "train__steps": STEPS} | changes
        return place.config(**plain, **changes)

    return make


def test_a_run_from_start_to_end(config, tmp_path, rows_seen, capsys):
    outcome = train(config(evaluation__every=8), tmp_path)
    assert outcome.step == STEPS and outcome.finished
    lines = results(tmp_path)
    trained = [line for line in lines if "train/loss" in line]
    # One step late, but each step once and under its own number.
    assert [line["step"] for line in trained] == list(range(1, STEPS + 1))
    assert all(line["train/finite"] == 1 for line in trained)
    evaluated = {line["step"]: line for line in lines if "validation/bits_per_byte" in line}
    assert list(evaluated) == [8, 16, 20]
    assert evaluated[20]["validation/bits_per_byte"] == outcome.evaluation.bits_per_byte
    assert saved_steps(tmp_path) == (STEPS,)
    assert saved_position(tmp_path, STEPS)["rows_consumed"] == len(rows_seen) == 8 * STEPS
    capsys.readouterr()

    # Started once more there is nothing to do, and nothing changes.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    again = train(config(evaluation__every=8), tmp_path)
    assert (
        again.finished and "This run is complete: all 20 steps are done" in capsys.readouterr()[0]
    )
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert before == after


def test_rows_and_numbers_do_not_depend_on_accumulation(config, tmp_path, rows_seen):
    train(config(), tmp_path / "one")
    one = dict(rows_seen)
    rows_seen.clear()
    train(config(train__accumulation=2, data__prefetch_rows=0), tmp_path / "two")
    assert one == rows_seen and len(one) == 8 * STEPS
    for left, right in zip(results(tmp_path / "one"), results(tmp_path / "two"), strict=True):
        assert left == pytest.approx(right, rel=1e-4, abs=1e-6)


def test_marked_steps_and_the_best_are_kept(config, tmp_path):
    keys = {"checkpoint__keep_steps": (5, 7), "checkpoint__keep_log_spaced": 1}
    keys |= {"checkpoint__every": 6, "checkpoint__keep_last": 1, "checkpoint__keep_best": 1}
    train(config(evaluation__every=6, **keys), tmp_path)
    measured = {
        line["step"]: line["validation/bits_per_byte"]
        for line in results(tmp_path)
        if "validation/bits_per_byte" in line
    }
    assert measured.keys() >= {6, 12, 18, 20}
    best = min(measured, key=measured.get)
    assert set(saved_steps(tmp_path)) == {1, 2, 4, 8, 16} | {5, 7} | {20, best}


def test_profiler_window(config, tmp_path, capsys):
    train(config(train__profile_start=4, train__profile_steps=2), tmp_path)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert f"Profile written to {tmp_path / 'profile'}." in capsys.readouterr().out


def test_without_validation_documents(config, tmp_path):
    outcome = train(config(data__validation_share=0.0, evaluation__every=5), tmp_path)
    assert outcome.finished and outcome.evaluation is None
    assert saved_steps(tmp_path) == (STEPS,)
    assert not any(name.startswith("validation") for line in results(tmp_path) for name in line)


def test_rows_come_in_a_new_order_in_the_next_epoch(place, config, tmp_path, rows_seen):
    for name in ("00.txt", "01.txt", "02.txt", "03.txt"):
        shutil.copy(place.folder / "corpus" / name, tmp_path)
    paths, workdir = (f"{tmp_path}/*.txt",), tmp_path / "run"
    config = config(data__source__paths=paths, data__validation_share=0.0)
    train(config, workdir)
    epochs = {line["step"]: line["epoch"] for line in results(workdir) if "epoch" in line}
    length = round(8 * STEPS / epochs[STEPS])
    assert epochs == {step: 8 * step / length for step in range(1, STEPS + 1)}
    assert 1 < epochs[STEPS] < 2
    first = [rows_seen[position] for position in range(length)]
    second = [rows_seen[position] for position in range(length, 8 * STEPS)]
    assert len(set(first)) == length
    assert set(second) <= set(first) and len(set(second)) == len(second)
    assert second != first[: len(second)]

    # Rows of other texts would be none of these.
    (tmp_path / "02.txt").write_text("changed")
    with pytest.raises(
        UserError, match="the corpus has changed since step 20 of .*run/checkpoints"
    ):
        train(config, workdir)


class StopAt:
    """Sends this process a signal while it reads the batch of a step."""

    def __init__(self, monkeypatch, step, number, times=1):
        stream_next = pipeline.TrainingStream.__next__
        batches = []

        def read(stream):
            batches.append(0)
            if len(batches) == step:
                for _ in range(times):
                    os.kill(os.getpid(), number)
            return stream_next(stream)

        monkeypatch.setattr(pipeline.TrainingStream, "__next__", read)


def test_a_signal_saves_after_the_step_at_hand(config, tmp_path, monkeypatch, capsys):
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    StopAt(monkeypatch, 6, signal.SIGTERM)
    outcome = train(config(train__log_every=4), tmp_path)
    assert (outcome.step, outcome.finished) == (6, False)
    assert saved_steps(tmp_path) == (6,)
    said = capsys.readouterr().out
    assert "Stopped by SIGTERM after step 6; step 6 is saved, and the same command goes on" in said
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers


def test_a_second_interrupt_ends_at_once(config, tmp_path, monkeypatch):
    StopAt(monkeypatch, 6, signal.SIGINT, times=2)
    with pytest.raises(KeyboardInterrupt):
        train(config(), tmp_path)
    assert saved_steps(tmp_path) == ()


def run_binary(config, workdir, init_from="", carry=("params",)):
    flags = types.SimpleNamespace(workdir=str(workdir), init_from=init_from, carry=list(carry))
    return binary.main(config, flags)


def test_parameters_that_are_not_finite_after_the_first_step(config, tmp_path, capsys):
    # Loss and gradient of this step are finite: only what it would lead to is not.
    config = config(optimizer__learning_rate=1e30, checkpoint__every=1)
    assert run_binary(config, tmp_path) == 1
    said = capsys.readouterr().err
    assert "parameters of step 1 are not finite" in said and "nothing has been saved yet" in said
    assert saved_steps(tmp_path) == ()


def test_numbers_that_are_not_finite(config, tmp_path, capsys):
    absurd = {"optimizer__learning_rate": 1e16, "checkpoint__every": 1, "checkpoint__keep_last": 99}
    assert run_binary(config(**absurd), tmp_path) == 1
    said = capsys.readouterr().err
    failed = int(re.search(r"parameters of step (\d+) are not finite", said)[1])
    assert said.count("\n") == 1 and said.startswith("failed: ")
    # The failed step was recorded but never saved.
    assert read_metrics(tmp_path)[-1]["train/finite"] == 0
    assert read_metrics(tmp_path)[-1]["step"] == failed
    steps = saved_steps(tmp_path)
    assert steps == tuple(range(1, failed)) != ()
    assert f"step {failed - 1} is saved" in said
    for step in steps:
        assert all(np.isfinite(x).all() for x in saved_arrays(tmp_path, step).values())

    # The other policy is a way on from there: such steps change nothing.
    assert run_binary(config(train__nan_policy="skip", **absurd), tmp_path) == 0
    assert "train.nan_policy: 'stop' -> 'skip'" in capsys.readouterr().out
    finite = {x["step"]: x["train/finite"] for x in results(tmp_path) if "train/finite" in x}
    assert finite == {step: float(step < failed) for step in range(1, STEPS + 1)}
    left, end = saved_arrays(tmp_path, failed - 1), saved_arrays(tmp_path, STEPS)
    assert all(left[path].tobytes() == end[path].tobytes() for path in left)
