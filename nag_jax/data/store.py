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
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from etils import epath

from nag_jax.data import files, splits, tokenizers
from nag_jax.data.encoding import Text, encode_in_order
from nag_jax.data.packing import MemoryRows, Packer, Row, pack, utf8_length
from nag_jax.data.progress import Progress
from nag_jax.data.shards import Shard, ShardWriter, StoredRows, finished_shards, write_text
from nag_jax.errors import UserError
from nag_jax.kinds import kind_class

__all__ = ["MemoryRows", "PreparedData", "StoredRows", "pack", "prepare"]

FORMAT = 1
SHARD_TOKENS = 1 << 24
_META = "store.json"


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
    source = kind_class("data.source", config.source.kind)(config.source)
    names = getattr(source, "names", lambda: None)()
    split = splits.Split(config.validation_share, names)
    listing = source.listing()
    cache = _cache_folder(config.cache_folder)
    settings = [FORMAT, _plain(config.source), config.validation_share]
    tokenizer = _tokenizer(config, source, split, cache, [*settings, listing])
    settings += [config.validation_bytes, config.row_length, tokenizer.fingerprint]
    folder = cache / "rows" / _hash([*settings, listing])
    if not (folder / _META).exists():
        partial = cache / "partial" / _hash(settings)
        with _lock(cache, partial.name):
            if not (folder / _META).exists():
                _build(config, source, split, tokenizer, partial, progress)
                with _named_errors(folder):
                    partial.rename(folder)
    return _open(folder, tokenizer)


def _open(folder: epath.Path, tokenizer: tokenizers.Tokenizer) -> PreparedData:
    try:
        meta = json.loads((folder / _META).read_text())
    except ValueError as error:
        raise UserError(
            f"{folder / _META} is damaged ({error}); remove the folder {folder}, and it is "
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


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


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
def _named_errors(path: epath.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _lock(cache: epath.Path, name: str) -> Iterator[None]:
    """Lets one process at a time make what is called `name`; the system frees it if it dies."""
    path = cache / "locks" / name
    with _named_errors(path):
        handle = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another process that prepares the same data", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _tokenizer(
    config: Any, source: Any, split: splits.Split, cache: epath.Path, key: list[Any]
) -> tokenizers.Tokenizer:
    """Builds the tokenizer; one that is trained is kept, and found again for the same texts."""
    cls = kind_class("data.tokenizer", config.tokenizer.kind)
    if not cls.trained:
        return cls.from_config(config.tokenizer, ())
    name = _hash([*key, _plain(config.tokenizer)])
    folder = cache / "tokenizers" / name
    if not folder.exists():
        with _lock(cache, name):
            if not folder.exists():
                reading = _Reading(source, split, splits.ValidationSet(1))
                tokenizer = cls.from_config(
                    config.tokenizer, (item.text for item in reading.training_texts())
                )
                reading.check_not_empty(config)
                temporary = cache / "partial" / f"tokenizer-{name}"
                with _named_errors(temporary):
                    tokenizer.save(temporary)
                    temporary.rename(folder)
    return tokenizers.load(folder, allow_user_kinds=True)


class _Reading:
    """One pass over a source: gives the training texts, collects all the rest on the way."""

    def __init__(self, source: Any, split: splits.Split, validation: splits.ValidationSet):
        self._source, self._split = source, split
        self.validation = validation
        self.corpus = hashlib.blake2b(digest_size=12)
        self.documents = self.empty = self.skipped = 0
        self.bytes = self.train_documents = self.held_out_documents = 0

    def training_texts(self) -> Iterator[Text]:
        digest = hashlib.blake2b(digest_size=12)
        for document in self._source.documents():
            if document.text is None:
                self.skipped += 1
                continue
            size = utf8_length(document.text, document.where)
            if not size:
                self.empty += 1
                continue
            self.documents += 1
            self.bytes += size
            _update(self.corpus, document.name, document.text)
            for held_out, part in self._split(document):
                if held_out:
                    self.held_out_documents += 1
                    self.validation.offer(part, utf8_length(part.text, part.where))
                else:
                    _update(digest, part.name, part.text)
                    yield Text(self.train_documents, part.text, digest.hexdigest())
                    self.train_documents += 1

    def check_not_empty(self, config: Any) -> None:
        if not self.train_documents:
            kind = config.source.kind
            where = ", ".join(config.source.get("paths", ())) or config.source.get("dataset", "")
            what = f"{kind} ({where})" if where else kind
            if self.documents:
                raise UserError(
                    f"data.source {what}: all {self.documents} documents are held out at "
                    f"data.validation_share={config.validation_share}, and none is left to train on"
                )
            raise UserError(f"data.source {what}: the corpus is empty: no document has any text")


def _update(digest: Any, name: str, text: str) -> None:
    data = text.encode()
    digest.update(f"{len(name)} {len(data)} ".encode())
    digest.update(name.encode(errors="surrogateescape"))
    digest.update(data)


@dataclasses.dataclass
class _Counts:
    """What is counted while rows are written."""

    rows: int = 0
    tokens: int = 0
    padding: int = 0
    cuts: int = 0
    cut_documents: int = 0
    last_cut: int = -1
    without_tokens: int = 0

    def add(self, row: Row) -> None:
        used = sum(row.lengths)
        self.rows += 1
        self.tokens += used - len(row.lengths)  # each segment has one BOS
        self.padding += len(row.tokens) - used
        if row.continues:
            self.cuts += 1
            self.cut_documents += row.documents[0] != self.last_cut
            self.last_cut = row.documents[0]


def _build(
    config: Any,
    source: Any,
    split: splits.Split,
    tokenizer: tokenizers.Tokenizer,
    folder: epath.Path,
    progress: bool,
) -> None:
    """Makes a whole store in `folder`, going on after the finished shards that are there."""
    with _named_errors(folder):
        tokenizer.save(folder / "tokenizer")
    rows_per_shard = max(1, SHARD_TOKENS // (config.row_length + 1))
    shards = _unchanged(finished_shards(folder, "train"), rows_per_shard, source, split)
    reading = _Reading(source, split, splits.ValidationSet(config.validation_bytes))
    title = f"tokenising {config.source.kind}"
    total = getattr(source, "total_bytes", lambda: None)()
    try:
        with Progress(title, total, progress) as shown:
            counts = _write_training(
                config, reading, tokenizer, folder, rows_per_shard, shards, shown
            )
        reading.check_not_empty(config)
        if not counts.rows:
            raise UserError(
                f"data.source {config.source.kind}: the tokenizer gives no token for its "
                f"{reading.train_documents} training documents"
            )
    except BaseException:
        if not shards:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    validation, documents, validation_counts = _write_validation(
        config, reading, tokenizer, folder, rows_per_shard
    )
    kept = {shard.file for shard in (*shards, *validation)}
    for path in folder.glob("*.array_record"):
        if path.name not in kept:
            path.unlink()
    settings = [reading.corpus.hexdigest(), tokenizer.fingerprint, config.row_length]
    settings += [config.validation_share, config.validation_bytes, FORMAT]
    summary = {
        "source": config.source.kind,
        "tokenizer": config.tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "row_length": config.row_length,
        "documents": reading.documents,
        "bytes": reading.bytes,
        "empty": reading.empty + counts.without_tokens,
        "skipped": reading.skipped,
        "train_documents": reading.train_documents - counts.without_tokens,
        "tokens": counts.tokens,
        "rows": counts.rows,
        "cuts": counts.cuts,
        "cut_documents": counts.cut_documents,
        "padding_share": counts.padding / (counts.rows * (config.row_length + 1)),
        "validation_share": config.validation_share,
        "held_out_documents": reading.held_out_documents,
        "validation_documents": len(documents["document_names"]),
        "validation_bytes": sum(documents["document_bytes"]),
        "validation_tokens": validation_counts.tokens,
        "validation_rows": validation_counts.rows,
    }
    meta = {
        "format": FORMAT,
        "fingerprint": _hash(settings),
        "corpus_fingerprint": reading.corpus.hexdigest(),
        "summary": summary,
        "train": [dataclasses.asdict(shard) for shard in shards],
        "validation": [dataclasses.asdict(shard) for shard in validation],
        "validation_documents": documents,
    }
    write_text(folder / _META, json.dumps(meta))


def _unchanged(
    shards: list[Shard], rows_per_shard: int, source: Any, split: splits.Split
) -> list[Shard]:
    """The leading full shards whose documents the source still gives, by their hash."""
    full = [shard for shard in shards if shard.rows == rows_per_shard]
    kept: list[Shard] = []
    if full:
        for item in _Reading(source, split, splits.ValidationSet(1)).training_texts():
            while len(kept) < len(full) and full[len(kept)].state["document"] == item.index:
                if full[len(kept)].state["digest"] != item.digest:
                    return kept
                kept.append(full[len(kept)])
            if len(kept) == len(full):
                break
    return kept


def _write_training(
    config: Any,
    reading: _Reading,
    tokenizer: tokenizers.Tokenizer,
    folder: epath.Path,
    rows_per_shard: int,
    shards: list[Shard],
    shown: Progress,
) -> _Counts:
    """Writes the training rows that `shards` do not hold, and appends the new shards to it."""
    counts, document, offset = _Counts(), 0, 0
    if shards:
        last = shards[-1].state
        counts, document, offset = _Counts(**last["counts"]), last["document"], last["offset"]
    texts = (text for text in reading.training_texts() if text.index >= document)
    packer = Packer(config.row_length, tokenizer.bos_id)
    writer = ShardWriter(folder, "train", tokenizer.vocab_size, rows_per_shard, len(shards))

    def write(rows: Iterable[Row], digest: str) -> None:
        for row in rows:
            counts.add(row)
            shard = writer.write(
                row,
                {
                    "document": row.next_document,
                    "offset": row.next_offset,
                    "digest": digest,
                    "counts": dataclasses.asdict(counts),
                },
            )
            if shard:
                shards.append(shard)

    for item in encode_in_order(texts, tokenizer, config.workers, folder / "tokenizer"):
        if len(item.tokens):
            start = offset if item.index == document else 0
            write(packer.add(item.index, item.tokens, start), item.digest)
        else:
            counts.without_tokens += 1
        shown.update(reading.bytes, reading.documents, counts.tokens)
    write(packer.finish(), "")
    last = writer.finish({})
    if last:
        shards.append(last)
    return counts


def _write_validation(
    config: Any,
    reading: _Reading,
    tokenizer: tokenizers.Tokenizer,
    folder: epath.Path,
    rows_per_shard: int,
) -> tuple[list[Shard], dict[str, list], _Counts]:
    held_out = reading.validation.documents()
    counts = _Counts()
    packer = Packer(config.row_length, tokenizer.bos_id)
    writer = ShardWriter(folder, "validation", tokenizer.vocab_size, rows_per_shard)
    shards: list[Shard | None] = []
    documents: dict[str, list] = {"document_names": [], "document_bytes": []}

    def write(rows: Iterable[Row]) -> None:
        for row in rows:
            counts.add(row)
            shards.append(writer.write(row, {}))

    for document, size in held_out:
        (tokens,) = tokenizer.encode_batch([document.text])
        if len(tokens):
            write(packer.add(len(documents["document_names"]), tokens))
            documents["document_names"].append(document.name)
            documents["document_bytes"].append(size)
    write(packer.finish())
    shards.append(writer.finish({}))
    return [shard for shard in shards if shard], documents, counts
