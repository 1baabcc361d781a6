"""Building a row store: one pass over a source, and what is counted and written on the way.

Where stores lie and how they are found again is `store.py`'s.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

from etils import epath

from nag_jax.data import splits, tokenizers
from nag_jax.data.encoding import Text, encode_in_order
from nag_jax.data.packing import Packer, Row, utf8_length
from nag_jax.data.progress import Progress
from nag_jax.data.shards import Shard, ShardWriter, finished_shards, named_errors, write_text
from nag_jax.errors import UserError

FORMAT = 1
SHARD_TOKENS = 1 << 24
STORE_FILE = "store.json"


def content_hash(value: Any) -> str:
    """24 digits that stand for a value of lists, dicts, strings and numbers."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


class Reading:
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

    def total_bytes(self) -> int | None:
        """All text of the source, where it knows."""
        return getattr(self._source, "total_bytes", lambda: None)()

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


def build_rows(
    config: Any,
    source: Any,
    split: splits.Split,
    tokenizer: tokenizers.Tokenizer,
    folder: epath.Path,
    progress: bool,
) -> None:
    """Makes a whole store in `folder`, going on after the finished shards that are there."""
    with named_errors(folder):
        tokenizer.save(folder / "tokenizer")
    rows_per_shard = max(1, SHARD_TOKENS // (config.row_length + 1))
    shards = _unchanged(finished_shards(folder, "train"), rows_per_shard, source, split)
    reading = Reading(source, split, splits.ValidationSet(config.validation_bytes))
    title = f"tokenising {config.source.kind}"
    try:
        with Progress(title, reading.total_bytes(), progress) as shown:
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
        "fingerprint": content_hash(settings),
        "corpus_fingerprint": reading.corpus.hexdigest(),
        "summary": summary,
        "train": [dataclasses.asdict(shard) for shard in shards],
        "validation": [dataclasses.asdict(shard) for shard in validation],
        "validation_documents": documents,
    }
    write_text(folder / STORE_FILE, json.dumps(meta))


def _unchanged(
    shards: list[Shard], rows_per_shard: int, source: Any, split: splits.Split
) -> list[Shard]:
    """The leading full shards whose documents the source still gives, by their hash."""
    full = [shard for shard in shards if shard.rows == rows_per_shard]
    kept: list[Shard] = []
    if full:
        for item in Reading(source, split, splits.ValidationSet(1)).training_texts():
            while len(kept) < len(full) and full[len(kept)].state["document"] == item.index:
                if full[len(kept)].state["digest"] != item.digest:
                    return kept
                kept.append(full[len(kept)])
            if len(kept) == len(full):
                break
    return kept


def _write_training(
    config: Any,
    reading: Reading,
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
        shown.update(reading.bytes, f"{reading.documents:,} documents, {counts.tokens:,} tokens")
    write(packer.finish(), "")
    last = writer.finish({})
    if last:
        shards.append(last)
    return counts


def _write_validation(
    config: Any,
    reading: Reading,
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
