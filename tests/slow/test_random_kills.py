"""Runs killed at random moments of their lives, and in each phase of them, end as if they had not.

The moments are drawn over the measured length of an uninterrupted run and over that of its steps.
What each kill hit is printed (`pytest -s`).
"""

import json
import random
import signal
import time

import pytest
from run_helpers import assert_same_run, place_of_session, saved_steps

STEPS = 40
KEYS = {
    "train.steps": STEPS,
    "checkpoint.every": 4,
    "evaluation.every": 10,
    # Twelve megabytes of state, so that a save takes as long as some steps.
    "model.d_model": 128,
    "model.feedforward.hidden": 4096,
}
OPTIMISED = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
NO_CACHE = OPTIMISED | {"JAX_ENABLE_COMPILATION_CACHE": "0"}


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    return place_of_session(tmp_path_factory)


class Case:
    """A run of some accumulation, and the uninterrupted one it should end like."""

    def __init__(self, place, accumulation):
        self.place = place
        self.keys = KEYS | {"train.accumulation": accumulation}
        self.name = f"uninterrupted-{accumulation}"

    def start(self, workdir, environment=OPTIMISED):
        return self.place.start(workdir, self.keys, environment=environment)

    def uninterrupted(self):
        """Its folder. Compiled anew; a second one from the cache of programs equals it."""
        return self.place.once(self.name, self._run)

    def seconds(self):
        """How long it takes with its program in the cache: in all, and from its first step."""
        self.uninterrupted()
        again = self.place.once(f"{self.name}-again", self._run)
        assert_same_run(again, self.uninterrupted(), STEPS)
        return json.loads((again / "seconds.json").read_text())

    def _run(self, folder):
        began = time.perf_counter()
        run = self.start(folder)
        run.wait_for(lambda: run.said("Compiled"))
        compiled = time.perf_counter()
        done = run.end()
        assert done.returncode == 0, done.stderr
        ended = time.perf_counter()
        (folder / "seconds.json").write_text(json.dumps([ended - began, ended - compiled]))


def newest_step(workdir):
    return max(saved_steps(workdir), default=0)


def unfinished_save(workdir):
    return bool(list(workdir.glob("checkpoints/*.orbax-checkpoint-tmp")))


def phase(run, workdir):
    """What the run is doing."""
    if run.process.poll() is not None:
        return "ended"
    if not run.said("Compiling"):
        return "starting"
    if not run.said("Compiled"):
        return "compiling"
    return "saving" if unfinished_save(workdir) else "stepping"


def moments(seconds, of_life, of_steps, rng):
    """(name, the phase to hit if it must be a certain one, what to wait for before the kill)."""

    def after(words, delay):
        def wait(run, workdir):
            run.wait_for(lambda: run.said(words))
            time.sleep(delay)

        return wait

    # One in each equal part, so that few draws reach everywhere.
    for part in range(of_life):
        delay = seconds[0] * (part + rng.random()) / of_life
        yield f"random {delay:.2f} s", None, lambda run, workdir, delay=delay: time.sleep(delay)
    for part in range(of_steps):
        delay = seconds[1] * (part + rng.random()) / of_steps
        yield f"random {delay:.2f} s after compilation", None, after("Compiled", delay)
    into_compilation, step = 2 * rng.random(), rng.choice([8, 16, 24])

    def in_save(run, workdir):
        run.wait_for(lambda: newest_step(workdir) >= step)
        run.wait_for(lambda: unfinished_save(workdir))

    def between_saves(run, workdir):
        run.wait_for(lambda: newest_step(workdir) >= step)
        run.wait_for(lambda: not unfinished_save(workdir))

    yield "in compilation", "compiling", after("Compiling", into_compilation)
    yield "in a save", "saving", in_save
    yield "between saves", "stepping", between_saves


@pytest.mark.parametrize(
    ("number", "accumulation", "of_life", "of_steps"), [(signal.SIGKILL, 4, 1, 1)], ids=["SIGKILL"]
)
def test_kills(place, tmp_path, number, accumulation, of_life, of_steps):
    case = Case(place, accumulation)
    rng = random.Random(f"{number} {accumulation}")
    hit = []
    all_moments = moments(case.seconds(), of_life, of_steps, rng)
    for index, (name, wanted, reach) in enumerate(all_moments):
        workdir = tmp_path / str(index)
        run = case.start(workdir, NO_CACHE if wanted == "compiling" else OPTIMISED)
        reach(run, workdir)
        before, now = newest_step(workdir), phase(run, workdir)
        while wanted not in (None, now):  # it was over before it was seen: the next one will do
            reach(run, workdir)
            before, now = newest_step(workdir), phase(run, workdir)
        run.signal(number)
        hit.append(now)
        killed = run.end()
        left = unfinished_save(workdir)
        newest = newest_step(workdir)
        print(
            f"{signal.Signals(number).name}, accumulation {accumulation}, {name}: {hit[-1]}, "
            f"step {newest} saved, code {killed.returncode}",
            flush=True,
        )
        check_the_end(killed, number, hit[-1], newest)
        assert newest >= before

        resumed = case.start(workdir).end()
        assert resumed.returncode == 0, resumed.stderr
        assert ("Removed a half-written checkpoint" in resumed.stdout) == left
        if newest == STEPS:
            assert "This run is complete" in resumed.stdout
        elif newest:
            assert f"Going on from step {newest} of {STEPS}" in resumed.stdout
        assert_same_run(workdir, case.uninterrupted(), STEPS)
    assert {"compiling", "saving", "stepping"} <= set(hit)


def check_the_end(killed, number, phase, newest):
    """How the killed run ended, and what it said."""
    if phase == "ended":
        assert killed.returncode == 0 and newest == STEPS
    elif number == signal.SIGKILL:
        assert killed.returncode in (-number, 0)
        assert killed.returncode != 0 or newest == STEPS
    elif killed.returncode == -number:
        # Nobody listened yet, or all was done.
        assert phase == "starting" or newest == STEPS
    else:
        assert (killed.returncode, killed.stderr) == (0, "")
        if newest < STEPS:
            words = f"step {newest} is saved" if newest else "nothing has been saved yet"
            assert f"Stopped by SIGTERM after step {newest}; {words}" in killed.stdout
