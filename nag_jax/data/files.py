"""Which files a source's `paths` name, and how each is opened as a stream of bytes.

Decoding, lines and records are the sources' business.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

from etils import epath

from nag_jax.errors import UserError

_WILDCARD = re.compile(r"[*?\[]")


class SourceFile(NamedTuple):
    """A file and its name within the corpus.

    Attributes:
      path: absolute.
      name: relative to the part of the pattern without wildcards, so that it is the same on every
        machine that holds the corpus.
    """

    path: epath.Path
    name: str


def absolute(path: str) -> epath.Path:
    """The path with `~` expanded, made absolute; remote paths ("gs://...") stay as they are."""
    expanded = epath.Path(path).expanduser()
    return expanded if "://" in str(path) else epath.Path(os.path.abspath(expanded))


def find(paths: Sequence[str], key: str) -> list[SourceFile]:
    """The files that paths and patterns name: in the order given, each pattern's files sorted.

    Args:
      paths: files or patterns with `*`, `?`, `[...]`, `**`.
      key: the config key they come from, named in errors.

    Raises:
      UserError: no path at all, no such file, a folder, or a pattern that matches no file.
    """
    if not any(paths):
        raise UserError(f"{key} is empty: name at least one file or pattern")
    found: dict[str, SourceFile] = {}
    names: set[str] = set()
    for pattern in paths:
        for path, name in _matches(pattern, key):
            if str(path) not in found:
                # Equal names from two folders would make one document of two in every report.
                name = str(path) if name in names else name
                names.add(name)
                found[str(path)] = SourceFile(path, name)
    return list(found.values())


def _matches(pattern: str, key: str) -> list[SourceFile]:
    path = absolute(pattern)
    if path.exists():
        if path.is_dir():
            raise UserError(f"{key}: {path} is a folder; name files, or a pattern as {path}/*")
        return [SourceFile(path, path.name)]
    parts = path.parts
    first = next((i for i, part in enumerate(parts) if _WILDCARD.search(part)), None)
    if first is None:
        raise UserError(f"{key}: there is no file {path}")
    root = epath.Path(*parts[:first])
    try:
        # epath's own glob refuses `**`, as it would be slow on remote folders.
        glob = root.glob if "://" in str(path) else pathlib.Path(root).glob
        matches = [epath.Path(match) for match in glob("/".join(parts[first:]))]
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"{key}: {path} is not a pattern that can be searched: {error}") from error
    files = sorted(match for match in matches if match.is_file())
    if not files:
        raise UserError(f"{key}: no file matches {path}")
    return [SourceFile(file, file.relative_to(root).as_posix()) for file in files]


def stamp(path: epath.Path) -> str:
    """Path, size and time of change: a cheap sign that a file is the one read before.

    Raises:
      UserError: the file is gone.
    """
    try:
        if "://" in str(path):
            stat = path.stat()
            return f"{path} {stat.length} {stat.mtime}"
        stat = os.stat(path)
        return f"{path} {stat.st_size} {stat.st_mtime_ns}"
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def open_bytes(path: epath.Path) -> Iterator[BinaryIO]:
    """Opens a file for streaming; `.gz` and `.zst` are decompressed.

    Raises:
      UserError: the file cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        try:
            stream = stack.enter_context(path.open("rb"))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
        if path.suffix == ".gz":
            stream = stack.enter_context(gzip.GzipFile(fileobj=stream))
        elif path.suffix == ".zst":
            import pyarrow

            # Unlike the zstandard package's reader, this one does not take a truncated file for
            # one that ends there.
            reader = pyarrow.CompressedInputStream(pyarrow.PythonFile(stream), "zstd")
            stream = stack.enter_context(io.BufferedReader(reader))
        yield stream
