"""The metrics file says each step once, whatever happened to the run that wrote it."""

import json
import math
import sys
import types

import pytest
from etils import epath

from nag_jax.errors import UserError
from nag_jax.training.errors import RunFailed
from nag_jax.training.metrics import MetricsWriter, read_metrics
from nag_jax.training.progress import Progress, measure_matmul_peak


def write(folder, steps, resume_step=None, **options):
    writer = MetricsWriter(epath.Path(folder), resume_step=resume_step, **options)
    for step in steps:
        writer.write(step, {"train/loss": 1 / step})
    writer.close()


def steps_of(folder):
    return [record["step"] for record in read_metrics(folder)]


def test_values_survive(tmp_path):
    writer = MetricsWriter(epath.Path(tmp_path), resume_step=None)
    writer.write(3, {"a/b": 0.1, "nan": math.nan, "up": math.inf, "down": -math.inf, "n": 4})
    (record,) = read_metrics(tmp_path)  # read while it is open
    writer.close()
    assert math.isnan(record.pop("nan"))
    assert record == {"step": 3, "a/b": 0.1, "up": math.inf, "down": -math.inf, "n": 4.0}
    line = (tmp_path / "metrics.jsonl").read_text()
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_resume_drops_the_steps_that_are_repeated(tmp_path):
    write(tmp_path, [10, 20, 30, 40])
    write(tmp_path, [30, 40, 50], resume_step=20)
    assert steps_of(tmp_path) == [10, 20, 30, 40, 50]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_fresh_start_drops_everything(tmp_path):
    write(tmp_path, [10, 20])
    write(tmp_path, [5])
    assert steps_of(tmp_path) == [5]


@pytest.mark.parametrize("torn", ['{"step": 30, "train/lo', "{", "\x00\x00\x00", '{"step": 30}'])
def test_torn_last_line_is_repaired(tmp_path, torn):
    write(tmp_path, [10, 20])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + torn)
    assert steps_of(path)[:2] == [10, 20]
    write(tmp_path, [30], resume_step=20)
    assert steps_of(path) == [10, 20, 30]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 30]


def test_nothing_to_read(tmp_path):
    with pytest.raises(UserError, match="no metrics at .*metrics.jsonl"):
        read_metrics(tmp_path)


def test_tensorboard(tmp_path):
    write(tmp_path, [1, 2], tensorboard=True)
    write(tmp_path, [2, 3], resume_step=1, tensorboard=True)
    first, second = sorted((tmp_path / "tensorboard").iterdir())
    for events in (first, second):
        assert "tfevents" in events.name and b"train/loss" in events.read_bytes()


def test_wandb_is_asked_for_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"wandb_project is 'p'.*nag-jax\[wandb\]"):
        write(tmp_path, [1], wandb_project="p")


def test_wandb_resumes_the_same_run(tmp_path, monkeypatch):
    calls, logged = [], []
    run = types.SimpleNamespace(
        log=lambda values, step: logged.append((step, values)), finish=lambda: None
    )
    fake = types.SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    write(tmp_path, [1], wandb_project="p", config={"seed": 1})
    write(tmp_path, [2], resume_step=1, wandb_project="p")
    assert calls[0]["project"] == "p" and calls[0]["config"] == {"seed": 1}
    assert calls[0]["id"] == calls[1]["id"]
    assert logged == [(1, {"train/loss": 1.0}), (2, {"train/loss": 0.5})]


def test_a_full_disk_ends_the_run_in_one_sentence(tmp_path, monkeypatch):
    writer = MetricsWriter(epath.Path(tmp_path), resume_step=None, tensorboard=True)
    writer.write(1, {"train/loss": 1.0})
    writer._file = epath.Path("/dev/full").open("w")
    with pytest.raises(RunFailed, match="metrics cannot be written in .*No space left on device"):
        writer.write(2, {"train/loss": 1.0})
    writer.close()
    assert steps_of(tmp_path) == [1]

    def full(self, *args):
        raise OSError(28, "No space left on device")

    writer = MetricsWriter(epath.Path(tmp_path), resume_step=1, tensorboard=True)
    monkeypatch.setattr("tensorboardX.event_file_writer.EventsWriter.write_event", full)
    monkeypatch.setattr("tensorboardX.event_file_writer.EventsWriter.flush", full)
    for call in (lambda: writer.write(2, {"train/loss": 1.0}), writer.flush):
        with pytest.raises(RunFailed, match="No space left"):
            call()
    writer.close()


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    write(tmp_path, [1], tensorboard=True, wandb_project="p")
    assert not list(tmp_path.iterdir())


def test_progress_rates_and_line(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("nag_jax.training.progress.time.perf_counter", lambda: clock[0])
    progress = Progress(30, flops_per_token=1e6, peak_flops=1e9)
    clock[0] += 50  # compilation is in no rate
    assert progress.update(10, tokens=1000, loss=3.0) == {}
    clock[0] += 4
    with progress.paused():
        clock[0] += 100
    rates = progress.update(20, tokens=800, loss=2.0)
    assert rates == {
        "throughput/tokens_per_second": 200.0,
        "throughput/model_flops_per_second": 2e8,
        "throughput/seconds_per_step": 0.4,
        "throughput/peak_share": 0.2,
    }
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "step 10/30 | loss 3.0000",
        "step 20/30 | loss 2.0000 | 0m04s left | 200 tokens/s | 200 MFLOP/s | 20.0% of matmul peak",
    ]


def test_matmul_peak_is_measured_once():
    peak = measure_matmul_peak("float32")
    assert 1e8 < peak < 1e16
    assert measure_matmul_peak("float32") == peak
