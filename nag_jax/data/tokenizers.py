"""Tokenizers: text to ids and back, each saved as a folder that needs nothing else to be loaded.

A tokenizer is a class derived from `Tokenizer`; one of your own is named by
`data.tokenizer.kind=package.module:Class`. Ids never come from text alone for BOS: `encode` neither
adds it nor lets text that is spelled like a special token become one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from etils import epath
from jaxtyping import Int32

from nag_jax.data import files
from nag_jax.data.text_stream import TextStream
from nag_jax.errors import UserError
from nag_jax.kinds import REGISTRY, is_registered, kind_class

DESCRIPTION = "tokenizer.json"  # names the kind; its own files lie beside it


class Tokenizer(ABC):
    """What every tokenizer has.

    Attributes:
      vocab_size: number of ids, BOS among them.
      bos_id: the id that begins rows and documents; where generation stops.
      trained: class attribute; whether `from_config` reads the training texts.
    """

    trained: ClassVar[bool] = False
    vocab_size: int
    bos_id: int

    @staticmethod
    @abstractmethod
    def defaults() -> dict[str, Any]:
        """The kind's config keys and their typed defaults."""

    @classmethod
    @abstractmethod
    def from_config(cls, node: Any, training_texts: Iterable[str]) -> Tokenizer:
        """Builds it from its config node; only a `trained` kind reads the texts."""

    @classmethod
    @abstractmethod
    def from_files(cls, content: dict[str, bytes]) -> Tokenizer:
        """Builds it from what `to_files` returned."""

    @abstractmethod
    def to_files(self) -> dict[str, bytes]:
        """All that it is, as file contents by name."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The text's ids, without BOS. Raises on no text that is valid Unicode."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Text of ids none of which is BOS or outside the vocabulary."""

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " n"]]:
        """`encode` for many texts at once, as arrays."""
        return [np.array(self.encode(text), np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text; BOS and ids of a padded vocabulary give nothing.

        Bytes that are no UTF-8 become the replacement character.
        """
        return self._decode([int(i) for i in ids if 0 <= i < self.vocab_size and i != self.bos_id])

    def stream(self) -> TextStream:
        """A decoder for ids that come one at a time: `push(id)` and `flush()` return text."""
        return TextStream(self.decode)

    @property
    def fingerprint(self) -> str:
        """Hash of its content: equal for equal tokenizers on every machine."""
        digest = hashlib.blake2b(type(self).__name__.encode(), digest_size=16)
        for name, content in sorted(self.to_files().items()):
            digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()

    def save(self, folder: epath.PathLike) -> None:
        """Writes it into a folder, made if need be, for `load`."""
        folder = epath.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        content = self.to_files()
        for name, data in content.items():
            (folder / name).write_bytes(data)
        spec = f"{type(self).__module__}:{type(self).__qualname__}"
        registered = REGISTRY["data.tokenizer"]
        kind = next((name for name, known in registered.items() if known == spec), spec)
        description = {"kind": kind, "files": sorted(content), "vocab_size": self.vocab_size}
        (folder / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")


def load(folder: epath.PathLike, allow_user_kinds: bool = False) -> Tokenizer:
    """Loads what `Tokenizer.save` wrote.

    Args:
      folder: where it was saved.
      allow_user_kinds: whether a class that is not this package's may be imported.

    Raises:
      UserError: the folder holds no tokenizer, a damaged one, or one of a class not allowed.
    """
    folder = epath.Path(folder)
    try:
        description = json.loads((folder / DESCRIPTION).read_text())
        kind = description["kind"]
        content = {name: (folder / name).read_bytes() for name in description["files"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} holds no readable tokenizer: {error}") from error
    if not is_registered("data.tokenizer", kind) and not allow_user_kinds:
        raise UserError(
            f"{folder} holds a tokenizer of the class {kind}, which is not this package's; "
            "it is imported only with allow_user_kinds=True"
        )
    return kind_class("data.tokenizer", kind).from_files(content)


class ByteTokenizer(Tokenizer):
    """Bytes of UTF-8, 0 to 255; BOS is 256. Exact for every text."""

    vocab_size = 257
    bos_id = 256

    @staticmethod
    def defaults() -> dict[str, Any]:
        return {}

    @classmethod
    def from_config(cls, node: Any, training_texts: Iterable[str]) -> ByteTokenizer:
        del node, training_texts
        return cls()

    @classmethod
    def from_files(cls, content: dict[str, bytes]) -> ByteTokenizer:
        del content
        return cls()

    def to_files(self) -> dict[str, bytes]:
        return {}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " n"]]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


class TokenizersJson(Tokenizer):
    """A `tokenizers` JSON file, as Hugging Face models carry it.

    BOS is the token of a well-known name; where there is none it is added after the vocabulary.
    Whether `decode` gives the text back exactly is the file's choice: byte-level models without an
    added leading space do.
    """

    BOS_NAMES = ("<s>", "<|endoftext|>", "<|begin_of_text|>", "[BOS]", "<bos>")

    @staticmethod
    def defaults() -> dict[str, Any]:
        return {"path": ""}

    def __init__(self, content: str):
        """Takes the file's text; raises ValueError where it is not a tokenizer."""
        import tokenizers

        self._content = content
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(str(error)) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        self._bos = next((name for name in self.BOS_NAMES if name in ids), None)
        if self._bos is None:
            self.bos_id = self.vocab_size
            self.vocab_size += 1
        else:
            self.bos_id = ids[self._bos]
            self._tokenizer.add_special_tokens([self._bos])
        self._tokenizer.encode_special_tokens = True  # which means: as the text they are spelled

    @classmethod
    def from_config(cls, node: Any, training_texts: Iterable[str]) -> TokenizersJson:
        del training_texts
        path, data = _read(node.path)
        try:
            return cls(data.decode())
        except ValueError as error:
            raise UserError(f"{path} is not a tokenizers JSON file: {error}") from error

    @classmethod
    def from_files(cls, content: dict[str, bytes]) -> TokenizersJson:
        return cls(content["vocabulary.json"].decode())

    def to_files(self) -> dict[str, bytes]:
        return {"vocabulary.json": self._content.encode()}

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " n"]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        arrays = [np.array(encoding.ids, np.int32) for encoding in encoded]
        for i, ids in enumerate(arrays):
            if self._bos is not None and (ids == self.bos_id).any():
                arrays[i] = self._encode_apart(texts[i])
        return arrays

    def _encode_apart(self, text: str) -> Int32[np.ndarray, " n"]:
        """For models whose plain vocabulary holds BOS's name: spells it in two halves."""
        head, tail = re.escape(self._bos[0]), re.escape(self._bos[1:])
        parts = re.split(f"(?<={head})(?={tail})", text)
        encoded = self._tokenizer.encode_batch_fast(parts, add_special_tokens=False)
        return np.array([i for encoding in encoded for i in encoding.ids], np.int32)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class BpeTokenizer(TokenizersJson):
    """Byte-level BPE trained on the training split. Exact for every text; the same at each run."""

    trained = True

    @staticmethod
    def defaults() -> dict[str, Any]:
        return {"vocab_size": 4096}

    @classmethod
    def from_config(cls, node: Any, training_texts: Iterable[str]) -> BpeTokenizer:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers

        if node.vocab_size < 257:
            raise UserError(
                f"data.tokenizer.vocab_size={node.vocab_size}: a BPE needs at least 257, "
                "256 bytes and BOS"
            )
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=node.vocab_size,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(training_texts, trainer)
        return cls(tokenizer.to_str())


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, its BOS, or one after the vocabulary where it has none.

    The model's own rewriting of text (Unicode normalisation, dropping of repeated spaces) is turned
    off, so that no white space is lost; the models of today's language models have none. What stays
    lossy: U+2581 becomes a space, and a model without byte fallback has one id for all it lacks.
    """

    @staticmethod
    def defaults() -> dict[str, Any]:
        return {"path": ""}

    def __init__(self, model: bytes):
        """Takes the file's bytes; raises ValueError where they are not a model."""
        import sentencepiece
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto()
        try:
            proto.ParseFromString(model)
            proto.normalizer_spec.name = "identity"
            proto.normalizer_spec.precompiled_charsmap = b""
            proto.normalizer_spec.remove_extra_whitespaces = False
            self._processor = sentencepiece.SentencePieceProcessor(
                model_proto=proto.SerializeToString()
            )
        except (DecodeError, RuntimeError) as error:
            raise ValueError(str(error)) from error
        self._model = model
        self.vocab_size = self._processor.vocab_size()
        self.bos_id = self._processor.bos_id()
        if self.bos_id < 0:
            self.bos_id = self.vocab_size
            self.vocab_size += 1

    @classmethod
    def from_config(cls, node: Any, training_texts: Iterable[str]) -> SentencePieceTokenizer:
        del training_texts
        path, data = _read(node.path)
        try:
            return cls(data)
        except ValueError as error:
            raise UserError(f"{path} is not a SentencePiece model: {error}") from error

    @classmethod
    def from_files(cls, content: dict[str, bytes]) -> SentencePieceTokenizer:
        return cls(content["sentencepiece.model"])

    def to_files(self) -> dict[str, bytes]:
        return {"sentencepiece.model": self._model}

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)


class TiktokenTokenizer(Tokenizer):
    """Byte-pair ranks in tiktoken's file format ("base64 rank" a line). Exact for every text.

    BOS is <|endoftext|>, placed after the ranks, as in GPT-2. `pattern` is how text is cut before
    the merges, which the format does not say: as GPT-2's published ranks need it, or cl100k_base's.
    """

    PATTERNS = {
        "gpt2": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
        "cl100k": r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|"""
        r""" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s""",
    }
    # The library's regular expression overflows its stack on longer runs of white space.
    _LONG_SPACE = re.compile(r"\s{100000}")

    @staticmethod
    def defaults() -> dict[str, Any]:
        return {"path": "", "pattern": "gpt2"}

    def __init__(self, ranks: bytes, pattern: str):
        """Takes the file's bytes; raises ValueError, naming the line, where they are not ranks."""
        import tiktoken

        self._content, self._pattern = ranks, pattern
        table = _parse_ranks(ranks)
        self._ids = frozenset(table.values())
        self.bos_id = max(table.values()) + 1
        self.vocab_size = self.bos_id + 1
        self._encoding = tiktoken.Encoding(
            "ranks",
            pat_str=self.PATTERNS[pattern],
            mergeable_ranks=table,
            special_tokens={"<|endoftext|>": self.bos_id},
        )

    @classmethod
    def from_config(cls, node: Any, training_texts: Iterable[str]) -> TiktokenTokenizer:
        del training_texts
        if node.pattern not in cls.PATTERNS:
            raise UserError(
                f"data.tokenizer.pattern={node.pattern!r} is not known; it takes "
                + ", ".join(cls.PATTERNS)
            )
        path, data = _read(node.path)
        try:
            return cls(data, node.pattern)
        except ValueError as error:
            raise UserError(f"{path}: {error}") from error

    @classmethod
    def from_files(cls, content: dict[str, bytes]) -> TiktokenTokenizer:
        return cls(content["ranks.tiktoken"], content["pattern"].decode())

    def to_files(self) -> dict[str, bytes]:
        return {"ranks.tiktoken": self._content, "pattern": self._pattern.encode()}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._parts(text):
            ids += self._encoding.encode_ordinary(part)
        return ids

    def _parts(self, text: str) -> Iterator[str]:
        start = 0
        for match in self._LONG_SPACE.finditer(text):
            yield text[start : match.end()]
            start = match.end()
        yield text[start:]

    def _decode(self, ids: list[int]) -> str:
        # Some published files leave gaps between their ranks.
        known = [i for i in ids if i in self._ids]
        return self._encoding.decode_bytes(known).decode(errors="replace")


def _parse_ranks(content: bytes) -> dict[bytes, int]:
    table: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                token, rank = line.split()
                table[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error) as error:
                raise ValueError(f'line {number} is not "base64 rank"') from error
    missing = [i for i in range(256) if bytes([i]) not in table]
    if missing:
        raise ValueError(f"no rank for {len(missing)} of the 256 bytes, such as {missing[0]:#04x}")
    if len(set(table.values())) < len(table) or min(table.values()) < 0:
        raise ValueError("a rank is negative or stands twice")
    return table


def _read(path: str) -> tuple[epath.Path, bytes]:
    (file,) = files.find([path], "data.tokenizer.path")
    with files.open_bytes(file.path) as stream:
        return file.path, stream.read()
