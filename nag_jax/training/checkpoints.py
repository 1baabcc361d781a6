"""Checkpoints: self-describing step folders that are whole or not there at all.

This is the only file that knows Orbax. A step folder holds one Orbax tree per item (`params`,
`opt_state`, ...), small documents beside them (config, tokenizer, versions) and, written last,
the manifest with the size and checksum of every other file.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import PurePosixPath
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

import nag_jax
from nag_jax.errors import UserError
from nag_jax.training import manifest as manifest_lib
from nag_jax.training import processes, tree_paths
from nag_jax.training.manifest import Damaged
from nag_jax.training.tree_paths import PyTree

FOLDER_NAME = "checkpoints"

_ORBAX_METADATA = "_CHECKPOINT_METADATA"  # Orbax rewrites it at commit, after the manifest
_STEP_NAME = re.compile(r"\d{8}|[1-9]\d{8,}")
_LEFTOVER_NAME = re.compile(r"(\d+)\.(orbax-checkpoint-tmp|deleting)")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

Say = Callable[[str], None]


class SaveFailed(Exception):
    """A checkpoint could not be written; what was saved before it is untouched.

    Attributes:
      step: the step whose checkpoint failed.
      last_good: the newest step that is safely on disk, or None.
    """

    def __init__(self, folder: epath.Path, step: int, last_good: int | None, cause: BaseException):
        self.step = step
        self.last_good = last_good
        rest = (
            "there is no earlier checkpoint"
            if last_good is None
            else f"the last good checkpoint is step {last_good}"
        )
        super().__init__(
            f"saving the checkpoint of step {step} in {folder} failed ({_reason(cause)}); {rest}"
        )


@dataclasses.dataclass(frozen=True)
class Carried:
    """What `restore_matching` did with every leaf, as paths such as "params/layers/query"."""

    kept: tuple[str, ...]
    new: tuple[str, ...]
    dropped: tuple[str, ...]


class CheckpointReader:
    """Reads the checkpoints in a folder; writes nothing, so it is safe beside a live run."""

    def __init__(self, folder: epath.PathLike, *, checksums: bool = True, say: Say = print):
        """Opens the folder, which need not exist.

        Args:
          folder: the folder that holds the step folders; `~` and relative paths are allowed.
          checksums: whether what is restored is compared with its checksums too (sizes always
            are). That reads its files once more.
          say: receives a sentence for each damaged checkpoint that is passed over.
        """
        self.folder = absolute(folder)
        self._checksums = checksums
        self._say = say
        self._damaged: dict[int, str] = {}
        self._verified: dict[int, set[str]] = {}
        self._told: set[str] = set()

    def steps(self) -> tuple[int, ...]:
        """The steps whose checkpoints have every file at its full size, ascending."""
        return tuple(step for step in self._named_steps() if self._is_complete(step))

    def is_empty(self) -> bool:
        """Whether nothing here is even named like a step, so that a run may start afresh."""
        return not self._named_steps()

    def newest(self, items: Collection[str] = ()) -> int:
        """The newest intact step; damaged ones above it are told and passed over.

        Args:
          items: names of the items that will be restored: their checksums are compared, as those
            of the documents always are.

        Raises:
          UserError: there is no checkpoint, or none is intact.
        """
        found = []
        for step in reversed(self._named_steps()):
            if step not in self._damaged:
                with contextlib.suppress(Damaged):
                    self._manifest(step, items)
                    self._tell(found, step)
                    return step
            found.append(f"step {step}: {self._damaged[step]}")
        if found:
            raise UserError(
                f"no checkpoint in {self.folder} is intact ({'; '.join(found)}); move the folder"
                " away to start from the beginning"
            )
        raise UserError(f"there is no checkpoint in {self.folder}")

    def saved_shapes(self, step: int) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """Shapes and dtypes as saved: item name -> path in the item -> shape and dtype."""
        return {
            item: {
                path: jax.ShapeDtypeStruct(tuple(leaf["shape"]), jnp.dtype(leaf["dtype"]))
                for path, leaf in leaves.items()
            }
            for item, leaves in self._asked_manifest(step)["items"].items()
        }

    def metric(self, step: int) -> float | None:
        """The metric given when the step was saved."""
        return self._asked_manifest(step)["metric"]

    def read_documents(self, step: int) -> dict[str, bytes]:
        """The small files of a step by name ("config.json", "tokenizer/tokenizer.json", ...)."""
        names = self._asked_manifest(step)["documents"]
        return {name: (self._path(step) / name).read_bytes() for name in names}

    def restore(
        self, step: int | None, abstract: Mapping[str, PyTree]
    ) -> tuple[int, dict[str, PyTree]]:
        """Reads some or all items into given structures, onto given devices.

        Args:
          step: the step to read, or None for the newest intact one.
          abstract: item name -> tree of `jax.ShapeDtypeStruct`. Their shardings decide the devices
            (the default device where there is none), whatever mesh wrote the checkpoint; their
            dtypes may differ from the saved ones among floating-point types.

        Returns:
          The step that was read, and the items with the structure of `abstract`.

        Raises:
          UserError: the step is missing or damaged (with None: all are), or what it holds differs
            in paths, shapes or kinds of numbers from `abstract`.
        """
        step = self.newest(abstract.keys()) if step is None else step
        saved = self._asked_manifest(step, abstract.keys())["items"]
        wanted = {item: tree_paths.flatten(tree) for item, tree in abstract.items()}
        differences = tree_paths.differences(saved, wanted)
        if differences:
            raise UserError(
                f"checkpoint {self._path(step)} does not fit what is asked of it:\n"
                + "\n".join(differences)
            )
        return step, {
            item: tree_paths.unflatten(tree, self._load(step, item, wanted[item]))
            for item, tree in abstract.items()
        }

    def restore_matching(
        self, step: int | None, values: Mapping[str, PyTree]
    ) -> tuple[int, dict[str, PyTree], Carried]:
        """Replaces the leaves of `values` by saved ones wherever path and shape agree.

        Args:
          step: as for `restore`.
          values: item name -> tree of initialised arrays; their shardings and dtypes are kept.

        Returns:
          The step, the items, and the paths that were kept from the checkpoint, are new here, or
          were dropped because nothing here fits them.

        Raises:
          UserError: the step is missing or damaged.
        """
        step = self.newest(values.keys()) if step is None else step
        saved_items = self._asked_manifest(step, values.keys())["items"]
        items, kept, new, dropped = {}, [], [], []
        for item, tree in values.items():
            saved, leaves = saved_items.get(item, {}), tree_paths.flatten(tree)
            fitting = {
                path: leaf
                for path, leaf in leaves.items()
                if path in saved and tree_paths.fits(saved[path], leaf)
            }
            loaded = self._load(step, item, fitting)
            items[item] = tree_paths.unflatten(tree, {**leaves, **loaded})
            kept += [f"{item}/{path}" for path in fitting]
            new += [f"{item}/{path}" for path in leaves if path not in fitting]
            dropped += [f"{item}/{path}" for path in saved if path not in fitting]
        return step, items, Carried(tuple(kept), tuple(new), tuple(dropped))

    def _path(self, step: int) -> epath.Path:
        return self.folder / f"{step:08d}"

    def _named_steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        names = (path.name for path in self.folder.iterdir())
        return sorted(int(name) for name in names if _STEP_NAME.fullmatch(name))

    def _is_complete(self, step: int) -> bool:
        if step in self._damaged:
            return False
        try:
            manifest_lib.read(self._path(step), step)
        except Damaged:
            return False
        return True

    def _manifest(self, step: int, items: Collection[str]) -> dict[str, Any]:
        """The manifest of an intact step; the content of items and documents is compared once."""
        try:
            manifest = manifest_lib.read(self._path(step), step)
            if self._checksums:
                done = self._verified.setdefault(step, set())
                parts = {*items, *manifest["documents"]} - done
                manifest_lib.check_content(self._path(step), manifest, parts)
                done |= parts
        except Damaged as damage:
            self._damaged[step] = str(damage)
            raise
        return manifest

    def _tell(self, found: list[str], step: int) -> None:
        new = [damage for damage in found if damage not in self._told]
        for damage in new:
            self._say(f"Passed over a damaged checkpoint, {damage}.")
        if new:
            self._say(f"Using the checkpoint of step {step}, the newest that is intact.")
        self._told.update(new)

    def _asked_manifest(self, step: int, items: Collection[str] = ()) -> dict[str, Any]:
        """The manifest of a step that was asked for, so that its damage is an error."""
        if not self._path(step).exists():
            there = ", ".join(map(str, self.steps())) or "none"
            raise UserError(f"there is no checkpoint of step {step} in {self.folder} ({there})")
        try:
            return self._manifest(step, items)
        except Damaged as damage:
            raise UserError(f"the checkpoint of step {step} is damaged: {damage}") from None

    def _load(self, step: int, item: str, leaves: Mapping[str, Any]) -> dict[str, jax.Array]:
        if not leaves:
            return {}  # an empty item has no folder
        tree = tree_paths.nest({path: tree_paths.abstract(leaf) for path, leaf in leaves.items()})
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            restored = checkpointer.restore(
                self._path(step) / item,
                args=ocp.args.PyTreeRestore(
                    item=tree,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
                    partial_restore=True,
                ),
            )
        return tree_paths.unnest(restored)


class AgreedReader(CheckpointReader):
    """Reads the checkpoints of a run of several processes, who make one each and call it alike.

    Process 0 looks at the folder, compares checksums and decides what is damaged for all.
    """

    def __init__(self, folder: epath.PathLike, *, checksums: bool = True, say: Say = print):
        """As `CheckpointReader`."""
        checksums = checksums and processes.index() == 0
        super().__init__(folder, checksums=checksums, say=say)

    def is_empty(self) -> bool:
        """As `CheckpointReader.is_empty`."""
        return processes.from_first(super().is_empty)

    def newest(self, items: Collection[str] = ()) -> int:
        """As `CheckpointReader.newest`."""
        find = super().newest
        step, self._damaged = processes.from_first(lambda: (find(items), self._damaged))
        return step


class Checkpoints(AgreedReader):
    """Writes checkpoints asynchronously and deletes those that no rule keeps.

    Every process of a run makes one and calls it alike, and each writes its part of the arrays;
    process 0 writes the documents, ends the checkpoint with its manifest, and deletes.
    """

    def __init__(
        self,
        folder: epath.PathLike,
        *,
        keep_last: int,
        keep_best: int = 0,
        keep_steps: tuple[int, ...] = (),
        keep_log_spaced: int = 0,
        checksums: bool = True,
        say: Say = print,
    ):
        """Makes the folder, proves that it can be written, and clears what a killed run left.

        Args:
          folder: where the step folders go.
          keep_last: how many of the newest to keep, at least 1.
          keep_best: how many with the lowest metric to keep.
          keep_steps: steps to keep for good.
          keep_log_spaced: how many steps to keep for good per doubling of the step: 1 keeps 1, 2,
            4, ..., n keeps the powers of 2^(1/n), rounded up; 0 none.
          checksums: as for `CheckpointReader`.
          say: receives sentences for the user.

        Raises:
          UserError: the folder cannot be made or written, or keep_last is below 1.
        """
        super().__init__(folder, checksums=checksums, say=say)
        if keep_last < 1:
            raise UserError(f"checkpoint.keep_last is {keep_last}; it must be at least 1")
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._keep_steps = frozenset(keep_steps)
        self._keep_log_spaced = keep_log_spaced
        self._metrics: dict[int, float | None] = processes.from_first(self._take_over)
        self._versions = _versions()
        self._sealer = _SealingHandler()
        self._checkpointer = ocp.AsyncCheckpointer(self._sealer)
        self._pending: _Pending | None = None
        self._failure: SaveFailed | None = None
        logging.getLogger("absl").addFilter(_no_orbax_traceback)
        logging.getLogger("asyncio").addFilter(_no_sibling_of_a_failed_write)
        _drop_late_writes()

    @property
    def last_good(self) -> int | None:
        """The newest step that is known to be on disk, without looking there."""
        return max(self._metrics.keys() - self._damaged.keys(), default=None)

    def is_marked(self, step: int) -> bool:
        """Whether the rules keep this step for good, so that it should be saved."""
        if step in self._keep_steps:
            return True
        if self._keep_log_spaced == 0 or step < 1:
            return False
        largest = math.floor(math.log2(step) * self._keep_log_spaced)
        return step == math.ceil(2 ** (largest / self._keep_log_spaced))

    def save(
        self,
        step: int,
        arrays: Mapping[str, PyTree],
        documents: Mapping[str, str | bytes],
        metric: float | None = None,
    ) -> bool:
        """Starts to write a checkpoint; waits for the one before it first.

        When this returns the values are safe: the arrays may be donated or deleted.

        Args:
          step: the step; a complete checkpoint of the same step is left as it is.
          arrays: item name -> tree of arrays; an item may be empty.
          documents: file name (may hold "/") -> content, kept beside the arrays.
          metric: what "best" means, lower is better.

        Returns:
          Whether there was anything to save.

        Raises:
          SaveFailed: this save could not start, or an earlier one has failed.
        """
        self.wait()
        if step in self._metrics and step not in self._damaged:
            return False
        items = {item: tree_paths.flatten(tree) for item, tree in arrays.items()}
        pending = _Pending(
            step=step,
            metric=None if metric is None or not math.isfinite(metric) else float(metric),
            items={
                item: {path: tree_paths.describe(leaf) for path, leaf in leaves.items()}
                for item, leaves in items.items()
            },
            documents=_encoded({**documents, "versions.json": self._versions}, items.keys()),
        )
        self._sealer.pending = pending
        full = {item: tree_paths.nest(leaves) for item, leaves in items.items() if leaves}
        args = _SealedItems(**{item: ocp.args.PyTreeSave(tree) for item, tree in full.items()})
        try:
            # What stands in the way here is damaged: a complete step has returned above.
            self._checkpointer.save(self._path(step), args=args, force=True)
        except Exception as error:
            self._fail(step, error)
        self._pending = pending
        return True

    def check(self) -> None:
        """Notices, without waiting, that the save in progress has ended.

        Raises:
          SaveFailed: it, or an earlier one, failed.
        """
        if self._failure is not None:
            raise self._failure
        if self._pending is None:
            return
        try:
            self._checkpointer.check_for_errors()
        except Exception as error:
            self._fail(self._pending.step, error)
        if (self._path(self._pending.step) / manifest_lib.FILE_NAME).exists():
            self._committed()

    def wait(self) -> None:
        """Waits until the save in progress is on disk.

        Raises:
          SaveFailed: it, or an earlier one, failed.
        """
        if self._failure is not None:
            raise self._failure
        if self._pending is None:
            return
        step = self._pending.step
        try:
            self._checkpointer.wait_until_finished()
            manifest_lib.read(self._path(step), step)
        except Exception as error:
            self._fail(step, error)
        self._committed()

    def close(self) -> None:
        """Waits as `wait` does, and ends the writing threads.

        Raises:
          SaveFailed: the last save, or an earlier one, failed.
        """
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def _fail(self, step: int, error: Exception) -> None:
        self._pending = None
        self._failure = SaveFailed(self.folder, step, self.last_good, error)
        raise self._failure from error

    def _committed(self) -> None:
        step = self._pending.step
        self._metrics[step] = self._pending.metric
        self._damaged.pop(step, None)
        self._verified.pop(step, None)
        self._pending = None
        for step in self._metrics.keys() - self._damaged.keys() - self._kept():
            del self._metrics[step]
            if processes.index() == 0:
                self._delete(step)

    def _kept(self) -> set[int]:
        steps = sorted(self._metrics.keys() - self._damaged.keys())
        measured = [step for step in reversed(steps) if self._metrics[step] is not None]
        best = sorted(measured, key=self._metrics.__getitem__)[: self._keep_best]
        marked = [step for step in steps if self.is_marked(step)]
        return {*steps[-self._keep_last :], *best, *marked}

    def _delete(self, step: int) -> None:
        # Renamed first: a folder that is half deleted must not look like a step.
        doomed = self.folder / f"{step:08d}.deleting"
        try:
            self._path(step).rename(doomed)
            doomed.rmtree()
        except OSError as error:
            self._say(f"Could not delete the old checkpoint of step {step}: {error}.")

    def _take_over(self) -> dict[int, float | None]:
        """Makes the folder ready for this run; the metrics of the complete steps in it."""
        _require_writable(self.folder)
        self._clear_leftovers()
        return {step: manifest_lib.read(self._path(step), step)["metric"] for step in self.steps()}

    def _clear_leftovers(self) -> None:
        for path in self.folder.iterdir():
            match = _LEFTOVER_NAME.fullmatch(path.name)
            if match is None:
                continue
            path.rmtree()
            if match[2] != "deleting":
                self._say(
                    f"Removed a half-written checkpoint of step {int(match[1])}: the run ended"
                    " while saving it."
                )


def absolute(path: epath.PathLike) -> epath.Path:
    """The path with `~` expanded, made absolute; remote paths ("gs://...") stay as they are."""
    expanded = epath.Path(path).expanduser()
    return expanded if "://" in str(path) else expanded.absolute()


def find_checkpoint(path: epath.PathLike) -> tuple[epath.Path, int | None]:
    """Finds the checkpoints meant by a path.

    Args:
      path: a run's folder, its checkpoints folder, or one step's folder; relative or with `~`.

    Returns:
      The checkpoints folder, and the step if the path named one.

    Raises:
      UserError: nothing of the kind is there.
    """
    path = absolute(path)
    if not path.exists():
        raise UserError(f"there is no checkpoint at {path}: no such file or folder")
    if not path.is_dir():
        raise UserError(f"there is no checkpoint at {path}: it is a file, not a folder")
    if _STEP_NAME.fullmatch(path.name):
        return path.parent, int(path.name)
    if (path / manifest_lib.FILE_NAME).exists():
        raise UserError(
            f"{path} is one step's checkpoint under another name: give it back the name that its"
            f" {manifest_lib.FILE_NAME} tells under 'step', with eight digits such as 00000100"
        )
    for folder in (path / FOLDER_NAME, path):
        if not CheckpointReader(folder).is_empty():
            return folder, None
    raise UserError(
        f"there is no checkpoint at {path}: looked for step folders such as"
        f" {path / FOLDER_NAME / '00000100'} and {path / '00000100'}"
    )


def folder_documents(folder: epath.PathLike, prefix: str) -> dict[str, bytes]:
    """Every file under a folder as documents named "prefix/...", for `Checkpoints.save`."""
    folder = absolute(folder)
    names = manifest_lib.files_under(folder)
    return {f"{prefix}/{name}": (folder / name).read_bytes() for name in names}


@dataclasses.dataclass(frozen=True)
class _Pending:
    """The save in progress: what is written beside the arrays."""

    step: int
    metric: float | None
    items: dict[str, dict[str, dict[str, Any]]]
    documents: dict[str, bytes]


class _SealingHandler(ocp.CompositeCheckpointHandler):
    """Orbax's handler for several items, which seals the folder before it is renamed into place.

    Orbax calls `finalize` on process 0, in its background thread, when every process has written
    its part. An error in it fails the save.
    """

    pending: _Pending

    def finalize(self, directory: epath.Path) -> None:
        super().finalize(directory)
        for name, content in self.pending.documents.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)
        manifest_lib.seal(
            directory,
            step=self.pending.step,
            metric=self.pending.metric,
            items=self.pending.items,
            documents=self.pending.documents,
            unsealed=(_ORBAX_METADATA,),
        )


@ocp.args.register_with_handler(_SealingHandler, for_save=True, for_restore=True)
class _SealedItems(ocp.args.Composite):
    """The arguments by which Orbax finds `_SealingHandler`."""


def _encoded(documents: Mapping[str, str | bytes], items: Collection[str]) -> dict[str, bytes]:
    taken = {"/", manifest_lib.FILE_NAME, _ORBAX_METADATA, *items}
    for name in documents:
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or parts[0] in taken:
            raise ValueError(f"{name!r} cannot be the name of a document in a checkpoint")
    return {
        name: content.encode() if isinstance(content, str) else content
        for name, content in documents.items()
    }


def _versions() -> str:
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    own = {"nag_jax": nag_jax.__version__, "python": platform.python_version()}
    return json.dumps({**own, **versions, "backend": jax.default_backend()}, indent=1)


def _require_writable(folder: epath.Path) -> None:
    probe = folder / f".probe-{time.time_ns()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"checkpoints cannot be written in {folder}: {reason}") from error


def _reason(cause: BaseException) -> str:
    """The system's words where there are any: tensorstore wraps them in a page of its own."""
    text = " ".join(str(cause).split())
    if code := re.search(r"os_error_code='(\d+)'", text):
        return os.strerror(int(code[1]))
    return text[:300] or type(cause).__name__


def _drop_late_writes() -> None:
    """Drops what is printed for each write that ends after Orbax has given up a save.

    At the first failed write Orbax closes the event loop to which tensorstore reports the others.
    """
    before = sys.unraisablehook
    if getattr(before, "__module__", None) == __name__:
        return

    def hook(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


def _no_sibling_of_a_failed_write(record: logging.LogRecord) -> bool:
    """Drops what asyncio says of writes that failed beside the one that SaveFailed tells of."""
    error = record.exc_info[1] if record.exc_info else None
    return "never retrieved" not in record.getMessage() or "[os_error_code=" not in str(error)


def _no_orbax_traceback(record: logging.LogRecord) -> bool:
    """Drops the traceback that Orbax logs for a failed save; SaveFailed tells it in a sentence."""
    return "orbax" not in record.pathname or record.levelno < logging.ERROR
