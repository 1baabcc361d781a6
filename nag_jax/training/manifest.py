"""The manifest of a checkpoint: sizes and checksums of its files, and what its arrays look like.

It is written when everything else is on disk, so a folder without one is not a checkpoint, and a
file that disagrees with it has been cut short or changed.
"""

import json
import time
import zlib
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from etils import epath

import nag_jax
from nag_jax.errors import UserError

FORMAT = 1
FILE_NAME = "manifest.json"

_CHUNK = 1 << 24


class Damaged(Exception):
    """Why a folder is not a usable checkpoint, naming the file."""


def seal(
    folder: epath.Path,
    *,
    step: int,
    metric: float | None,
    items: dict[str, dict[str, dict[str, Any]]],
    documents: Collection[str],
    unsealed: Collection[str],
) -> None:
    """Writes the manifest of a folder that is complete.

    Args:
      folder: the folder.
      step: the step it was saved at.
      metric: what decides which step is best.
      items: item name -> path of each leaf -> {"shape": ..., "dtype": ...}.
      documents: names of the small files that are no item's.
      unsealed: names of files that may change afterwards.
    """
    files = {
        name: {"size": (folder / name).stat().length, "crc32": _checksum(folder / name)}
        for name in files_under(folder)
        if name not in unsealed
    }
    content = {
        "format": FORMAT,
        "step": step,
        "metric": metric,
        "saved_at": time.time(),
        "documents": sorted(documents),
        "items": items,
        "files": files,
    }
    sealed = {"crc32": _own_checksum(content), **content}
    (folder / FILE_NAME).write_text(json.dumps(sealed, indent=1))


def read(folder: epath.Path, step: int) -> dict[str, Any]:
    """Reads a step's manifest and finds each file it names, at its full size.

    Raises:
      Damaged: a file is missing, cut short, or belongs to another step.
      UserError: another version of the format wrote it.
    """
    path = folder / FILE_NAME
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Damaged(f"{path}, the file that ends every checkpoint, cannot be read") from error
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise Damaged(f"{path} is not a checkpoint's manifest")
    if manifest.pop("crc32", None) != _own_checksum(manifest):
        raise Damaged(f"{path} has changed since it was written")
    if manifest["format"] != FORMAT:
        raise UserError(
            f"{folder} has checkpoint format {manifest['format']}; this nag_jax"
            f" {nag_jax.__version__} reads format {FORMAT}"
        )
    if manifest["step"] != step:
        raise Damaged(f"{folder} was saved as step {manifest['step']}")
    for name, recorded in manifest["files"].items():
        try:
            size = (folder / name).stat().length
        except OSError:
            raise Damaged(f"{folder / name} is missing") from None
        if size != recorded["size"]:
            raise Damaged(f"{folder / name} has {size} bytes where {recorded['size']} were written")
    return manifest


def check_content(folder: epath.Path, manifest: dict[str, Any], parts: Collection[str]) -> None:
    """Compares checksums of whole items and of documents with the manifest.

    Args:
      folder: the step folder.
      manifest: its manifest.
      parts: names of items and documents to check.

    Raises:
      Damaged: a file has changed.
    """
    files = manifest["files"]
    names = [name for name in files if name in parts or name.split("/")[0] in parts]
    with ThreadPoolExecutor() as pool:
        sums = pool.map(lambda name: _checksum(folder / name), names)
        for name, value in zip(names, sums, strict=True):
            if value != files[name]["crc32"]:
                raise Damaged(f"{folder / name} has changed since it was written")


def files_under(folder: epath.Path, prefix: str = "") -> list[str]:
    """Names of all files under a folder, relative to it, sorted."""
    names = []
    for path in sorted(folder.iterdir()):
        name = prefix + path.name
        names += files_under(path, name + "/") if path.is_dir() else [name]
    return names


def _checksum(path: epath.Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def _own_checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
