"""Rows on disk: ArrayRecord files that appear whole or not at all, and random access to them.

A shard is written beside its place and renamed into it, then a small JSON file is put beside it
that says what it holds: only with that file does the shard count as finished.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from array_record.python import array_record_data_source, array_record_module
from etils import epath
from jaxtyping import Int32

from nag_jax.data.packing import Row, from_record, to_record, token_dtype
from nag_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Shard:
    """A finished shard.

    Attributes:
      file: its name in the store's folder.
      rows: how many it holds.
      size: its bytes.
      state: what the writer knew after its last row.
    """

    file: str
    rows: int
    size: int
    state: dict[str, Any]


@contextlib.contextmanager
def named_errors(path: epath.Path) -> Iterator[None]:
    """Turns a failure to write into a UserError that names the path."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


def write_text(path: epath.Path, text: str) -> None:
    """Writes a small file whole or not at all.

    Raises:
      UserError: it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with named_errors(path):
        temporary.write_text(text)
        temporary.replace(path)


class ShardWriter:
    """Writes rows into shards of `rows_per_shard`, numbered from `first`.

    One writer at a time may work in a folder.
    """

    def __init__(
        self, folder: epath.Path, split: str, vocab_size: int, rows_per_shard: int, first: int = 0
    ):
        self._folder, self._split = folder, split
        self._dtype = token_dtype(vocab_size)
        self._rows_per_shard = rows_per_shard
        self._number = first
        self._rows = 0
        self._writer: Any = None
        self._temporary = folder / f"{split}.tmp"

    def write(self, row: Row, state: dict[str, Any]) -> Shard | None:
        """Adds a row; returns the shard if this row completes one.

        Raises:
          UserError: the disk is full, or another failure to write.
        """
        try:
            if self._writer is None:
                self._writer = array_record_module.ArrayRecordWriter(
                    str(self._temporary), "group_size:1"
                )
            self._writer.write(to_record(row, self._dtype))
        except (OSError, RuntimeError) as error:
            raise self._failed(error) from error
        self._rows += 1
        return self.finish(state) if self._rows == self._rows_per_shard else None

    def finish(self, state: dict[str, Any]) -> Shard | None:
        """Finishes the shard in hand, if any row is in it."""
        if self._writer is None:
            return None
        path = self._folder / f"{self._split}-{self._number:05d}.array_record"
        try:
            writer, self._writer = self._writer, None
            writer.close()  # small shards are written only now
            shard = Shard(path.name, self._rows, self._temporary.stat().length, state)
            self._temporary.replace(path)
        except (OSError, RuntimeError) as error:
            raise self._failed(error) from error
        write_text(path.with_suffix(".json"), json.dumps(dataclasses.asdict(shard)))
        self._number += 1
        self._rows = 0
        return shard

    def _failed(self, error: Exception) -> UserError:
        self._writer = None
        self._temporary.unlink(missing_ok=True)
        path = self._folder / f"{self._split}-{self._number:05d}.array_record"
        return UserError(
            f"writing {path} failed: {error}; {self._number} finished shards are kept, and the "
            "same command goes on after them"
        )


def finished_shards(folder: epath.Path, split: str) -> list[Shard]:
    """The finished shards of a split from number 0 on, up to the first that is not whole."""
    shards: list[Shard] = []
    for number in itertools.count():
        path = folder / f"{split}-{number:05d}.array_record"
        try:
            shard = Shard(**json.loads(path.with_suffix(".json").read_text()))
            if path.stat().length != shard.size:
                return shards
        except (OSError, ValueError, TypeError):
            return shards
        shards.append(shard)
    raise AssertionError("count() has no end")


class StoredRows:
    """Random access to the rows of finished shards; safe for several threads.

    Indexing gives a dict of int32 [T + 1] arrays: tokens and segment_ids, and documents (the index
    in `document_names`, -1 at padding) where the names are known.

    Attributes:
      row_length: T.
      bos_id: the token that begins rows and documents, and is in no document.
      document_names: names by document index; empty for training rows.
      document_bytes: int64 [documents]; UTF-8 bytes of each document's original text.
    """

    def __init__(
        self,
        folder: epath.Path,
        shards: Sequence[Shard],
        row_length: int,
        vocab_size: int,
        bos_id: int,
        document_names: Sequence[str] = (),
        document_bytes: Sequence[int] = (),
    ):
        """Opens the shards.

        Raises:
          UserError: one of them is missing or has not the size that was written.
        """
        self.row_length = row_length
        self.bos_id = bos_id
        self.document_names = list(document_names)
        self.document_bytes = np.array(document_bytes, np.int64)
        self._dtype = token_dtype(vocab_size)
        self._folder = folder
        self._files = [shard.file for shard in shards]
        self._ends = list(itertools.accumulate(shard.rows for shard in shards))
        for shard in shards:
            path = folder / shard.file
            size = path.stat().length if path.exists() else 0
            if size != shard.size:
                raise self._damaged(shard.file, f"it has {size} of {shard.size} bytes")
        # Counts are given, so that no file is opened before it is read.
        paths = [f"{folder / shard.file}[0:{shard.rows}]" for shard in shards]
        self._source = array_record_data_source.ArrayRecordDataSource(paths) if paths else None

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Int32[np.ndarray, " row"]]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        try:
            row = from_record(self._source[index], self._dtype)
        except (RuntimeError, OSError, ValueError) as error:
            file = self._files[bisect.bisect_right(self._ends, index)]
            raise self._damaged(file, str(error)) from error
        if not self.document_names:
            del row["documents"]
        return row

    def _damaged(self, file: str, reason: str) -> UserError:
        return UserError(
            f"{self._folder / file} is damaged ({reason}); remove the folder {self._folder}, "
            "and it is prepared anew"
        )
