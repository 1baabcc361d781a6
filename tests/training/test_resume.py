"""A run that was killed, moved or damaged ends as if nothing had happened, or says why not."""

import json
import os
import pathlib
import shutil
import signal
import time

import pytest
from run_helpers import (
    PLAIN,
    RecordingStream,
    assert_same_run,
    results,
    saved_steps,
)

from nag_jax.data import store
from nag_jax.errors import UserError
from nag_jax.training.loop import train

STEPS = 200  # two seconds of steps: time enough to be killed in
KEYS = {
    "checkpoint.keep_best": 0,  # else every save is evaluated, and lines depend on when it saves
    "train.steps": STEPS,
    "checkpoint.every": 20,
    "evaluation.every": 50,
}


def dunder(keys):
    return {name.replace(".", "__"): value for name, value in keys.items()}


def reference(place, accumulation=1):
    """A run from start to end; every other run of these keys should end like it."""

    def run(folder):
        done = place.run(folder, KEYS | {"train.accumulation": accumulation})
        assert done.returncode == 0, done.stderr

    return place.once(f"reference-{accumulation}", run)


@pytest.fixture
def finished(place, tmp_path):
    """A copy of the finished run, to be damaged."""
    return pathlib.Path(shutil.copytree(reference(place), tmp_path / "run"))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("number", "accumulation", "delay"),
    [(signal.SIGKILL, 1, 0.31), pytest.param(signal.SIGTERM, 4, 0.17, marks=pytest.mark.slow)],
)
def test_a_killed_run_ends_as_if_it_had_not_been(place, tmp_path, number, accumulation, delay):
    keys = KEYS | {"train.accumulation": accumulation}
    run = place.start(tmp_path, keys)
    run.wait_for((tmp_path / "checkpoints" / "00000020").exists)
    time.sleep(delay)
    run.signal(number)
    killed = run.end()
    newest = saved_steps(tmp_path)[-1]
    assert 20 <= newest < STEPS
    if number == signal.SIGTERM:
        assert (killed.returncode, killed.stderr) == (0, "")
        assert f"Stopped by SIGTERM after step {newest}; step {newest} is saved" in killed.stdout
    else:
        assert killed.returncode == -signal.SIGKILL

    resumed = place.run(tmp_path, keys)
    assert resumed.returncode == 0, resumed.stderr
    assert f"Going on from step {newest} of {STEPS}" in resumed.stdout
    assert "Changed since" not in resumed.stdout
    assert_same_run(tmp_path, reference(place, accumulation), STEPS)


def truncate(step):
    largest = max((step / "params").rglob("*"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def half_write(step):
    (step / "manifest.json").unlink()


def flip_a_bit_of_the_config(step):
    content = bytearray((step / "config.json").read_bytes())
    content[20] ^= 1
    (step / "config.json").write_bytes(bytes(content))


@pytest.mark.parametrize(
    "damage", [pytest.param(truncate, marks=pytest.mark.slow), half_write, flip_a_bit_of_the_config]
)
def test_a_damaged_newest_checkpoint_is_passed_over(place, finished, damage, capsys):
    assert saved_steps(finished)[-2:] == (180, STEPS)
    damage(finished / "checkpoints" / f"{STEPS:08d}")
    with place.in_process():
        assert train(place.config(**dunder(KEYS)), finished).finished
    said = capsys.readouterr().out
    assert said.count(f"Passed over a damaged checkpoint, step {STEPS}: ") == 1
    assert f"Going on from step 180 of {STEPS}" in said
    assert_same_run(finished, reference(place), STEPS)


def test_with_every_checkpoint_damaged_nothing_is_lost(place, finished):
    for step in saved_steps(finished):
        flip_a_bit_of_the_config(finished / "checkpoints" / f"{step:08d}")
    before = contents(finished)
    done = place.run(finished, KEYS)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no checkpoint in ") and done.stderr.count("\n") == 1
    assert "config.json has changed since it was written" in done.stderr
    assert contents(finished) == before


def test_another_config_is_refused_with_the_difference(place, finished):
    before = contents(finished)
    changes = {"optimizer.learning_rate": 1e-3, "model.d_model": 64, "train.accumulation": 2}
    with pytest.raises(UserError) as refused:
        train(place.config(**dunder(KEYS | changes)), finished)
    sentence = str(refused.value)
    assert "optimizer.learning_rate: 0.003 -> 0.001" in sentence
    assert "model.d_model: 32 -> 64" in sentence
    assert "accumulation" not in sentence and "--init_from" in sentence
    assert contents(finished) == before


def test_one_run_at_a_time_in_a_folder(place, tmp_path):
    first = place.start(tmp_path, KEYS)
    first.wait_for(lambda: first.said("Compiling"))
    first.signal(signal.SIGSTOP)  # it keeps the folder
    second = place.run(tmp_path, KEYS)
    assert second.returncode == 2
    assert second.stderr.startswith("error: another process is training in ")
    assert second.stderr.count("\n") == 1
    # Asked to stop before its first step, the run has nothing to save.
    first.signal(signal.SIGTERM)
    first.signal(signal.SIGCONT)
    stopped = first.end()
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert "after step 0; nothing has been saved yet" in stopped.stdout
    assert saved_steps(tmp_path) == ()


@pytest.mark.slow
def test_half_the_devices_and_another_accumulation(place, tmp_path):
    keys = PLAIN | {"train.steps": 6, "checkpoint.every": 3}

    def run(folder, devices, rows, **changes):
        done = place.run(
            folder,
            keys | changes,
            program=(str(pathlib.Path(__file__).with_name("recorded_train.py")),),
            environment={
                "ROWS": str(tmp_path / rows),
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            },
        )
        assert done.returncode == 0, done.stderr
        seen = json.loads((tmp_path / rows).read_text())
        return done.stdout, {int(position): row for position, row in seen.items()}

    _, on_eight = run(tmp_path / "eight", 8, "eight.json")
    shutil.copytree(tmp_path / "eight", tmp_path / "four")
    shutil.rmtree(tmp_path / "four" / "checkpoints" / "00000006")
    said, on_four = run(tmp_path / "four", 4, "four.json", **{"train.accumulation": 2})
    assert "Going on from step 3 of 6" in said
    assert "train.accumulation: 1 -> 2; devices: data 8 -> data 4." in said

    # The rows are what the stream of a lone process gives, whatever the devices.
    config = place.config(**dunder(keys))
    rows = store.prepare(config.data, progress=False).train
    with RecordingStream(rows, config.seed, 0, 8) as stream:
        stream.seen = alone = {}
        for _ in range(6):
            next(stream)
    assert on_eight == alone
    assert on_four == {position: row for position, row in alone.items() if position >= 8 * 3}
    for left, right in zip(results(tmp_path / "eight"), results(tmp_path / "four"), strict=True):
        assert left == pytest.approx(right, rel=1e-4, abs=1e-6)
