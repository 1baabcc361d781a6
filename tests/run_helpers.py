"""Real training runs for tests: small enough for seconds, started, stopped and compared.

Runs of one test session share a corpus, its rows and the compiled programs, so that only the first
of a kind pays for them; a program from the cache gives the same bits as one compiled anew.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from small_models import quick_compilation

import nag_jax
from nag_jax.config import load_config_file, resolve
from nag_jax.data import pipeline
from nag_jax.training.checkpoints import CheckpointReader
from nag_jax.training.metrics import read_metrics

REPOSITORY = pathlib.Path(nag_jax.__file__).parents[1]
CONFIG = "configs/nag_small.py:smoke"
SMALLER = {
    "data.row_length": 16,
    "data.tokenizer.kind": "bytes",
    "data.source.kind": "text",
    "data.validation_bytes": 400,
    "model.num_blocks": 1,
    "model.loss_chunk": 0,
    "model.attention.query_chunk": 16,
    "metrics.tensorboard": False,
    "train.peak_flops": 1e9,  # not measured
    "evaluation.every": 1000,
    "optimizer.learning_rate": 3e-3,
}
# Two kinds that compile in half the time, for what does not depend on the kinds.
PLAIN = {"model.connection.kind": "prenorm", "optimizer.kind": "adamw"}


class Place:
    """Where the runs of a test session live, and how one of them is started.

    Args:
        folder: Holds the corpus, its rows and the compiled programs; several processes may use it.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        with self.lock("corpus"):
            if not (folder / "corpus").exists():
                _write_corpus(folder / "partial")
                (folder / "partial").rename(folder / "corpus")

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Lets one process at a time into what is called `name`."""
        with (self.folder / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def once(self, name: str, make: Callable[[pathlib.Path], Any]) -> pathlib.Path:
        """A folder that the first process to ask for it makes; to be read or copied only."""
        folder = self.folder / name
        with self.lock(name):
            if not folder.exists():
                partial = folder.with_name(f"{name}.partial")
                make(partial)
                partial.rename(folder)
        return folder

    def overrides(self, changes: dict[str, Any]) -> dict[str, Any]:
        """The overrides of a run, by dotted path."""
        data = {
            "data.source.paths": (f"{self.folder / 'corpus'}/*.txt",),
            "data.cache_folder": f"{self.folder / 'cache'}",
        }
        return SMALLER | data | changes

    def config(self, **changes: Any):
        """The complete config of a run in this process; "__" in a name stands for a dot."""
        changes = {name.replace("__", "."): value for name, value in changes.items()}
        file = load_config_file(str(REPOSITORY / CONFIG))
        return resolve(file, _arguments(self.overrides(changes)))

    def arguments(self, workdir: pathlib.Path, changes: dict[str, Any]) -> list[str]:
        """The command line of a run, after the program."""
        return [
            f"--config={REPOSITORY / CONFIG}",
            *(f"--config.{argument}" for argument in _arguments(self.overrides(changes))),
            f"--workdir={workdir}",
        ]

    def environment(self) -> dict[str, str]:
        """The environment variables of a run."""
        paths = [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

    def start(
        self,
        workdir: pathlib.Path,
        changes: dict[str, Any],
        *flags: str,
        program: tuple[str, ...] = ("-m", "nag_jax.train"),
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> "Running":
        """Starts a run in a process of its own; options are those of `subprocess.Popen`."""
        return Running(
            [sys.executable, *program, *self.arguments(workdir, changes), *flags],
            env=self.environment() | (environment or {}),
            **options,
        )

    def run(self, *args: Any, **options: Any) -> subprocess.CompletedProcess:
        """Starts a run as `start` does, and waits for its end."""
        return self.start(*args, **options).end()

    @contextlib.contextmanager
    def in_process(self) -> Iterator[None]:
        """Compiles in this process as the runs do, with their cache of programs."""
        keys = {
            "jax_compilation_cache_dir": str(self.folder / "compiled"),
            "jax_persistent_cache_min_compile_time_secs": 0.0,
        }
        before = {key: getattr(jax.config, key) for key in keys}
        try:
            for key, value in keys.items():
                jax.config.update(key, value)
            compilation_cache.reset_cache()
            with quick_compilation():
                yield
        finally:
            for key, value in before.items():
                jax.config.update(key, value)
            compilation_cache.reset_cache()


def place_of_session(tmp_path_factory) -> Place:
    """The place that all tests of this session share, whichever worker they run in."""
    folder = tmp_path_factory.getbasetemp()
    return Place(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)


class Running:
    """A run in a process of its own, whose output is read as it comes."""

    def __init__(self, command: list[str], **options: Any):
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )
        self._lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._readers = [
            threading.Thread(target=lines.extend, args=(getattr(self.process, name),), daemon=True)
            for name, lines in self._lines.items()
        ]
        for reader in self._readers:
            reader.start()

    def said(self, words: str) -> bool:
        """Whether some words have been printed."""
        return any(words in line for line in self._lines["stdout"])

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until something is so; the run must not end before."""
        while not condition():
            if self.process.poll() is not None and not condition():
                raise AssertionError(f"the run has ended: {self.end()}")
            time.sleep(0.002)

    def signal(self, number: int) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def end(self) -> subprocess.CompletedProcess:
        """Waits for the end."""
        try:
            self.process.wait(timeout=240)
        finally:
            self.process.kill()
        for reader in self._readers:
            reader.join()
        stdout, stderr = ("".join(lines) for lines in self._lines.values())
        return subprocess.CompletedProcess(
            self.process.args, self.process.returncode, stdout, stderr
        )


class RecordingStream(pipeline.TrainingStream):
    """Notes which row was trained on where, in place of the stream that a run makes.

    In one process, which reads every row.
    """

    seen: dict[int, str] = {}  # position in training -> digest of the row

    def __init__(self, rows: Any, seed: int, start_row: int, *args: Any):
        super().__init__(rows, seed, start_row, *args)
        self._position = start_row

    def __next__(self) -> pipeline.Batch:
        batch = super().__next__()
        for row in batch["tokens"]:
            self.seen[self._position] = hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest()
            self._position += 1
        return batch


def saved_steps(workdir: pathlib.Path) -> tuple[int, ...]:
    """The steps of the whole checkpoints in a run's folder."""
    return CheckpointReader(workdir / "checkpoints").steps()


def saved_arrays(workdir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by item and path."""
    reader = CheckpointReader(workdir / "checkpoints")
    shapes = {item: leaves for item, leaves in reader.saved_shapes(step).items() if leaves}
    _, items = reader.restore(step, shapes)
    return {
        f"{item}/{path}": np.asarray(leaf)
        for item, leaves in items.items()
        for path, leaf in leaves.items()
    }


def saved_position(workdir: pathlib.Path, step: int) -> dict[str, Any]:
    """The data position in a checkpoint."""
    return json.loads((workdir / "checkpoints" / f"{step:08d}" / "data.json").read_text())


def assert_same_state(workdir: pathlib.Path, other: pathlib.Path, step: int) -> None:
    """Two checkpoints are one: every array, bit for bit, and the position in the data."""
    ours, theirs = saved_arrays(workdir, step), saved_arrays(other, step)
    assert ours.keys() == theirs.keys() and any(path.startswith("opt_state") for path in ours)
    different = [path for path in ours if ours[path].tobytes() != theirs[path].tobytes()]
    assert not different
    assert saved_position(workdir, step) == saved_position(other, step)


def assert_same_run(workdir: pathlib.Path, other: pathlib.Path, step: int) -> None:
    """Two runs are one: their state, and every metric of every step but timings."""
    assert_same_state(workdir, other, step)
    assert results(workdir) == results(other)


def results(workdir: pathlib.Path) -> list[dict[str, float]]:
    """The lines of metrics without what depends on time, and without the corpus' name."""
    timed = ("throughput/", "checkpoint/", "corpus")
    lines = [
        {name: value for name, value in line.items() if not name.startswith(timed)}
        for line in read_metrics(workdir)
    ]
    return [line for line in lines if line.keys() != {"step"}]


def _arguments(changes: dict[str, Any]) -> list[str]:
    """Overrides as on the command line; kinds come first, so that their keys are known."""
    return [
        f"{name}={','.join(map(str, value)) + ',' if isinstance(value, tuple) else value}"
        for name, value in sorted(changes.items(), key=lambda item: ".kind" not in item[0])
    ]


def _write_corpus(folder: pathlib.Path) -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 7))) for _ in range(60)]
    folder.mkdir()
    for number in range(40):
        text = " ".join(rng.choices(words, k=rng.randint(40, 120)))
        (folder / f"{number:02d}.txt").write_text(text)
