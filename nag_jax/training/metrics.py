"""Where a run's numbers go: JSON lines always, TensorBoard and Weights & Biases if asked.

One line of `metrics.jsonl` is one JSON object, {"step": 10, "train/loss": 3.2, ...}. A resumed run
repeats the steps after its checkpoint, so opening the file first drops what was written of them.
"""

import contextlib
import json
import math
import time
import uuid
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from nag_jax.errors import UserError
from nag_jax.training.errors import RunFailed

FILE_NAME = "metrics.jsonl"
_WANDB_ID = "wandb_run_id.txt"


class MetricsWriter:
    """Writes each step's metrics to every chosen place. Only process 0 writes anything."""

    def __init__(
        self,
        workdir: epath.Path,
        *,
        resume_step: int | None,
        tensorboard: bool = False,
        wandb_project: str = "",
        config: Mapping[str, Any] | None = None,
        corpus: str = "",
    ):
        """Opens the files in `workdir`, dropping what lies after the step the run resumes from.

        Args:
          workdir: the run's folder, which exists.
          resume_step: the step whose checkpoint was restored; None for a run that starts afresh,
            which drops every earlier line.
          tensorboard: whether to write event files in `workdir/tensorboard`.
          wandb_project: the Weights & Biases project; "" for none.
          config: shown with the run in Weights & Biases.
          corpus: fingerprint of the corpus, put into every line.

        Raises:
          RunFailed: the disk takes no more, or the files cannot be opened.
          UserError: Weights & Biases is asked for and not installed.
        """
        self._workdir, self._corpus = workdir, corpus
        self._file = self._events = self._wandb = None
        if jax.process_index() != 0:
            return
        last_step = -1 if resume_step is None else resume_step
        if wandb_project:
            self._wandb = _open_wandb(workdir, wandb_project, config)
        try:
            _drop_after(workdir / FILE_NAME, last_step)
            self._file = (workdir / FILE_NAME).open("a")
            if tensorboard:
                self._events = _EventFile(workdir / "tensorboard", last_step + 1)
        except OSError as error:
            raise self._failed(error) from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a step; the JSON line is on disk when this returns.

        Args:
          step: the optimizer step.
          metrics: names such as "train/loss" to numbers; NaN and infinities are allowed.

        Raises:
          RunFailed: the disk takes no more.
        """
        if self._file is None:
            return
        values = {name: float(value) for name, value in metrics.items()}
        line = {"step": int(step), **{name: _encode(value) for name, value in values.items()}}
        if self._corpus:
            line["corpus"] = self._corpus
        try:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
            if self._events is not None:
                self._events.write(step, values)
        except OSError as error:
            raise self._failed(error) from error
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def flush(self) -> None:
        """Pushes what TensorBoard still buffers to disk; to be called at checkpoints.

        Raises:
          RunFailed: the disk takes no more.
        """
        try:
            if self._events is not None:
                self._events.flush()
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Flushes and closes every place; what a full disk refuses then is left out."""
        for place in (self._file, self._events):
            if place is not None:
                with contextlib.suppress(OSError):
                    place.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _failed(self, error: OSError) -> RunFailed:
        return RunFailed(f"metrics cannot be written in {self._workdir}: {error.strerror or error}")


class _EventFile:
    """Scalars for TensorBoard, written in the calling thread.

    tensorboardX's own SummaryWriter writes in a thread of its own, which dies unseen when the disk
    is full and then blocks the caller for ever.
    """

    def __init__(self, folder: epath.Path, first_step: int):
        # Imported here because it costs time that runs without it need not spend.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        # A session that starts at a step tells TensorBoard to forget that step and later ones.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.write_event(
            self._event(wall_time=time.time(), step=first_step, session_log=start)
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=tag, simple_value=x) for tag, x in values.items()]
        summary = self._summary(value=scalars)
        self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def read_metrics(path: epath.PathLike) -> list[dict[str, float]]:
    """Reads the metrics of a run, also while it is being written.

    Args:
      path: the run's folder, or the JSON lines file itself.

    Returns:
      One dict per line, in order, with "step" (an int), "corpus" (its fingerprint) and the
      metrics of that line.

    Raises:
      UserError: there is no such file.
    """
    path = epath.Path(path).expanduser().absolute()
    if path.is_dir():
        path = path / FILE_NAME
    if not path.exists():
        raise UserError(f"there are no metrics at {path}")
    return [_decode(record) for record in _records(_text(path))]


def _drop_after(path: epath.Path, last_step: int) -> None:
    """Rewrites the file without lines of later steps and without torn ones, in one rename.

    A run that starts afresh where another left its metrics puts them aside.
    """
    if not path.exists():
        return
    if last_step < 0:
        path.replace(path.with_name(path.name + ".old"))
        return
    before = _text(path)
    kept = [record for record in _records(before) if record["step"] <= last_step]
    after = "".join(json.dumps(record) + "\n" for record in kept)
    if after != before:
        replacement = path.with_name(path.name + ".tmp")
        replacement.write_text(after)
        replacement.replace(path)


def _text(path: epath.Path) -> str:
    """The file's text; a line that is damaged to the point of not being text is left out later."""
    return path.read_bytes().decode(errors="replace")


def _records(text: str) -> list[dict[str, Any]]:
    """The whole lines; a process that is killed while writing leaves one that is not."""
    records = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def _encode(value: float) -> float | str:
    """NaN and infinities as strings, which every JSON reader accepts and float() understands."""
    return value if math.isfinite(value) else str(value)


def _decode(record: dict[str, Any]) -> dict[str, float]:
    labels = ("step", "corpus")
    return {name: value if name in labels else float(value) for name, value in record.items()}


def _open_wandb(workdir: epath.Path, project: str, config: Mapping[str, Any] | None) -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError(
            f"metrics.wandb_project is {project!r}, but wandb is not installed: install the extra"
            ' with pip install "nag-jax[wandb]", or leave the key empty'
        ) from None
    # The same run goes on after a resume. Steps it repeats are not recorded twice there.
    id_file = workdir / _WANDB_ID
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex[:12])
    return wandb.init(
        project=project,
        id=id_file.read_text(),
        resume="allow",
        dir=str(workdir),
        config=dict(config or {}),
    )
