"""The row store: a corpus tokenised once, kept in a cache folder, found again by what it holds.

`<cache_folder>/rows/<key>` is a finished store and never changes; its key covers the source and its
files' sizes and times, the tokenizer's content and all settings of the split and the rows. A store
in the making is in `partial/`, under a key without sizes and times: when a preparation is killed,
or stopped by a bad file that is then mended, the next one goes on after the last shard whose
documents are still the same. The fingerprints cover what was read, not when or where.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

from etils import epath

from nag_jax.data import files, splits, tokenizers
from nag_jax.data.building import FORMAT, STORE_FILE, Reading, build_rows, content_hash
from nag_jax.data.packing import MemoryRows, pack
from nag_jax.data.progress import Progress
from nag_jax.data.shards import Shard, StoredRows, named_errors
from nag_jax.errors import UserError
from nag_jax.kinds import kind_class

__all__ = ["MemoryRows", "PreparedData", "StoredRows", "pack", "prepare", "split_texts"]


@dataclasses.dataclass(frozen=True)
class PreparedData:
    """A corpus ready to train on.

    Attributes:
      tokenizer: what made its tokens.
      train: the training rows.
      validation: the rows of the fixed validation set, with its documents; empty if none.
      fingerprint: hash of everything that decides the rows: the documents' names and texts, the
        tokenizer, the split and the row length.
      corpus_fingerprint: hash of the documents' names and texts alone, to compare results across
        tokenizers.
      summary: what start-up tells, by name.
      folder: where the rows are.
    """

    tokenizer: tokenizers.Tokenizer
    train: StoredRows
    validation: StoredRows
    fingerprint: str
    corpus_fingerprint: str
    summary: dict[str, Any]
    folder: epath.Path

    def summary_lines(self) -> list[str]:
        """The summary as text for the terminal."""
        s = self.summary
        lines = [
            f"corpus      {s['source']}: {s['documents']:,} documents, {s['bytes']:,} bytes "
            f"({s['empty']:,} empty and {s['skipped']:,} undecodable ones left out)",
            f"training    {s['train_documents']:,} documents, {s['tokens']:,} tokens "
            f"({s['tokenizer']}, {s['vocab_size']:,} ids) in {s['rows']:,} rows of "
            f"{s['row_length']:,}",
            f"cuts        {s['cuts']:,} row ends inside {s['cut_documents']:,} documents; "
            f"padding {s['padding_share']:.3%}",
            f"validation  {s['validation_documents']:,} documents, {s['validation_bytes']:,} bytes "
            f"in {s['validation_rows']:,} rows, of {s['held_out_documents']:,} held out",
            f"fingerprint {self.fingerprint} (corpus {self.corpus_fingerprint})",
        ]
        if not s["validation_documents"] and s["validation_share"]:
            lines.append(
                f"            no document was held out for validation: {s['documents']:,} are few "
                f"for data.validation_share={s['validation_share']}; raise it"
            )
        return lines


def prepare(data_config: Any, *, progress: bool = True) -> PreparedData:
    """Opens the store of a corpus, tokenising the corpus first if there is none.

    Args:
      data_config: the config's `data` node.
      progress: whether to show on stderr how far a preparation is.

    Raises:
      UserError: a missing, damaged or empty corpus, a bad tokenizer file, a cache folder that
        cannot be used, a failed write, a damaged shard; finished shards are kept.
    """
    config = data_config
    source, split = _source_and_split(config)
    listing = source.listing()
    cache = _cache_folder(config.cache_folder)
    settings = [FORMAT, _plain(config.source), config.validation_share]
    tokenizer = _tokenizer(config, source, split, cache, [*settings, listing], progress)
    settings += [config.validation_bytes, config.row_length, tokenizer.fingerprint]
    folder = cache / "rows" / content_hash([*settings, listing])
    if not (folder / STORE_FILE).exists():
        partial = cache / "partial" / content_hash(settings)
        with _lock(cache, partial.name, progress):
            if not (folder / STORE_FILE).exists():
                build_rows(config, source, split, tokenizer, partial, progress)
                with named_errors(folder):
                    shutil.rmtree(folder, ignore_errors=True)  # what someone half removed
                    partial.rename(folder)
    return _open(folder, tokenizer)


def split_texts(data_config: Any) -> tuple[list[str], list[tuple[str, str]]]:
    """Reads the corpus again: what `prepare` trains on and validates on, as text in memory.

    Returns:
      The training texts, and the validation set as (name, text), in the order of their rows.
    """
    source, split = _source_and_split(data_config)
    reading = Reading(source, split, splits.ValidationSet(data_config.validation_bytes))
    training = [item.text for item in reading.training_texts()]
    validation = [held.document for held in reading.validation.documents()]
    return training, [(document.name, document.text) for document in validation]


def _source_and_split(config: Any) -> tuple[Any, splits.Split]:
    source = kind_class("data.source", config.source.kind)(config.source)
    names = getattr(source, "names", lambda: None)()
    return source, splits.Split(config.validation_share, names)


def _open(folder: epath.Path, tokenizer: tokenizers.Tokenizer) -> PreparedData:
    try:
        meta = json.loads((folder / STORE_FILE).read_text())
    except ValueError as error:
        raise UserError(
            f"{folder / STORE_FILE} is damaged ({error}); remove the folder {folder}, and it is "
            "prepared anew"
        ) from error
    summary = meta["summary"]
    rows = {}
    for name, documents in (("train", {}), ("validation", meta["validation_documents"])):
        rows[name] = StoredRows(
            folder,
            [Shard(**shard) for shard in meta[name]],
            summary["row_length"],
            tokenizer.vocab_size,
            tokenizer.bos_id,
            **documents,
        )
    return PreparedData(
        tokenizer=tokenizer,
        fingerprint=meta["fingerprint"],
        corpus_fingerprint=meta["corpus_fingerprint"],
        summary=summary,
        folder=folder,
        **rows,
    )


def _plain(node: Any) -> dict[str, Any]:
    return node.to_dict()


def _cache_folder(path: str) -> epath.Path:
    if "://" in path:
        raise UserError(f"data.cache_folder={path}: it must be a local folder")
    folder = files.absolute(path)
    try:
        for name in ("rows", "partial", "tokenizers", "locks"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"data.cache_folder={folder} cannot be made or written: {error.strerror or error}"
        ) from error
    return folder


@contextlib.contextmanager
def _lock(cache: epath.Path, name: str, progress: bool) -> Iterator[None]:
    """Lets one process at a time make what is called `name`; the system frees it if it dies."""
    path = cache / "locks" / name
    with named_errors(path):
        handle = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                print("waiting for another process that prepares the same data", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _tokenizer(
    config: Any,
    source: Any,
    split: splits.Split,
    cache: epath.Path,
    key: list[Any],
    progress: bool,
) -> tokenizers.Tokenizer:
    """Builds the tokenizer; one that is trained is kept, and found again for the same texts."""
    cls = kind_class("data.tokenizer", config.tokenizer.kind)
    if not cls.trained:
        return cls.from_config(config.tokenizer, ())
    name = content_hash([*key, _plain(config.tokenizer)])
    folder = cache / "tokenizers" / name
    if not folder.exists():
        with _lock(cache, name, progress):
            if not folder.exists():
                reading = Reading(source, split, splits.ValidationSet(1))
                title = f"training the tokenizer on {config.source.kind}"
                with Progress(title, reading.total_bytes(), progress) as shown:
                    tokenizer = cls.from_config(config.tokenizer, _shown_texts(reading, shown))
                reading.check_not_empty(config)
                temporary = cache / "partial" / f"tokenizer-{name}"
                with named_errors(temporary):
                    tokenizer.save(temporary)
                    temporary.rename(folder)
    return tokenizers.load(folder, allow_user_kinds=True)


def _shown_texts(reading: Reading, shown: Progress) -> Iterator[str]:
    for item in reading.training_texts():
        shown.update(reading.bytes, f"{reading.documents:,} documents")
        yield item.text
