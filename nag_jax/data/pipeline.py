"""Batches: rows shuffled anew each epoch, read ahead by threads, shared out among processes.

The row at position p of training is a function of the seed and p alone, whatever the batch size,
the number of processes or where a run was resumed; so the position to save is the number of rows
consumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import grain
import numpy as np

from nag_jax.errors import UserError

Batch = dict[str, np.ndarray]

_THREADS = 4


class TrainingStream(Iterator[Batch]):
    """Endless batches: all rows of each global batch, or those that one process needs.

    A batch holds tokens and segment_ids, int32 [rows, T + 1], and valid, bool of the same shape,
    False at padding.

    Args:
      rows: the training rows, by index.
      seed: decides the order.
      start_row: position of the first row, counted over all processes since training began.
      batch_size: B, rows in a global batch.
      prefetch: rows read ahead by threads; 0 reads when asked.
      local_rows: which of the B rows to read, ascending; all by default.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, np.ndarray]],
        seed: int,
        start_row: int,
        batch_size: int,
        prefetch: int = 256,
        local_rows: Sequence[int] | None = None,
    ):
        if not len(rows):
            raise UserError("there is no training row")
        self._num_rows = len(rows)
        offsets = range(batch_size) if local_rows is None else local_rows
        shuffled = _shuffled(grain.MapDataset.source(rows), seed)
        slices = _Slices(shuffled, start_row, batch_size, [int(row) for row in offsets])
        ahead = -(-prefetch // len(offsets))  # in batches
        options = grain.ReadOptions(num_threads=min(_THREADS, ahead), prefetch_buffer_size=ahead)
        self._batches = iter(grain.MapDataset.source(slices).to_iter_dataset(options))

    def epoch_of(self, row: int) -> int:
        """The epoch, from 0, of the row at a position of training."""
        return row // self._num_rows

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        """Stops the threads; no batch can be asked for after."""
        self._batches.close()

    def __enter__(self) -> TrainingStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Slices:
    """Random access to some rows of each global batch, as grain reads a source."""

    def __init__(self, shuffled: Any, first: int, stride: int, offsets: Sequence[int]):
        self._shuffled, self._first, self._stride = shuffled, first, stride
        self._offsets = offsets

    def __len__(self) -> int:
        return 2**48  # endless, within what grain counts

    def __getitem__(self, index: int) -> Batch:
        begin = self._first + index * self._stride
        # Past its length the shuffled data set goes on into the next epoch, in a new order.
        return _stack([self._shuffled[begin + offset] for offset in self._offsets])


def first_rows(num_rows: int, seed: int, count: int) -> list[int]:
    """Which rows a run of this seed is trained on first, in order; at most all of them."""
    shuffled = _shuffled(grain.MapDataset.range(num_rows), seed)
    return [int(shuffled[i]) for i in range(min(count, num_rows))]


def _shuffled(dataset: Any, seed: int) -> Any:
    return dataset.shuffle(seed=_shuffle_seed(seed))


def _shuffle_seed(seed: int) -> int:
    """Grain adds the epoch to its seed: hashed, seed 0 in epoch 1 is not seed 1 in epoch 0."""
    digest = hashlib.blake2b(f"rows {seed}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _stack(rows: Sequence[dict[str, np.ndarray]], keys: Sequence[str] = ()) -> Batch:
    batch = {key: np.stack([row[key] for row in rows]) for key in ("tokens", "segment_ids", *keys)}
    batch["valid"] = batch["segment_ids"] > 0
    return batch


def evaluation_batches(rows: Sequence[dict[str, np.ndarray]], batch_size: int) -> Iterator[Batch]:
    """Every row once, in order; the last batch is filled with rows that are padding throughout.

    Every process reads them all: the validation set is small, and scores belong to documents,
    which must be known everywhere.

    Args:
      rows: with documents, as the store's validation rows.
      batch_size: B, rows in a batch.

    Yields:
      tokens, segment_ids and documents, int32 [B, T + 1], and valid, bool.
    """
    for begin in range(0, len(rows), batch_size):
        present = [rows[i] for i in range(begin, min(begin + batch_size, len(rows)))]
        empty = {
            "tokens": np.zeros(rows.row_length + 1, np.int32),
            "segment_ids": np.zeros(rows.row_length + 1, np.int32),
            "documents": np.full(rows.row_length + 1, -1, np.int32),
        }
        yield _stack(present + [empty] * (batch_size - len(present)), ("documents",))
