"""One small trained run that the tests of its use share, and the binaries as a user calls them."""

import contextlib
import dataclasses
import importlib
import io
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
from absl import flags
from run_helpers import REPOSITORY, Place

from nag_jax import cli
from nag_jax.parameters import flatten
from nag_jax.training import loop
from nag_jax.training.checkpoints import Checkpoints

STEPS = (3, 6)


@dataclasses.dataclass(frozen=True)
class TinyRun:
    """A finished run of 6 steps with checkpoints of steps 3 and 6.

    Attributes:
        place: Where it lives.
        workdir: Its folder, to be read or copied only.
    """

    place: Place
    workdir: pathlib.Path

    def trained(self, step: int) -> dict[str, np.ndarray]:
        """The parameters by path as they left the training loop."""
        with np.load(self.workdir.parent / f"params-{step}.npz") as arrays:
            return dict(arrays)


def tiny_run(place: Place) -> TinyRun:
    """The run, trained by the first test process that asks for it."""

    def make(folder: pathlib.Path) -> None:
        folder.mkdir()
        save = Checkpoints.save

        def noting(self, step, items, *args, **options):
            params = jax.tree.map(np.asarray, items["params"])
            np.savez(folder / f"params-{step}.npz", **flatten(params))
            return save(self, step, items, *args, **options)

        config = place.config(
            data__validation_bytes=2500, evaluation__every=3, evaluation__batch_size=8
        )
        with mock.patch.object(Checkpoints, "save", noting), place.in_process():
            loop.train(config, folder / "run")

    return TinyRun(place, place.once("tiny", make) / "run")


class Result(NamedTuple):
    """How a binary ended and what it wrote."""

    code: int
    out: str
    err: str


def forget_flags() -> None:
    """Removes the flags of every binary, those that a test imported by itself included."""
    by_module = flags.FLAGS.flags_by_module_dict()
    for module in [name for name in by_module if name.startswith("nag_jax.")]:
        for name in {flag.name for flag in by_module.pop(module)} & set(flags.FLAGS):
            delattr(flags.FLAGS, name)
    flags.FLAGS.unparse_flags()


def call(binary: str, *args: str) -> Result:
    """Runs `python -m nag_jax.<binary>` in this process.

    Two binaries' flags cannot be defined in one process, so each is imported anew and its flags
    are removed at the end.
    """
    name = f"nag_jax.{binary}"
    out, err = io.StringIO(), io.StringIO()
    sys.modules.pop(name, None)
    forget_flags()
    module = importlib.import_module(name)
    takes = "given" if binary in ("check", "plan", "prepare_data", "train") else "refused"
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.run(module.main, config=takes, argv=[name, *args])
        except SystemExit as end:
            code = end.code
        finally:
            forget_flags()
    return Result(code, out.getvalue(), err.getvalue())


def call_process(place: Place, binary: str, *args: str, devices: int = 1, **options) -> Result:
    """Runs `python -m nag_jax.<binary>` in a process of its own."""
    simulated = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    done = subprocess.run(
        [sys.executable, "-m", f"nag_jax.{binary}", *args],
        env=place.environment() | simulated | options.pop("environment", {}),
        cwd=options.pop("cwd", REPOSITORY),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        **options,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def assert_refused(result: Result, *words: str) -> None:
    """Exit code 2 and one sentence on stderr that holds all words."""
    assert result.code == 2, result
    assert result.err.startswith("error: ") and result.err.count("\n") == 1, result.err
    assert "Traceback" not in result.err
    assert "Compiling" not in result.out
    for word in words:
        assert word in result.err, (word, result.err)


@contextlib.contextmanager
def folder_unchanged(folder: pathlib.Path) -> Iterator[None]:
    """Nothing below a folder appears, disappears or changes meanwhile."""

    def state():
        return {
            path: (os.lstat(path).st_mtime_ns, os.lstat(path).st_size)
            for path in sorted(folder.rglob("*"))
            if not path.is_dir()
        } | {path: None for path in folder.rglob("*") if path.is_dir()}

    before = state()
    yield
    assert state() == before
