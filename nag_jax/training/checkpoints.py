"""Checkpoints: self-describing step folders that are whole or not there at all.

This is the only file that knows Orbax. A step folder holds one Orbax tree per item (`params`, `opt_state`, ...), small documents beside
them (config, tokenizer, versions) and `manifest.json`, written last, with the size and checksum of
every other file. What has no manifest, or does not agree with it, is not a checkpoint.
"""

import dataclasses
import importlib.metadata
import json
import logging
import math
import platform
import re
import time
import urllib.parse
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

import nag_jax
from nag_jax.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
FOLDER_NAME = "checkpoints"

_ORBAX_METADATA = "_CHECKPOINT_METADATA"  # Orbax rewrites it at commit, after the manifest
_STEP_NAME = re.compile(r"\d+")
_LEFTOVER_NAME = re.compile(r"(\d+)\.(orbax-checkpoint-tmp|deleting)")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_CHUNK = 1 << 24

PyTree = Any
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
        # Behind the reason, tensorstore appends a page of its own configuration.
        reason = " ".join(str(cause).split(" [tensorstore_spec")[0].split())[:300]
        reason = reason or type(cause).__name__
        rest = (
            "there is no earlier checkpoint"
            if last_good is None
            else f"the last good checkpoint is step {last_good}"
        )
        super().__init__(
            f"saving the checkpoint of step {step} in {folder} failed ({reason}); {rest}"
        )


class _Damaged(Exception):
    """Why a folder is not a usable checkpoint."""


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
          checksums: whether restoring compares checksums too (sizes are always compared). It reads
            each file once more.
          say: receives one sentence for each damaged checkpoint that is passed over.
        """
        self.folder = absolute(folder)
        self._checksums = checksums
        self._say = say
        self._damaged: dict[int, str] = {}

    def steps(self) -> tuple[int, ...]:
        """The steps whose checkpoints have every file at its full size, ascending."""
        return tuple(step for step in self._named_steps() if self._is_complete(step))

    def is_empty(self) -> bool:
        """Whether nothing here is even named like a step, so that a run may start afresh."""
        return not self._named_steps()

    def saved_shapes(self, step: int) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """Shapes and dtypes as saved: item name -> path in the item -> shape and dtype."""
        return {
            item: {
                path: jax.ShapeDtypeStruct(tuple(leaf["shape"]), jnp.dtype(leaf["dtype"]))
                for path, leaf in leaves.items()
            }
            for item, leaves in self._intact(step, only=())["items"].items()
        }

    def metric(self, step: int) -> float | None:
        """The metric given when the step was saved."""
        return self._intact(step, only=())["metric"]

    def read_documents(self, step: int) -> dict[str, bytes]:
        """The small files of a step by name ("config.json", "tokenizer/tokenizer.json", ...)."""
        manifest = self._intact(step, only=())
        return {name: (self._path(step) / name).read_bytes() for name in manifest["documents"]}

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
        if step is None:
            step, manifest = self._newest_intact(tuple(abstract))
        else:
            manifest = self._intact(step, only=tuple(abstract))
        wanted = {item: _leaves(tree) for item, tree in abstract.items()}
        differences = _differences(manifest["items"], wanted)
        if differences:
            raise UserError(
                f"checkpoint {self._path(step)} does not fit what is asked of it:\n"
                + "\n".join(differences)
            )
        loaded = self._load(step, wanted)
        return step, {item: _unflatten(tree, loaded[item]) for item, tree in abstract.items()}

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
        """
        if step is None:
            step, manifest = self._newest_intact(tuple(values))
        else:
            manifest = self._intact(step, only=tuple(values))
        kept, new, dropped = [], [], []
        chosen: dict[str, dict[str, Any]] = {}
        for item, tree in values.items():
            saved = manifest["items"].get(item, {})
            leaves = _leaves(tree)
            fits = {
                path for path in leaves.keys() & saved.keys() if _fits(saved[path], leaves[path])
            }
            chosen[item] = {path: _abstract(leaves[path]) for path in leaves if path in fits}
            kept += [f"{item}/{path}" for path in leaves if path in fits]
            new += [f"{item}/{path}" for path in leaves if path not in fits]
            dropped += [f"{item}/{path}" for path in saved if path not in fits]
        loaded = self._load(step, chosen)
        items = {
            item: _unflatten(tree, {**_leaves(tree), **loaded[item]})
            for item, tree in values.items()
        }
        return step, items, Carried(tuple(kept), tuple(new), tuple(dropped))

    def _path(self, step: int) -> epath.Path:
        return self.folder / f"{step:08d}"

    def _named_steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return sorted(
            int(path.name)
            for path in self.folder.iterdir()
            if _STEP_NAME.fullmatch(path.name) and path.name == f"{int(path.name):08d}"
        )

    def _is_complete(self, step: int) -> bool:
        if step in self._damaged:
            return False
        try:
            self._check(step, only=(), checksums=False)
        except _Damaged:
            return False
        return True

    def _check(self, step: int, *, only: tuple[str, ...], checksums: bool) -> dict[str, Any]:
        """Compares a step folder with its manifest.

        Args:
          step: the step.
          only: the items whose files are to be checksummed; documents always are.
          checksums: whether anything is checksummed.

        Returns:
          The manifest.
        """
        path = self._path(step)
        manifest = _read_manifest(path, step)
        files = manifest["files"]
        for name, recorded in files.items():
            try:
                size = (path / name).stat().length
            except OSError:
                raise _Damaged(f"{path / name} is missing") from None
            if size != recorded["size"]:
                raise _Damaged(
                    f"{path / name} has {size} bytes where {recorded['size']} were written"
                )
        if checksums:
            documents = set(manifest["documents"])
            names = [n for n in files if n in documents or n.split("/")[0] in only]
            with ThreadPoolExecutor() as pool:
                sums = pool.map(lambda name: _checksum(path / name), names)
                for name, value in zip(names, sums, strict=True):
                    if value != files[name]["crc32"]:
                        raise _Damaged(f"{path / name} has changed since it was written")
        return manifest

    def _intact(self, step: int, *, only: tuple[str, ...]) -> dict[str, Any]:
        if not self._path(step).exists():
            there = ", ".join(map(str, self.steps())) or "none"
            raise UserError(f"there is no checkpoint of step {step} in {self.folder} ({there})")
        try:
            return self._check(step, only=only, checksums=self._checksums)
        except _Damaged as damage:
            self._damaged[step] = str(damage)
            raise UserError(f"the checkpoint of step {step} is damaged: {damage}") from None

    def _newest_intact(self, only: tuple[str, ...]) -> tuple[int, dict[str, Any]]:
        reasons = []
        for step in reversed(self._named_steps()):
            try:
                manifest = self._check(step, only=only, checksums=self._checksums)
            except _Damaged as damage:
                self._damaged[step] = str(damage)
                reasons.append(f"step {step}: {damage}")
                continue
            for reason in reasons:
                self._say(f"Passed over a damaged checkpoint, {reason}.")
            if reasons:
                self._say(f"Using the checkpoint of step {step}, the newest that is intact.")
            return step, manifest
        if reasons:
            raise UserError(
                f"no checkpoint in {self.folder} is intact ({'; '.join(reasons)}); move the folder"
                " away to start from the beginning"
            )
        raise UserError(f"there is no checkpoint in {self.folder}")

    def _load(
        self, step: int, wanted: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, jax.Array]]:
        loaded = {}
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            for item, leaves in wanted.items():
                if not leaves:
                    loaded[item] = {}
                    continue
                tree = _nest({path: _abstract(leaf) for path, leaf in leaves.items()})
                restored = checkpointer.restore(
                    self._path(step) / item,
                    args=ocp.args.PyTreeRestore(
                        item=tree,
                        restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
                        partial_restore=True,
                    ),
                )
                loaded[item] = _leaves(restored, escaped=True)
        return loaded


class Checkpoints(CheckpointReader):
    """Writes checkpoints asynchronously and deletes those that no rule keeps.

    Every process of a run makes one and calls it alike; process 0 writes the documents and deletes.
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
        self._primary = jax.process_index() == 0
        if self._primary:
            _require_writable(self.folder)
            self._clear_leftovers()
        self._metrics = {step: self.metric(step) for step in self.steps()}
        self._sealer = _SealingHandler()
        self._checkpointer = ocp.AsyncCheckpointer(self._sealer)
        self._pending: _Pending | None = None
        self._failure: SaveFailed | None = None
        logging.getLogger("absl").addFilter(_no_orbax_traceback)

    def is_marked(self, step: int) -> bool:
        """Whether the rules keep this step for good, so that it should be saved."""
        if step in self._keep_steps:
            return True
        if self._keep_log_spaced == 0 or step < 1:
            return False
        power = math.floor(math.log2(step) * self._keep_log_spaced)
        # A power just below the step may round up to it.
        return step in {math.ceil(2 ** (i / self._keep_log_spaced)) for i in (power - 1, power)}

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
        items = {item: _leaves(tree) for item, tree in arrays.items()}
        pending = _Pending(
            step=step,
            metric=None if metric is None or not math.isfinite(metric) else float(metric),
            items={
                item: {path: _describe(leaf) for path, leaf in leaves.items()}
                for item, leaves in items.items()
            },
            documents=_encoded({**documents, "versions.json": _versions()}, reserved=set(items)),
        )
        self._sealer.pending = pending
        composite = _SealedItems(
            **{item: ocp.args.PyTreeSave(_nest(leaves)) for item, leaves in items.items() if leaves}
        )
        try:
            # What stands in the way here is damaged: a complete step has returned above.
            self._checkpointer.save(self._path(step), args=composite, force=True)
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
        if (self._path(self._pending.step) / MANIFEST).exists():
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
        try:
            self._checkpointer.wait_until_finished()
            self._check(self._pending.step, only=(), checksums=False)
        except Exception as error:
            self._fail(self._pending.step, error)
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
        last_good = max(self._metrics, default=None)
        self._failure = SaveFailed(self.folder, step, last_good, error)
        raise self._failure from error

    def _committed(self) -> None:
        self._metrics[self._pending.step] = self._pending.metric
        self._damaged.pop(self._pending.step, None)
        self._pending = None
        for step in set(self._metrics) - self._kept():
            del self._metrics[step]
            if self._primary:
                # Renamed first: a folder that is half deleted must not look like a step.
                doomed = self.folder / f"{step:08d}.deleting"
                self._path(step).rename(doomed)
                doomed.rmtree()

    def _kept(self) -> set[int]:
        steps = sorted(self._metrics)
        measured = [step for step in reversed(steps) if self._metrics[step] is not None]
        best = sorted(measured, key=self._metrics.__getitem__)[: self._keep_best]
        marked = [step for step in steps if self.is_marked(step)]
        return {*steps[-self._keep_last :], *best, *marked}

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
    """The path with `~` expanded, made absolute."""
    return epath.Path(path).expanduser().absolute()


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
    if (path / MANIFEST).exists() or re.fullmatch(r"\d{8,}", path.name):
        if not _STEP_NAME.fullmatch(path.name):
            raise UserError(
                f"{path} is a checkpoint under a name that is not its step; rename it to"
                f" {_read_manifest(path, None)['step']:08d}"
            )
        return path.parent, int(path.name)
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
    return {f"{prefix}/{name}": (folder / name).read_bytes() for name in _files(folder)}


@dataclasses.dataclass(frozen=True)
class _Pending:
    """The save in progress: all that the manifest will say beside the files."""

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
        pending = self.pending
        for name, content in pending.documents.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)
        files = {
            name: {"size": (directory / name).stat().length, "crc32": _checksum(directory / name)}
            for name in _files(directory)
            if name != _ORBAX_METADATA
        }
        content = {
            "format": FORMAT,
            "step": pending.step,
            "metric": pending.metric,
            "saved_at": time.time(),
            "documents": sorted(pending.documents),
            "items": pending.items,
            "files": files,
        }
        sealed = {"crc32": _manifest_checksum(content), **content}
        (directory / MANIFEST).write_text(json.dumps(sealed, indent=1))


@ocp.args.register_with_handler(_SealingHandler, for_save=True, for_restore=True)
class _SealedItems(ocp.args.Composite):
    """The arguments by which Orbax finds `_SealingHandler`."""


def _read_manifest(path: epath.Path, step: int | None) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise _Damaged(
            f"{path} has no readable {MANIFEST}, the file that ends every checkpoint"
        ) from error
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise _Damaged(f"{path / MANIFEST} is not a checkpoint's manifest")
    crc = manifest.pop("crc32", None)
    if crc != _manifest_checksum(manifest):
        raise _Damaged(f"{path / MANIFEST} has changed since it was written")
    if manifest["format"] != FORMAT:
        raise UserError(
            f"{path} has checkpoint format {manifest['format']}; this nag_jax"
            f" {nag_jax.__version__} reads format {FORMAT}"
        )
    if step is not None and manifest["step"] != step:
        raise _Damaged(f"{path} was saved as step {manifest['step']}")
    return manifest


def _manifest_checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _checksum(path: epath.Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def _files(folder: epath.Path, prefix: str = "") -> list[str]:
    """Names of all files under a folder, relative to it, sorted."""
    names = []
    for path in sorted(folder.iterdir()):
        name = prefix + path.name
        names += _files(path, name + "/") if path.is_dir() else [name]
    return names


def _leaves(tree: PyTree, *, escaped: bool = False) -> dict[str, Any]:
    """Path ("layers/query", "0/mu/table") -> leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
    if escaped:
        leaves = {urllib.parse.unquote(path): leaf for path, leaf in leaves.items()}
    if len(leaves) != len(flat) or "" in leaves:
        raise ValueError("the leaves of a checkpoint item need distinct paths that are not empty")
    return leaves


def _unflatten(tree: PyTree, leaves: Mapping[str, Any]) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves[path] for path in _leaves(tree)])


def _nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Plain nested dicts: what is on disk then depends on no optimizer's class.

    Orbax joins names with dots, so that {"a.b": x} and {"a": {"b": y}} would overwrite each other:
    dots inside a name are escaped, and `_leaves(_nest(leaves), escaped=True)` is the inverse.
    """
    nested: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.replace("%", "%25").replace(".", "%2E").split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return nested


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _describe(leaf: Any) -> dict[str, Any]:
    return {"shape": list(np.shape(leaf)), "dtype": str(jnp.result_type(leaf))}


def _fits(saved: Mapping[str, Any], leaf: Any) -> bool:
    if tuple(saved["shape"]) != tuple(leaf.shape):
        return False
    here, there = jnp.dtype(saved["dtype"]), jnp.dtype(leaf.dtype)
    floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (here, there))
    return floating or here == there


def _differences(
    saved: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Lines telling what is missing, extra, or of another shape or kind of number."""

    def text(leaf: Any) -> str:
        described = leaf if isinstance(leaf, Mapping) else _describe(leaf)
        return f"{described['dtype']}{described['shape']}"

    missing, extra, changed = [], [], []
    for item, leaves in wanted.items():
        there = saved.get(item, {})
        for path, leaf in leaves.items():
            name = f"{item}/{path}"
            if path not in there:
                missing.append(f"  not in the checkpoint: {name} {text(leaf)}")
            elif not _fits(there[path], leaf):
                changed.append(f"  differs: {name} saved {text(there[path])}, asked {text(leaf)}")
        extra += [
            f"  only in the checkpoint: {item}/{path} {text(leaf)}"
            for path, leaf in there.items()
            if path not in leaves
        ]
    lines = []
    for kind in (changed, missing, extra):
        lines += kind[:20] + ([f"  ... and {len(kind) - 20} more"] if len(kind) > 20 else [])
    return lines


def _encoded(documents: Mapping[str, str | bytes], reserved: set[str]) -> dict[str, bytes]:
    for name in documents:
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or parts[0] in {"/", MANIFEST, _ORBAX_METADATA, *reserved}:
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


def _no_orbax_traceback(record: logging.LogRecord) -> bool:
    """Drops the traceback that Orbax logs for a failed save; SaveFailed tells it in a sentence."""
    return "orbax" not in record.pathname or record.levelno < logging.ERROR
