"""Texts to tokens in bulk: in this process or in several, always in the order of the texts."""

from __future__ import annotations

import collections
import concurrent.futures
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import numpy as np
from etils import epath
from jaxtyping import Int32

from nag_jax.data import tokenizers
from nag_jax.errors import UserError

CHUNK_CHARACTERS = 1 << 20


class Text(NamedTuple):
    """A training text: its index, and the hash of all training texts up to and with it."""

    index: int
    text: str
    digest: str


class Encoded(NamedTuple):
    """A text's tokens, without BOS."""

    index: int
    tokens: Int32[np.ndarray, " n"]
    digest: str


def encode_in_order(
    texts: Iterator[Text], tokenizer: tokenizers.Tokenizer, workers: int, folder: epath.Path
) -> Iterator[Encoded]:
    """Encodes texts, a chunk of them in memory for each process.

    An error of the source comes out only after all texts before it, so that no work is lost.

    Args:
      texts: the source's texts.
      tokenizer: what encodes them.
      workers: processes; 1 uses none besides this one.
      folder: where the tokenizer is saved, for other processes to load.

    Raises:
      UserError: from `texts`, or a process died.
    """
    chunks = _Chunks(texts)
    if workers == 1:
        for chunk in chunks:
            yield from _join(chunk, tokenizer.encode_batch([item.text for item in chunk]))
    else:
        yield from _in_processes(chunks, workers, folder)
    if chunks.error is not None:
        raise chunks.error


class _Chunks:
    """Texts grouped to about CHUNK_CHARACTERS; stops at an error and keeps it for later."""

    def __init__(self, texts: Iterator[Text]):
        self._texts = texts
        self.error: UserError | None = None

    def __iter__(self) -> Iterator[list[Text]]:
        chunk: list[Text] = []
        size = 0
        try:
            for item in self._texts:
                chunk.append(item)
                size += len(item.text)
                if size >= CHUNK_CHARACTERS:
                    yield chunk
                    chunk, size = [], 0
        except UserError as error:
            self.error = error
        if chunk:
            yield chunk


def _join(chunk: list[Text], arrays: list[np.ndarray]) -> Iterator[Encoded]:
    for item, tokens in zip(chunk, arrays, strict=True):
        yield Encoded(item.index, tokens, item.digest)


def _in_processes(chunks: _Chunks, workers: int, folder: epath.Path) -> Iterator[Encoded]:
    pool = concurrent.futures.ProcessPoolExecutor(
        workers,
        # A forked child of a process with JAX's threads may hang.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(str(folder),),
    )
    pending: collections.deque = collections.deque()
    try:
        for chunk in chunks:
            pending.append((chunk, pool.submit(_work, [item.text for item in chunk])))
            if len(pending) > 2 * workers:
                done, future = pending.popleft()
                yield from _join(done, future.result())
        for done, future in pending:
            yield from _join(done, future.result())
    except BrokenProcessPool as error:
        raise UserError(
            f"a tokenising process died (data.workers={workers}): out of memory, or a script "
            'without `if __name__ == "__main__":`; data.workers=1 starts no process'
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_tokenizer: tokenizers.Tokenizer


def _start_worker(folder: str) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _tokenizer = tokenizers.load(folder, allow_user_kinds=True)


def _work(texts: list[str]) -> list[np.ndarray]:
    return _tokenizer.encode_batch(texts)
