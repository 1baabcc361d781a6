"""Bits per byte of two compressors without a neural network, as yardsticks for a language model.

`trigram_bits_per_byte` is a smoothed byte trigram fitted on the training texts; `xz_bits_per_byte`
is what `xz -9` pays for the validation texts once it has seen the training texts. Both count UTF-8
bytes, so their numbers stand beside a model's bits per byte whatever its tokenizer is.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

_START = 256  # context symbol before a document's first byte; never predicted
_CONTEXTS = 257
_BYTES = 256

# What `xz -9` means: preset 9 has a dictionary of 64 MiB; a longer prefix would fall out of reach.
XZ_PRESET = 9
XZ_DICTIONARY_BYTES = 64 * 2**20


class XzResult(NamedTuple):
    """What `xz -9` pays for the validation text, and how much training text it was given."""

    bits_per_byte: float
    prefix_bytes: int


def _context_and_targets(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns a document's int64 `context[n]` (both bytes before, as one number), `target[n]`."""
    target = np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)
    padded = np.concatenate([np.full(2, _START, np.int64), target])
    return padded[:-2] * _CONTEXTS + padded[1:-1], target


class TrigramModel:
    """Byte trigram with interpolated Witten-Bell smoothing.

    With `c` a count in the training texts, `n(h)` the number of occurrences of context `h` and
    `t(h)` the number of different bytes that followed it,

        p(w | h) = (c(h, w) + t(h) p(w | h')) / (n(h) + t(h)),

    where `h'` drops the older byte of the context; the recursion ends at the uniform 1/256. There
    is no free constant, so nothing has to be tuned on held-out text. The bytes before a document's
    first are a start symbol of their own.
    """

    def __init__(self, texts: Iterable[str]):
        counts = np.zeros(_CONTEXTS * _CONTEXTS * _BYTES, dtype=np.int64)
        for text in texts:
            context, target = _context_and_targets(text)
            # bincount would sweep the whole table for each document; sorting touches it alone.
            index, count = np.unique(context * _BYTES + target, return_counts=True)
            counts[index] += count
        trigram = counts.reshape(_CONTEXTS, _CONTEXTS, _BYTES)
        bigram = trigram.sum(axis=0)
        unigram = bigram.sum(axis=0)
        lower = _witten_bell(unigram, np.full(_BYTES, 1.0 / _BYTES))
        lower = _witten_bell(bigram, lower[None, :])
        self._probability = _witten_bell(trigram, lower[None, :, :])

    def bits(self, text: str) -> float:
        """Returns the bits that the document's UTF-8 bytes cost, `-sum log2 p`."""
        context, target = _context_and_targets(text)
        probability = self._probability.reshape(_CONTEXTS * _CONTEXTS, _BYTES)
        return float(-np.log2(probability[context, target]).sum(dtype=np.float64))

    def probabilities(self, context: bytes) -> np.ndarray:
        """Returns float64 `[256]`, the next byte's distribution after a document's first bytes."""
        older, newer = ([_START, _START, *context])[-2:]
        return self._probability[older, newer]


def _witten_bell(counts: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Interpolates counts `[..., 256]` with the lower order's distribution (same trailing axes)."""
    seen = counts.sum(axis=-1, keepdims=True)
    kinds = np.count_nonzero(counts, axis=-1)[..., None]
    # A context that was never seen has no weight of its own and takes the lower order's whole.
    kinds = np.maximum(kinds, seen == 0)
    return (counts + kinds * lower) / (seen + kinds)


def trigram_bits_per_byte(train: Iterable[str], validation: Iterable[str]) -> float:
    """Returns bits per UTF-8 byte of `validation` under the byte trigram fitted on `train`."""
    model = TrigramModel(train)
    bits = 0.0
    size = 0
    for text in validation:
        bits += model.bits(text)
        size += len(text.encode("utf-8"))
    if not size:
        raise ValueError("the validation texts hold no bytes")
    return bits / size


def xz_bits_per_byte(
    train: Iterable[str], validation: Iterable[str], prefix_limit: int = XZ_DICTIONARY_BYTES
) -> XzResult:
    """Returns what `xz -9` pays for `validation` after `train`, in bits per UTF-8 byte.

    The value is `8 (|xz(train + validation)| - |xz(train)|) / |validation|`.

    Args:
        train: texts that the compressor sees first; only their last `prefix_limit` bytes are used.
        validation: texts whose cost is measured.
        prefix_limit: bytes of training text at most; the dictionary of `xz -9` holds 64 MiB.
    """
    prefix = "".join(train).encode("utf-8")[-prefix_limit:]
    text = "".join(validation).encode("utf-8")
    if not text:
        raise ValueError("the validation texts hold no bytes")
    with ThreadPoolExecutor(2) as pool:  # lzma releases the interpreter's lock
        sizes = list(pool.map(_xz_size, [prefix, prefix + text]))
    return XzResult(8 * (sizes[1] - sizes[0]) / len(text), len(prefix))


def _xz_size(data: bytes) -> int:
    return len(lzma.compress(data, preset=XZ_PRESET))
