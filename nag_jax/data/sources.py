"""Sources: where documents come from. Each is read as a stream, one document in memory at a time.

A source is a class built from its config node (`data.source`). One of your own is named by
`data.source.kind=package.module:Class` and needs:

  defaults()      static; a dict of its config keys and their typed defaults ({} for none).
  __init__(node)  takes the config node; raises UserError for what is missing already now.
  documents()     an iterator of `Document`, the same ones in the same order at every call.
  listing()       a list of strings, cheap to make, that changes whenever the documents may have:
                  it decides whether the rows prepared before are used again.

and may have (deriving from `Source` gives both):

  names()         the documents' names where that needs no reading, or None.
  total_bytes()   the size of all text for the progress bar, or None.
"""

from __future__ import annotations

import json
import os
import sysconfig
import tokenize
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from etils import epath

from nag_jax.data import files
from nag_jax.errors import UserError


class Document(NamedTuple):
    """A text with its name.

    Attributes:
      name: unique and stable: it decides, by its hash, between training and validation.
      text: what is trained on; None says that the source passed over it, which is counted.
      where: what an error message calls it, such as "corpus.jsonl:17".
    """

    name: str
    text: str | None
    where: str


class Source:
    """The optional half of a source: its names and size are not known without reading it."""

    def names(self) -> list[str] | None:
        return None

    def total_bytes(self) -> int | None:
        return None


class PythonStandardLibrary(Source):
    """The source text of the running interpreter's own standard library: one document a file.

    Every .py file outside site-packages and test folders. Names are relative to the library's
    folder, so the split is the same wherever it is installed. A file that does not decode by its
    own coding line is passed over and counted: users cannot mend their interpreter's library.
    """

    SKIPPED_FOLDERS = frozenset(
        {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    )

    @staticmethod
    def defaults() -> dict[str, Any]:
        return {}

    def __init__(self, node: Any):
        del node
        self._root = epath.Path(sysconfig.get_paths()["stdlib"])
        self._names = []
        for folder, folders, names in os.walk(self._root):
            folders[:] = [name for name in folders if name not in self.SKIPPED_FOLDERS]
            self._names += [
                (epath.Path(folder) / name).relative_to(self._root).as_posix()
                for name in names
                if name.endswith(".py") and os.path.isfile(os.path.join(folder, name))
            ]
        self._names.sort()
        if not self._names:
            raise UserError(
                "data.source.kind=python_stdlib: this interpreter has no library source in "
                f"{self._root}; use another source"
            )

    def names(self) -> list[str]:
        return self._names

    def listing(self) -> list[str]:
        return [files.stamp(self._root / name) for name in self._names]

    def total_bytes(self) -> int:
        return sum(os.path.getsize(self._root / name) for name in self._names)

    def documents(self) -> Iterator[Document]:
        for name in self._names:
            path = self._root / name
            with files.open_bytes(path) as stream:
                try:
                    encoding, _ = tokenize.detect_encoding(stream.readline)
                    stream.seek(0)
                    text = stream.read().decode(encoding)
                except (SyntaxError, UnicodeDecodeError):
                    text = None
            yield Document(name, text, str(path))


class TextFiles(Source):
    """UTF-8 text files: one document a file."""

    @staticmethod
    def defaults() -> dict[str, Any]:
        return {"paths": ("",)}

    def __init__(self, node: Any):
        self._files = files.find(node.paths, "data.source.paths")

    def names(self) -> list[str]:
        return [file.name for file in self._files]

    def listing(self) -> list[str]:
        return [files.stamp(file.path) for file in self._files]

    def total_bytes(self) -> int | None:
        if any(file.path.suffix in (".gz", ".zst") for file in self._files):
            return None
        return sum(file.path.stat().length for file in self._files)

    def documents(self) -> Iterator[Document]:
        for file in self._files:
            with files.open_bytes(file.path) as stream:
                raw = b"".join(_lines(stream, file.path))
            try:
                yield Document(file.name, raw.decode(), str(file.path))
            except UnicodeDecodeError as error:
                line = raw.count(b"\n", 0, error.start) + 1
                raise UserError(
                    f"{file.path}:{line}: byte {raw[error.start]:#04x} is not UTF-8"
                ) from error


class JsonLines(Source):
    """JSON Lines, plain, .gz or .zst: one document a line, its text in the field `field`."""

    @staticmethod
    def defaults() -> dict[str, Any]:
        return {"paths": ("",), "field": "text"}

    def __init__(self, node: Any):
        self._files = files.find(node.paths, "data.source.paths")
        self._field = node.field

    def listing(self) -> list[str]:
        return [files.stamp(file.path) for file in self._files]

    def documents(self) -> Iterator[Document]:
        for file in self._files:
            with files.open_bytes(file.path) as stream:
                for number, line in enumerate(_lines(stream, file.path), 1):
                    if line.strip():
                        where = f"{file.path}:{number}"
                        yield Document(f"{file.name}:{number}", self._text(line, where), where)

    def _text(self, line: bytes, where: str) -> str:
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: byte {line[error.start]:#04x} is not UTF-8") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not a JSON value: {error}") from error
        if not isinstance(record, dict):
            raise UserError(f"{where}: a line must hold a JSON object, not {_kind(record)}")
        return _field(record, self._field, where)


class Parquet(Source):
    """Parquet files: one document a row, its text in the column `field`."""

    @staticmethod
    def defaults() -> dict[str, Any]:
        return {"paths": ("",), "field": "text"}

    def __init__(self, node: Any):
        self._files = files.find(node.paths, "data.source.paths")
        self._field = node.field

    def listing(self) -> list[str]:
        return [files.stamp(file.path) for file in self._files]

    def documents(self) -> Iterator[Document]:
        import pyarrow
        from pyarrow import parquet

        for file in self._files:
            row = -1
            with files.open_bytes(file.path) as stream:
                try:
                    table = parquet.ParquetFile(stream)
                    if self._field not in table.schema_arrow.names:
                        raise UserError(
                            f"{file.path}: no column {self._field!r} (data.source.field); it has "
                            + ", ".join(table.schema_arrow.names)
                        )
                    for batch in table.iter_batches(batch_size=256, columns=[self._field]):
                        for cell in batch.column(0):
                            row += 1
                            where = f"{file.path}, row {row}"
                            try:
                                record = {self._field: cell.as_py()}
                            except UnicodeDecodeError as error:
                                raise UserError(f"{where}: the text is not UTF-8") from error
                            text = _field(record, self._field, where)
                            yield Document(f"{file.name}:{row}", text, where)
                except (pyarrow.ArrowException, OSError) as error:
                    raise UserError(
                        f"{file.path} cannot be read as Parquet after row {row}: {error}"
                    ) from error


class HuggingFace(Source):
    """A data set of the Hugging Face hub, streamed: one document a row, its text in `field`.

    `revision` should be a commit: then rows prepared before are found again without network. A
    branch, a tag or nothing is looked up at every start.
    """

    @staticmethod
    def defaults() -> dict[str, Any]:
        return {"dataset": "", "revision": "", "subset": "", "split": "train", "field": "text"}

    def __init__(self, node: Any):
        if not node.dataset:
            raise UserError("data.source.dataset is empty: name a data set such as owner/name")
        try:
            import datasets  # noqa: F401
        except ImportError as error:
            raise UserError(
                "data.source.kind=huggingface needs the extra [hf]: pip install 'nag-jax[hf]'"
            ) from error
        self._node = node
        self._revision = node.revision
        if len(node.revision) != 40 or not set(node.revision) <= set("0123456789abcdef"):
            import huggingface_hub

            try:
                info = huggingface_hub.HfApi().dataset_info(
                    node.dataset, revision=node.revision or None
                )
            except Exception as error:
                raise UserError(
                    f"data.source.dataset={node.dataset!r}: revision {node.revision or 'main'!r} "
                    f"was not found on the hub ({error}); a 40-digit commit in "
                    "data.source.revision needs no look-up"
                ) from error
            self._revision = info.sha

    def listing(self) -> list[str]:
        return [f"{self._node.dataset}@{self._revision}"]

    def documents(self) -> Iterator[Document]:
        import datasets

        label = f"{self._node.dataset}/{self._node.split}"
        row = -1
        try:
            rows = datasets.load_dataset(
                self._node.dataset,
                self._node.subset or None,
                split=self._node.split,
                revision=self._revision,
                streaming=True,
            )
            for row, record in enumerate(rows):
                where = f"{label}, row {row}"
                yield Document(f"{label}:{row}", _field(record, self._node.field, where), where)
        except UserError:
            raise
        except Exception as error:  # the hub, the network and every file format raise their own
            raise UserError(
                f"Hugging Face data set {label} cannot be read after row {row}: {error}"
            ) from error


def _lines(stream, path: epath.Path) -> Iterator[bytes]:
    """The stream's lines; a damaged or truncated compressed file is named with the line reached."""
    number = 0
    try:
        for line in stream:
            number += 1
            yield line
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}:{number + 1}: cannot be read further: {error}") from error


def _field(record: dict[str, Any], field: str, where: str) -> str:
    if field not in record:
        raise UserError(
            f"{where}: no field {field!r} (data.source.field); it has {', '.join(record)}"
        )
    if not isinstance(record[field], str):
        raise UserError(f"{where}: field {field!r} holds {_kind(record[field])}, not a text")
    return record[field]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a text" if isinstance(value, str) else "a number")
