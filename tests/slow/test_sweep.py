"""A sweep of small runs: trained, gone on with, failed in part, and compared."""

import csv
import json
import signal
import sys

import pytest
from run_helpers import PLAIN, Running, place_of_session, saved_steps

KEYS = PLAIN | {
    "train.steps": 20,
    "checkpoint.every": 10,
    "evaluation.every": 10,
    "train.log_every": 5,
}


@pytest.fixture
def sweep(tmp_path_factory, tmp_path):
    """(flags) -> the sweep's process; its folder is `tmp_path / "out"`."""
    place = place_of_session(tmp_path_factory)
    out = tmp_path / "out"

    def start(*flags, keys=KEYS):
        given = place.arguments(out, keys)[:-1]  # without the workdir
        command = ["-m", "nag_jax.sweep", f"--out={out}", *flags]
        if "--compare" not in flags:
            command += given
        return Running([sys.executable, *command], env=place.environment())

    start.out = out
    return start


def table(out):
    with (out / "runs.csv").open() as file:
        return list(csv.DictReader(file))


def test_trains_keeps_failures_goes_on_and_compares(sweep):
    grid = ("--grid=optimizer.kind=adamw,muon", "--grid=seed=0,1")
    done = sweep(*grid).end()
    assert (done.returncode, done.stderr) == (0, ""), done
    rows = table(sweep.out)
    assert [(row["optimizer.kind"], row["seed"]) for row in rows] == [
        ("adamw", "0"),
        ("adamw", "1"),
        ("muon", "0"),
        ("muon", "1"),
    ]
    assert all(row["step"] == "20" and not row["failure"] for row in rows)
    assert all(float(row["validation/bits_per_byte"]) > 0 for row in rows)

    # Another run beside them fails; those that are complete are not touched.
    folders = sorted((sweep.out / "runs").iterdir())
    before = [path.stat().st_mtime_ns for path in folders]
    done = sweep("--list=optimizer.kind=muon seed=0;optimizer.learning_rate=1e30").end()
    assert done.returncode == 1
    assert "failed: 1 of 2 runs, such as learning_rate=1e30: the loss" in done.stderr
    assert [path.stat().st_mtime_ns for path in folders] == before
    good, bad = table(sweep.out)
    assert not good["failure"] and "are not finite" in bad["failure"]

    done = sweep("--compare", "--at=tokens").end()
    assert done.returncode == 0, done
    assert "learning_rate=1e30 is left out" in done.stdout or "1 runs have no" in done.stdout
    assert "| optimizer.kind=muon | 2 |" in done.stdout
    for suffix in ("md", "csv", "png", "pdf"):
        assert (sweep.out / f"comparison.{suffix}").stat().st_size > 100


def test_what_is_wrong_is_said_before_anything_is_trained(sweep):
    done = sweep("--grid=optimizer.kind=muon,lion").end()
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: run kind=lion: optimizer.kind")
    done = sweep().end()
    assert (done.returncode, done.stderr.startswith("error: nothing varies")) == (2, True)
    assert not sweep.out.exists()
    done = sweep("--compare").end()
    assert (done.returncode, "holds no sweep" in done.stderr) == (2, True)


def test_a_stopped_sweep_goes_on(sweep):
    keys = KEYS | {"train.steps": 200}
    running = sweep("--grid=seed=0,1", keys=keys)
    first = sweep.out / "runs" / "seed=0"
    running.wait_for((first / "checkpoints" / "00000010").exists)
    running.signal(signal.SIGTERM)
    stopped = running.end()
    assert (stopped.returncode, stopped.stderr) == (130, "interrupted\n")
    step = saved_steps(first)[-1]
    assert 10 <= step < 200 and not (sweep.out / "runs" / "seed=1").exists()
    assert json.loads((sweep.out / "sweep.json").read_text())["runs"].keys() == {"seed=0", "seed=1"}
    done = sweep("--grid=seed=0,1", keys=keys).end()
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Going on from step {step}" in (sweep.out / "logs" / "seed=0.log").read_text()
    assert [row["step"] for row in table(sweep.out)] == ["200", "200"]
    other = sweep("--grid=seed=0,1", keys=KEYS).end()
    assert (other.returncode, "holds a sweep of" in other.stderr) == (2, True)
