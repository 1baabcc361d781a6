"""Rows: documents laid end to end and cut to a fixed length, and a row's bytes on disk.

A row holds T + 1 tokens, so that it gives T inputs and T targets. Nothing here reads text or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from nag_jax.errors import UserError


class Row(NamedTuple):
    """One row before it is written.

    Attributes:
      tokens: T + 1 token ids; padding holds BOS.
      lengths: tokens in each segment, in order; what they leave of T + 1 is padding.
      documents: index of the document that each segment belongs to.
      continues: whether the row's first segment continues a document cut by the row before.
      next_document: document whose tokens come after this row.
      next_offset: how many of that document's tokens this row and those before it hold.
    """

    tokens: Int32[np.ndarray, " row"]
    lengths: list[int]
    documents: list[int]
    continues: bool
    next_document: int
    next_offset: int


class Packer:
    """Lays documents end to end and cuts them into rows of `row_length` + 1 tokens.

    BOS is first in each row and first in each document. A document that goes on in the next row
    goes on after that row's BOS; a document that begins a row shares its BOS with the row. So each
    document token is a target exactly once, and the last row alone is padded.
    """

    def __init__(self, row_length: int, bos_id: int):
        self._size = row_length + 1
        self._bos_id = bos_id
        self._begin_row()

    def _begin_row(self) -> None:
        self._tokens = np.full(self._size, self._bos_id, np.int32)
        self._fill = 0
        self._lengths: list[int] = []
        self._documents: list[int] = []
        self._continues = False

    def _begin_segment(self, document: int) -> None:
        self._lengths.append(1)  # its BOS, which is there already
        self._documents.append(document)
        self._fill += 1

    def _end_row(self, document: int, offset: int) -> Row:
        row = Row(self._tokens, self._lengths, self._documents, self._continues, document, offset)
        self._begin_row()
        return row

    def add(self, document: int, tokens: Int32[np.ndarray, " n"], start: int = 0) -> Iterator[Row]:
        """Adds one document and gives the rows that it completes.

        Args:
          document: its index.
          tokens: its tokens without BOS, at least one after `start`.
          start: how many of them earlier rows hold; not 0 only in a fresh packer that goes on
            where another stopped.
        """
        offset = start
        if self._fill == self._size:
            yield self._end_row(document, 0)
        self._continues = self._continues or start > 0
        self._begin_segment(document)
        while offset < len(tokens):
            if self._fill == self._size:
                yield self._end_row(document, offset)
                self._continues = offset > 0
                self._begin_segment(document)
            count = min(self._size - self._fill, len(tokens) - offset)
            self._tokens[self._fill : self._fill + count] = tokens[offset : offset + count]
            self._fill += count
            self._lengths[-1] += count
            offset += count

    def finish(self) -> Iterator[Row]:
        """Gives the last row, padded, if any document is in it."""
        if self._fill:
            yield self._end_row(self._documents[-1] + 1, 0)


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest stored type of a token id: little-endian, 2 or 4 bytes."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def to_record(row: Row, dtype: np.dtype) -> bytes:
    """The row's bytes: the number of segments, their lengths, their documents, the tokens."""
    header = np.array([len(row.lengths), *row.lengths, *row.documents], "<u4")
    return header.tobytes() + row.tokens.astype(dtype).tobytes()


def from_record(record: bytes, dtype: np.dtype) -> dict[str, Int32[np.ndarray, " row"]]:
    """A row as training reads it.

    Returns:
      tokens: int32 [T + 1].
      segment_ids: int32 [T + 1]; 1, 2, ... in order within the row, 0 at padding.
      documents: int32 [T + 1]; the document's index, -1 at padding.
    """
    count = int(np.frombuffer(record, "<u4", 1)[0])
    lengths = np.frombuffer(record, "<u4", count, offset=4)
    indices = np.frombuffer(record, "<u4", count, offset=4 + 4 * count)
    tokens = np.frombuffer(record, dtype, offset=4 + 8 * count).astype(np.int32)
    segment_ids = np.zeros(len(tokens), np.int32)
    documents = np.full(len(tokens), -1, np.int32)
    used = int(lengths.sum())
    segment_ids[:used] = np.repeat(np.arange(1, count + 1, dtype=np.int32), lengths)
    documents[:used] = np.repeat(indices.astype(np.int32), lengths)
    return {"tokens": tokens, "segment_ids": segment_ids, "documents": documents}


class MemoryRows:
    """Rows kept in memory, with the documents that they hold.

    Indexing gives a dict as `from_record` does.

    Attributes:
      row_length: T.
      bos_id: the token that begins rows and documents, and is in no document.
      document_names: names by document index.
      document_bytes: int64 [documents]; UTF-8 bytes of each document's original text.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        row_length: int,
        bos_id: int,
        names: list[str],
        byte_counts: list[int],
    ):
        # The record is the compact form; a row is expanded when it is asked for.
        self._dtype = np.dtype("<u4")
        self._records = [to_record(row, self._dtype) for row in rows]
        self.row_length = row_length
        self.bos_id = bos_id
        self.document_names = names
        self.document_bytes = np.array(byte_counts, np.int64)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Int32[np.ndarray, " row"]]:
        return from_record(self._records[index], self._dtype)


def utf8_length(text: str, where: str) -> int:
    """UTF-8 bytes of the text: the divisor of bits per byte, whatever the tokenizer.

    Raises:
      UserError: the text is not Unicode that can be written, such as half of a surrogate pair.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: the text has half of a surrogate pair, not a character"
        ) from error


def pack(documents: Iterable[tuple[str, str]], tokenizer, row_length: int) -> MemoryRows:
    """Packs texts in memory, as the store packs its validation set; for evaluation on any texts.

    Args:
      documents: pairs (name, text); a text without a token is left out.
      tokenizer: one of `nag_jax.data.tokenizers`.
      row_length: T.

    Returns:
      The rows, with names and byte counts of the documents that have tokens.
    """
    packer = Packer(row_length, tokenizer.bos_id)
    names: list[str] = []
    byte_counts: list[int] = []

    def rows() -> Iterator[Row]:
        for name, text in documents:
            size = utf8_length(text, name)
            (tokens,) = tokenizer.encode_batch([text])
            if len(tokens):
                yield from packer.add(len(names), tokens)
                names.append(name)
                byte_counts.append(size)
        yield from packer.finish()

    return MemoryRows(rows(), row_length, tokenizer.bos_id, names, byte_counts)
