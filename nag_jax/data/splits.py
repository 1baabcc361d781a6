"""Which documents are held out for validation, and which of these form the validation set.

Both follow from the documents' names alone, so they are the same at every run and every seed.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator
from typing import NamedTuple

from nag_jax.data.sources import Document


def name_hash(name: str) -> int:
    """64 bits of BLAKE2b of the name: what places a document."""
    data = name.encode(errors="surrogateescape")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


class Split:
    """Sorts documents into training and held out.

    A document is held out where the hash of its name lies in the lowest `share` of all hashes.
    Where the names are known beforehand, few documents still give both parts: the lowest hash is
    held out if none is low enough, the highest is trained on if all are; and a document that is the
    whole corpus is cut at a line's end, its last `share` held out.
    """

    def __init__(self, share: float, names: list[str] | None):
        self._limit = int(share * 2**64)
        self._share = share
        self._moved: frozenset[str] = frozenset()
        self._cut = bool(share) and names is not None and len(names) == 1
        if share and names is not None and len(names) > 1:
            ordered = sorted(names, key=lambda name: (name_hash(name), name))
            if name_hash(ordered[0]) >= self._limit:
                self._moved = frozenset(ordered[:1])
            elif name_hash(ordered[-1]) < self._limit:
                self._moved = frozenset(ordered[-1:])

    def __call__(self, document: Document) -> Iterator[tuple[bool, Document]]:
        """Gives (held out, document), or the two parts of a document that is cut."""
        if self._cut and document.text:
            yield from self._tail(document)
            return
        low = name_hash(document.name) < self._limit
        yield low != (document.name in self._moved), document

    def _tail(self, document: Document) -> Iterator[tuple[bool, Document]]:
        text = document.text
        middle = round(len(text) * (1 - self._share))
        end = text.find("\n", middle) + 1
        if not 0 < end < len(text):
            end = middle
        yield False, document._replace(text=text[:end])
        if end < len(text):
            yield True, document._replace(name=f"{document.name}[tail]", text=text[end:])


class HeldOut(NamedTuple):
    """A held-out document and its size in UTF-8 bytes."""

    document: Document
    size: int


class ValidationSet:
    """Whole held-out documents in the order of their hashes until their bytes reach `limit`.

    Only these are in memory, however many are offered. With limit 0 all of them are.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._size = 0
        self._offered = 0
        # A heap gives its smallest: by negated hash that is the document to drop first.
        self._heap: list[tuple[int, int, HeldOut]] = []

    def offer(self, document: Document, size: int) -> None:
        """Takes a document of `size` UTF-8 bytes, and drops those no longer needed."""
        order = -name_hash(document.name)
        heapq.heappush(self._heap, (order, -self._offered, HeldOut(document, size)))
        self._offered += 1
        self._size += size
        while self._limit and self._size - self._heap[0][2].size >= self._limit:
            self._size -= heapq.heappop(self._heap)[2].size

    def documents(self) -> list[HeldOut]:
        """The set, in the order of the hashes."""
        return [held for _, _, held in sorted(self._heap, key=lambda item: item[:2], reverse=True)]
