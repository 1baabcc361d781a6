"""The training loop: from a config and a folder to a finished, stopped or failed run.

It owns the order of things (rows, step, metrics one step late, evaluation, checkpoint) and nothing
of how each is done.
"""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict
from rich.filesize import decimal

from nag_jax.analysis.flops import training_flops
from nag_jax.config import validate_devices
from nag_jax.data import pipeline, store
from nag_jax.evals.bits_per_byte import Evaluation, make_evaluator
from nag_jax.models.transformer import build_model
from nag_jax.optim import build_optimizer
from nag_jax.sharding import rules
from nag_jax.sharding.mesh import make_mesh
from nag_jax.training import start
from nag_jax.training.checkpoints import FOLDER_NAME, Checkpoints, absolute
from nag_jax.training.errors import RunFailed
from nag_jax.training.header import print_header
from nag_jax.training.metrics import MetricsWriter
from nag_jax.training.progress import Progress, measure_matmul_peak
from nag_jax.training.state import TrainState
from nag_jax.training.step import jit_train_step, train_step


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        step: Optimizer steps done.
        finished: Whether that is all of them.
        evaluation: The last evaluation, if one was made.
    """

    step: int
    finished: bool
    evaluation: Evaluation | None


class StopRequest:
    """Notes SIGTERM and SIGINT while a run is on; a second SIGINT interrupts at once."""

    def __init__(self):
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Installs the handlers, and puts the old ones back at the end."""

        def note(number, frame):
            if number == signal.SIGINT and self.signal is not None:
                raise KeyboardInterrupt
            self.signal = number

        old = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def train(
    config: ConfigDict, workdir: epath.PathLike, init_from: start.InitFrom | None = None
) -> Outcome:
    """Trains, or goes on where the folder's newest checkpoint stands.

    Args:
        config: Complete, validated config.
        workdir: Folder of the run; made if it is not there.
        init_from: Another run to start from, for a folder without checkpoints.

    Returns:
        How it ended: all steps done, or stopped by a signal after a save.

    Raises:
        UserError: The config, the data, the folder or a checkpoint cannot be used.
        RunFailed: The loss stopped being finite under `train.nan_policy="stop"`.
        SaveFailed: A checkpoint could not be written.
    """
    workdir = absolute(workdir)
    devices = jax.devices()
    validate_devices(config, len(devices))
    checkpoints = Checkpoints(
        workdir / FOLDER_NAME,
        **{
            name: config.checkpoint[name]
            for name in ("keep_last", "keep_best", "keep_steps", "keep_log_spaced")
        },
    )
    start.check_resume(checkpoints, config, init_from)
    prepared = store.prepare(config.data)
    for line in prepared.summary_lines():
        print(line)
    mesh = make_mesh(config.mesh, devices)
    model = build_model(config, prepared.tokenizer.vocab_size)
    optimizer, schedule = build_optimizer(config.optimizer, config.train.steps, model.infos)
    print_header(config, model, optimizer, mesh)
    state, position = start.start_state(
        checkpoints, config, model, optimizer, mesh, prepared, init_from
    )
    run = _Run(config, workdir, checkpoints, prepared, mesh, model, position)
    if run.step == config.train.steps:
        print(f"This run is complete: {run.step} of {config.train.steps} steps are done.")
        return Outcome(run.step, True, None)
    function = train_step(
        model,
        optimizer,
        schedule,
        accumulation=config.train.accumulation,
        taps=config.train.taps,
        skip_not_finite=config.train.nan_policy == "skip",
    )
    step_function = jit_train_step(function, model, optimizer, mesh)
    stop = StopRequest()
    with stop.listening(), jax.set_mesh(mesh):
        return run.go(state, step_function, stop)


class _Run:
    """One stretch of a run: what the steps between a start and an end share."""

    def __init__(self, config, workdir, checkpoints, prepared, mesh, model, position):
        self.config, self.workdir, self.checkpoints = config, workdir, checkpoints
        self.prepared, self.mesh, self.model = prepared, mesh, model
        self.step, self.rows = position.step, position.rows_consumed
        self.first_step = position.step
        self.evaluate = make_evaluator(model, mesh, config.evaluation.batch_size)
        self.evaluation: Evaluation | None = None
        self.documents = start.checkpoint_documents(config, prepared)

    def go(self, state: TrainState, step_function, stop: StopRequest) -> Outcome:
        config = self.config
        peak = config.train.peak_flops or measure_matmul_peak(config.model.compute_dtype)
        progress = Progress(
            config.train.steps,
            flops_per_token=training_flops(self.model.infos, config, self.model.vocab_size),
            peak_flops=peak * self.mesh.size,
        )
        writer = MetricsWriter(
            self.workdir,
            resume_step=self.first_step or None,
            tensorboard=config.metrics.tensorboard,
            wandb_project=config.metrics.wandb_project,
            config=config.to_dict(),
        )
        stream = pipeline.TrainingStream(
            self.prepared.train,
            config.seed,
            self.rows,
            config.train.batch_size,
            jax.process_index(),
            jax.process_count(),
            config.data.prefetch_rows,
        )
        sharding = rules.batch_sharding(self.mesh)
        late: tuple[int, dict[str, Any]] | None = None
        profiler = _Profiler(config, self.workdir / "profile", self.first_step)
        self.writer, self.progress = writer, progress
        try:
            with stream:
                batches = iter(stream)
                compiled = self._compile(step_function, state, sharding)
                while self.step < config.train.steps and not stop:
                    profiler.before(self.step)
                    batch = {
                        name: jax.make_array_from_process_local_data(sharding, x)
                        for name, x in next(batches).items()
                    }
                    state, metrics = compiled(state, batch)
                    self.step += 1
                    self.rows += config.train.batch_size
                    # The metrics of the step before are ready by now: reading them keeps the
                    # device busy with this one.
                    if late is not None:
                        self._report(*late)
                    late = (self.step, metrics)
                    profiler.after(self.step, state)
                    if self._is_milestone():
                        self._report(*late)
                        late = None
                        self._milestone(state)
                if late is not None:
                    self._report(*late)
                if stop and self.step > self.first_step:
                    self._save(state, None)
            self.checkpoints.close()
        finally:
            profiler.close()
            progress.close()
            writer.close()
        finished = self.step == config.train.steps
        if stop and not finished:
            name = signal.Signals(stop.signal).name
            saved = max(self.checkpoints.steps(), default=None)
            print(
                f"Stopped by {name} after step {self.step}; "
                + ("nothing was saved yet." if saved is None else f"step {saved} is saved.")
                + " The same command goes on from there."
            )
        return Outcome(self.step, finished, self.evaluation)

    def _compile(self, step_function, state: TrainState, sharding: jax.sharding.Sharding):
        """Compiles the step ahead of its first batch, and says what memory it will take."""
        print("Compiling the training step ...", flush=True)
        began = time.perf_counter()
        shape = (self.config.train.batch_size, self.config.data.row_length + 1)
        batch = {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            for name, dtype in (("tokens", np.int32), ("segment_ids", np.int32), ("valid", bool))
        }
        compiled = step_function.lower(state, batch).compile()
        memory = compiled.memory_analysis()
        size = (
            ""
            if memory is None
            else (
                f"; state {decimal(memory.argument_size_in_bytes)} and temporaries "
                f"{decimal(memory.temp_size_in_bytes)} per device"
            )
        )
        print(f"Compiled in {time.perf_counter() - began:.1f} s{size}.", flush=True)
        return compiled

    def _is_milestone(self) -> bool:
        config, step = self.config, self.step
        return (
            step == config.train.steps
            or step % config.evaluation.every == 0
            or step % config.checkpoint.every == 0
            or self.checkpoints.is_marked(step)
        )

    def _milestone(self, state: TrainState) -> None:
        """Evaluates and saves, as the config asks at this step."""
        config, step = self.config, self.step
        last = step == config.train.steps
        metric = None
        with self.progress.paused():
            evaluates = bool(self.prepared.validation.document_names)
            if evaluates and (last or step % config.evaluation.every == 0):
                self.evaluation = self.evaluate(state.params, self.prepared.validation, step)
                metric = self.evaluation.bits_per_byte
                self.writer.write(step, self.evaluation.metrics())
                self.progress.print(
                    f"step {step}: validation {metric:.4f} bits per byte, "
                    f"{self.evaluation.loss:.4f} nats per token"
                )
            if last or step % config.checkpoint.every == 0 or self.checkpoints.is_marked(step):
                self._save(state, metric)

    def _save(self, state: TrainState, metric: float | None) -> None:
        began = time.perf_counter()
        position = start.Position(self.step, self.rows)
        self.checkpoints.save(
            self.step,
            {"params": state.params, "opt_state": state.opt_state, "balance": state.balance},
            self.documents | {start.POSITION_FILE: position.to_json(self.prepared.fingerprint)},
            metric,
        )
        self.writer.write(self.step, {"checkpoint/stall_seconds": time.perf_counter() - began})
        self.writer.flush()

    def _report(self, step: int, metrics: dict[str, Any]) -> None:
        """Logs a finished step, and refuses to go on from one that is not finite."""
        config = self.config
        metrics = jax.device_get(metrics)
        self.checkpoints.check()
        rates = self.progress.update(
            step, tokens=int(metrics["tokens"]), loss=float(metrics["loss"])
        )
        if step % config.train.log_every == 0 or step == config.train.steps:
            scalars = {f"train/{name}": float(x) for name, x in metrics.items() if name != "taps"}
            rows = self.rows - (self.step - step) * config.train.batch_size
            scalars["epoch"] = rows / len(self.prepared.train)
            for name, values in metrics["taps"].items():
                scalars[f"train/taps/{name}_mean"] = float(np.mean(values))
            if "gate" in metrics["taps"]:
                scalars["train/taps/gate_min"] = float(np.min(metrics["taps"]["gate"]))
            self.writer.write(step, scalars | rates)
        if metrics["finite"] == 0 and config.train.nan_policy == "stop":
            with contextlib.suppress(Exception):
                self.checkpoints.wait()
            good = max(self.checkpoints.steps(), default=None)
            raise RunFailed(
                f"the loss or gradient of step {step} is not finite (loss {metrics['loss']}); "
                + ("there is no checkpoint yet" if good is None else f"step {good} is saved")
                + ", and the same command goes on from there. Lower optimizer.learning_rate, or "
                'set train.nan_policy="skip" to leave such steps out.'
            )


class _Profiler:
    """A profiler trace of a few steps, for TensorBoard or Perfetto."""

    def __init__(self, config: ConfigDict, folder: epath.Path, first_step: int):
        self.folder = folder
        begin = config.train.profile_start
        self.begin = max(begin, first_step) if begin >= 0 else None
        self.end = None if self.begin is None else self.begin + config.train.profile_steps
        self.running = False

    def before(self, step: int) -> None:
        """Starts the trace if its first step comes next."""
        if step == self.begin:
            jax.profiler.start_trace(str(self.folder))
            self.running = True

    def after(self, step: int, state: Any) -> None:
        """Ends the trace when its last step is done."""
        if self.running and step == self.end:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Ends a trace that is still running."""
        if self.running:
            jax.profiler.stop_trace()
            self.running = False
            print(f"Profile written to {self.folder}.")
