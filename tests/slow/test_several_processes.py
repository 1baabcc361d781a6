"""Jobs of two and four processes: as one process trains, stopped, killed and resumed on others."""

import re
import resource
import signal
import time

import pytest
from process_helpers import DEVICES, start_job
from run_helpers import assert_same_run, place_of_session, results, saved_position, saved_steps

# Long enough to be killed in.
KEYS = {
    "checkpoint.keep_best": 0,
    "model.attention.num_heads": 4,
    "model.attention.num_kv_heads": 4,
    "train.batch_size": 8,
    "train.steps": 60,
    "checkpoint.every": 20,
    "evaluation.every": 30,
}
LONG = KEYS | {"train.steps": 20_000, "checkpoint.every": 50, "evaluation.every": 20_000}
DIED = re.compile(
    r"process \d: failed: (another of the \d processes of this job has died or cannot be reached "
    r"\(.*\); (step \d+ is saved, and the same command goes on from there|nothing has been saved "
    r"yet): start the same command again on all processes|ended, as another process of this job "
    r"did \(process \d: failed: another of .*\))\n$",
    re.DOTALL,
)


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    return place_of_session(tmp_path_factory)


def reference(place):
    """One process with four devices, from start to end."""

    def run(folder):
        done = place.run(folder, KEYS, environment={"XLA_FLAGS": DEVICES.format(4)})
        assert done.returncode == 0, done.stderr

    return place.once("alone-on-four-devices", run)


def finish(job):
    ended = job.end()
    # XLA warns of a resharding on some meshes.
    said = ["\n".join(x for x in run.stderr.splitlines() if "[SPMD]" not in x) for run in ended]
    assert [(run.returncode, text) for run, text in zip(ended, said, strict=True)] == [
        (0, "")
    ] * len(ended)
    assert all(run.stdout == "" for run in ended[1:])
    return ended[0].stdout


def assert_alike(workdir, other):
    for left, right in zip(results(workdir), results(other), strict=True):
        assert left == pytest.approx(right, rel=1e-4, abs=1e-6)
    assert saved_steps(workdir) == saved_steps(other)
    step = saved_steps(other)[-1]
    assert saved_position(workdir, step) == saved_position(other, step)


@pytest.mark.parametrize(
    ("count", "devices", "mesh"),
    [
        # Here the tensor axis spans processes: both read every row.
        (2, 2, {"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 4}),
        (4, 1, {"mesh.data": 2, "mesh.fsdp": 2}),
    ],
)
def test_processes_train_as_one(place, tmp_path, count, devices, mesh):
    said = finish(start_job(place, tmp_path, KEYS | mesh, count, devices=devices))
    assert "4 x cpu" in said
    assert_alike(tmp_path, reference(place))


@pytest.mark.parametrize(("before", "after"), [((4, 1), (1, 4)), ((1, 2), (2, 2))])
def test_resume_with_another_number_of_processes(place, tmp_path, before, after):
    """Steps to 20, then the rest on others; the schedule is that of the whole run."""
    job = start_job(place, tmp_path, KEYS, before[0], devices=before[1])
    job.runs[0].wait_for((tmp_path / "checkpoints" / "00000020").exists)
    job.runs[-1].signal(signal.SIGTERM)
    stopped = finish(job)
    step = saved_steps(tmp_path)[-1]
    assert f"after step {step}; step {step} is saved" in stopped
    said = finish(start_job(place, tmp_path, KEYS, after[0], devices=after[1]))
    assert f"Going on from step {step} of 60" in said
    for left, right in zip(results(tmp_path), results(reference(place)), strict=True):
        assert left == pytest.approx(right, rel=1e-4, abs=1e-6)


def test_a_signal_to_one_stops_all_and_they_resume_exactly(place, tmp_path):
    whole = place.once("two-processes", lambda folder: finish(start_job(place, folder, KEYS, 2)))
    job = start_job(place, tmp_path, KEYS, 2)
    job.runs[0].wait_for((tmp_path / "checkpoints" / "00000020").exists)
    job.runs[1].signal(signal.SIGTERM)
    said = finish(job)
    step = saved_steps(tmp_path)[-1]
    assert 20 < step < 60
    assert f"Stopped by SIGTERM after step {step}; step {step} is saved" in said
    finish(start_job(place, tmp_path, KEYS, 2))
    assert_same_run(tmp_path, whole, 60)


@pytest.mark.parametrize(("count", "killed"), [(2, 0), (4, 1)])
def test_a_killed_process_ends_all(place, tmp_path, count, killed):
    job = start_job(place, tmp_path, LONG, count)
    job.runs[0].wait_for((tmp_path / "checkpoints" / "00000050").exists)
    began = time.monotonic()
    job.runs[killed].signal(signal.SIGKILL)
    ended = job.end()
    assert time.monotonic() - began < 60
    for process, run in enumerate(ended):
        if process != killed:
            assert run.returncode not in (0, None)
            assert DIED.search(run.stderr), run.stderr
    newest = saved_steps(tmp_path)[-1]
    again = start_job(place, tmp_path, LONG, count)
    again.runs[0].wait_for(lambda: again.runs[0].said(f"Going on from step {newest} of"))
    again.runs[0].wait_for(lambda: again.runs[0].said("| loss"))
    again.runs[0].signal(signal.SIGTERM)
    assert "Stopped by SIGTERM" in finish(again)


def test_a_stopped_process_is_noticed(place, tmp_path):
    """Nothing tells the others of a machine that hangs but the heartbeats that do not come."""
    job = start_job(place, tmp_path, LONG, 2)
    job.runs[0].wait_for((tmp_path / "checkpoints" / "00000050").exists)
    began = time.monotonic()
    job.runs[1].signal(signal.SIGSTOP)
    ended = job.runs[0].end()
    assert time.monotonic() - began < 60
    assert ended.returncode == 1 and DIED.search(ended.stderr), ended.stderr
    job.runs[1].signal(signal.SIGKILL)
    job.runs[1].end()


def test_a_save_that_fails_on_one_process_ends_all(place, tmp_path):
    job = start_job(place, tmp_path, LONG, 2)
    job.runs[0].wait_for((tmp_path / "checkpoints" / "00000050").exists)
    resource.prlimit(job.runs[1].process.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
    began = time.monotonic()
    ended = job.end()
    assert time.monotonic() - began < 60
    assert [run.returncode for run in ended] == [1, 1]
    assert "process 1: failed: saving the checkpoint of step" in ended[1].stderr
    assert "File too large" in ended[0].stderr and ended[0].stderr.count("\n") == 1
    assert saved_steps(tmp_path)[0] == 50
