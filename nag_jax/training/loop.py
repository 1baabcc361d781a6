"""The training loop: from a config and a folder to a finished, stopped or failed run.

It owns the order of things (rows, step, metrics one step late, evaluation, checkpoint) and nothing
of how each is done. Every process of a run goes through it alike.
"""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict
from rich.filesize import decimal

from nag_jax import contracts
from nag_jax.analysis.flops import training_flops
from nag_jax.config import validate_devices
from nag_jax.data import pipeline, store
from nag_jax.dotted import flatten
from nag_jax.evals.bits_per_byte import Evaluation, make_evaluator
from nag_jax.models.transformer import LanguageModel, build_model
from nag_jax.optim import build_optimizer
from nag_jax.sharding import rules
from nag_jax.sharding.mesh import make_mesh
from nag_jax.training import processes, start
from nag_jax.training.batches import local_rows, place_batch
from nag_jax.training.checkpoints import (
    FOLDER_NAME,
    AgreedReader,
    Checkpoints,
    SaveFailed,
    absolute,
)
from nag_jax.training.errors import RunFailed
from nag_jax.training.header import implementations, print_implementations, print_model
from nag_jax.training.metrics import MetricsWriter
from nag_jax.training.progress import Progress, measure_matmul_peak
from nag_jax.training.state import TrainState
from nag_jax.training.step import configured_step, jit_train_step
from nag_jax.training.stop import StopRequest
from nag_jax.training.workdir import only_run, require_possible, require_shared


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


def train(
    config: ConfigDict, workdir: epath.PathLike, init_from: start.InitFrom | None = None
) -> Outcome:
    """Trains, or goes on where the folder's newest checkpoint stands.

    To be called on every process alike.

    Args:
        config: Complete, validated config.
        workdir: Folder of the run; made if it is not there.
        init_from: Another run to start from, for a folder without checkpoints.

    Returns:
        How it ended: all steps done, or stopped by a signal after a save.

    Raises:
        UserError: The config, the data, the folder or a checkpoint cannot be used, or the model is
            not causal.
        RunFailed: The loss stopped being finite under `train.nan_policy="stop"`, or the metrics
            could not be written.
        SaveFailed: A checkpoint could not be written.
    """
    workdir = absolute(workdir)
    devices = jax.devices()
    validate_devices(config, len(devices))
    implementations(config)  # raises where one that the config insists on cannot serve
    _require_same_everywhere(config, init_from)
    # All that can be refused is refused before the folder is touched.
    processes.agreed(lambda: require_possible(workdir))
    # What is damaged is told when the folder is opened to go on from it.
    reader = AgreedReader(workdir / FOLDER_NAME, say=lambda text: None)
    start.check_start(reader, config, init_from)
    # One after the other, so that a shared cache folder is filled once.
    first = processes.index() == 0
    prepared = processes.first_before_others(lambda: store.prepare(config.data, progress=first))
    processes.require_same("the corpus", {"its fingerprint": prepared.fingerprint})
    start.check_rows(reader, config, init_from, prepared)
    for line in prepared.summary_lines():
        print(line)
    mesh = make_mesh(config.mesh, devices)
    model = build_model(config, prepared.tokenizer.vocab_size)
    optimizer, schedule = build_optimizer(config.optimizer, config.train.steps, model.infos)
    print_model(config, model, mesh, optimizer)
    print_implementations(config)
    with contextlib.ExitStack() as stack:
        processes.from_first(lambda: stack.enter_context(only_run(workdir)))
        keep = ("keep_last", "keep_best", "keep_steps", "keep_log_spaced")
        checkpoints = Checkpoints(
            workdir / FOLDER_NAME, **{name: config.checkpoint[name] for name in keep}
        )
        require_shared(workdir / FOLDER_NAME)
        state, position = start.start_state(
            checkpoints, config, model, optimizer, mesh, prepared, init_from
        )
        if position.step == config.train.steps:
            print(f"This run is complete: all {position.step} steps are done.")
            return Outcome(position.step, True, None)
        _probe(config, model, state, mesh)
        function = configured_step(config, model, optimizer, schedule)
        stretch = _Stretch(config, workdir, checkpoints, prepared, mesh, model, position)
        with stretch.stop.listening(), jax.set_mesh(mesh):
            return stretch.run(state, jit_train_step(function, model, optimizer, mesh))


def _require_same_everywhere(config: ConfigDict, init_from: start.InitFrom | None) -> None:
    """Refuses processes that were not started with the same command and the same packages."""
    values = flatten(config.to_dict())
    for name in ("cache_folder", "workers"):  # a machine's own affair
        values.pop(f"data.{name}")
    values |= {"--init_from": init_from, "the version of jax": jax.__version__}
    processes.require_same("config and flags", values)


def _probe(config: ConfigDict, model: LanguageModel, state: TrainState, mesh: Mesh) -> None:
    """Refuses to train a model whose outputs depend on what they must not see."""
    began = time.perf_counter()
    if contracts.probe(model, state.params, mesh, config.data.row_length):
        seconds = time.perf_counter() - began
        print(f"Probed causality and document isolation in {seconds:.1f} s.", flush=True)


class _Stretch:
    """One stretch of a run, from a start to an end: what its steps share."""

    def __init__(
        self,
        config: ConfigDict,
        workdir: epath.Path,
        checkpoints: Checkpoints,
        prepared: store.PreparedData,
        mesh: Mesh,
        model: LanguageModel,
        position: start.Position,
    ):
        self.config, self.workdir, self.checkpoints = config, workdir, checkpoints
        self.prepared = prepared
        self.step, self.rows = position.step, position.rows_consumed
        self.first_step, self.earlier_age = position.step, position.age - position.step
        self.stop = StopRequest(mesh)
        self.sharding = rules.batch_sharding(mesh)
        self.evaluate = make_evaluator(model, mesh, config.evaluation.batch_size)
        self.evaluation: Evaluation | None = None
        self.documents = start.checkpoint_documents(config, prepared, mesh)
        peak = config.train.peak_flops or measure_matmul_peak(config.model.compute_dtype)
        processes.describe_saved(self._saved)
        try:
            self.writer = MetricsWriter(
                workdir,
                resume_step=position.step or None,
                tensorboard=config.metrics.tensorboard,
                wandb_project=config.metrics.wandb_project,
                config=config.to_dict(),
                corpus=prepared.corpus_fingerprint,
            )
        except RunFailed as error:
            raise RunFailed(f"{error}; {self._saved()}") from error
        self.progress = Progress(
            config.train.steps,
            flops_per_token=training_flops(model.infos, config, model.vocab_size),
            peak_flops=peak * mesh.size,
        )

    def run(self, state: TrainState, step_function: Callable) -> Outcome:
        """Takes steps until all are done or a signal asks to stop; saves, and closes everything."""
        try:
            state = self._steps(state, step_function)
            if self.stop and self.step > self.first_step:
                self._save(state, None)
            self.checkpoints.wait()
        except RunFailed as error:
            # A save in progress may still make it; whether it does is not what failed here.
            with contextlib.suppress(SaveFailed):
                self.checkpoints.wait()
            raise RunFailed(f"{error}; {self._saved()}") from error
        finally:
            # What was not raised above is a failed save behind an error that says more.
            with contextlib.suppress(SaveFailed):
                self.checkpoints.close()
            self.progress.close()
            self.writer.close()
        finished = self.step == self.config.train.steps
        if not finished:
            name = signal.Signals(self.stop.signal).name
            print(f"Stopped by {name} after step {self.step}; {self._saved()}.")
        return Outcome(self.step, finished, self.evaluation)

    def _steps(self, state: TrainState, step_function: Callable) -> TrainState:
        config = self.config
        late: tuple[int, dict[str, Any]] | None = None
        step_function = self._compile(step_function, state)
        size = config.train.batch_size
        rows = local_rows(self.sharding, size)
        stream = pipeline.TrainingStream(
            self.prepared.train, config.seed, self.rows, size, config.data.prefetch_rows, rows
        )
        with stream, _Profiler(config, self.workdir / "profile", self.first_step) as profiler:
            while self.step < config.train.steps and not self.stop:
                profiler.before(self.step)
                batch = place_batch(self.sharding, size, rows, next(stream))
                state, metrics = step_function(state, batch)
                self.stop.exchange()
                self.step += 1
                self.rows += size
                # The metrics of the step before are ready by now: reading them keeps the device
                # busy with this one.
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
        return state

    def _compile(self, step_function: Callable, state: TrainState) -> Callable:
        """Compiles the step ahead of its first batch, and says what memory it will take."""
        print("Compiling the training step ...", flush=True)
        began = time.perf_counter()
        shape = (self.config.train.batch_size, self.config.data.row_length + 1)
        batch = {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)
            for name, dtype in (("tokens", np.int32), ("segment_ids", np.int32), ("valid", bool))
        }
        compiled = step_function.lower(state, batch).compile()
        seconds, memory = time.perf_counter() - began, compiled.memory_analysis()
        size = ""
        if memory is not None:
            size = (
                f"; per device {decimal(memory.argument_size_in_bytes)} of state and batch, "
                f"{decimal(memory.temp_size_in_bytes)} of temporaries"
            )
        print(f"Compiled in {seconds:.1f} s{size}.", flush=True)
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
            saves = last or step % config.checkpoint.every == 0 or self.checkpoints.is_marked(step)
            # "Best" means nothing for a checkpoint that was not evaluated.
            evaluates = (
                last
                or step % config.evaluation.every == 0
                or (saves and config.checkpoint.keep_best > 0)
            )
            if evaluates and self.prepared.validation.document_names:
                self.evaluation = self.evaluate(
                    state.params,
                    state.balance,
                    self.prepared.validation,
                    step + self.earlier_age,
                )
                metric = self.evaluation.bits_per_byte
                self.writer.write(step, self.evaluation.metrics())
                self.progress.print(
                    f"step {step}: validation {metric:.4f} bits per byte, "
                    f"{self.evaluation.loss:.4f} nats per token"
                )
            if saves:
                self._save(state, metric)

    def _save(self, state: TrainState, metric: float | None) -> None:
        began = time.perf_counter()
        position = start.Position(self.step, self.rows, self.step + self.earlier_age)
        self.checkpoints.save(
            self.step,
            {item: getattr(state, item) for item in start.ITEMS},
            self.documents | {start.POSITION_FILE: position.to_json(self.prepared)},
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
            scalars = {
                f"train/{name}": float(x) for name, x in metrics.items() if not isinstance(x, dict)
            }
            rows = self.rows - (self.step - step) * config.train.batch_size
            scalars["epoch"] = rows / len(self.prepared.train)
            for name, values in metrics["taps"].items():
                scalars[f"train/taps/{name}_mean"] = float(np.mean(values))
            for name, values in metrics.get("balance", {}).items():
                scalars[f"train/{name}_mean"] = float(np.mean(values))
                scalars[f"train/{name}_max"] = float(np.max(values))
            for name, value in metrics.get("optimizer", {}).items():
                scalars[f"train/optimizer/{name}"] = float(value)
            if "gate" in metrics["taps"]:
                scalars["train/taps/gate_min"] = float(np.min(metrics["taps"]["gate"]))
            self.writer.write(step, scalars | rates)
        if metrics["finite"] == 0 and config.train.nan_policy == "stop":
            raise RunFailed(
                f"the loss, the gradient or the parameters of step {step} are not finite (loss "
                f"{metrics['loss']}): start a new run with a lower optimizer.learning_rate, or "
                "leave such steps out with train.nan_policy=skip"
            )

    def _saved(self) -> str:
        """What is on disk, in words."""
        step = self.checkpoints.last_good
        if step is None:
            return "nothing has been saved yet"
        return f"step {step} is saved, and the same command goes on from there"


class _Profiler:
    """A profiler trace of a few steps, for TensorBoard or Perfetto."""

    def __init__(self, config: ConfigDict, folder: epath.Path, first_step: int):
        self.folder = folder
        begin = config.train.profile_start
        # A run that goes on after its window has its profile already.
        wanted = begin >= max(first_step, 0) and processes.index() == 0
        self.begin = begin if wanted else None
        self.end = None if self.begin is None else self.begin + config.train.profile_steps
        self.running = False

    def __enter__(self) -> "_Profiler":
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def before(self, step: int) -> None:
        """Starts the trace if its first step comes next."""
        if step == self.begin:
            jax.profiler.start_trace(str(self.folder))
            self.running = True

    def after(self, step: int, state: Any) -> None:
        """Ends the trace when its last step is done."""
        if self.running and step == self.end:
            jax.block_until_ready(state)
            self._end()

    def _end(self) -> None:
        if self.running:
            jax.profiler.stop_trace()
            self.running = False
            print(f"Profile written to {self.folder}.")
