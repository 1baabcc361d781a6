"""Tokenizers of every kind and the files they are read from, made on the spot."""

import base64
from pathlib import Path

import sentencepiece
from ml_collections import ConfigDict

from nag_jax.data import tokenizers
from nag_jax.kinds import kind_class

TEXT = "naïve café 😀 — ok"
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "then",
    "it",
    "went",
    "off",
    "to",
    "see",
    "what",
    "else",
    "there",
    "was",
    "in",
    "the",
    "world",
]
CORPUS = [TEXT, " ".join(a + b for a in WORDS for b in WORDS), "def f(x):\n    return x\n" * 9]

KINDS = ("bytes", "bpe", "tokenizers_json", "sentencepiece", "tiktoken")


def train_bpe(vocab_size=350):
    return tokenizers.BpeTokenizer.from_config(ConfigDict({"vocab_size": vocab_size}), CORPUS)


def tokenizer_file(kind: str, folder: Path) -> Path:
    """The file that the kind's `path` names."""
    if kind == "sentencepiece":
        return sentencepiece_file(folder)
    if kind == "tiktoken":
        return ranks_file(folder)
    path = folder / "own.json"
    path.write_bytes(train_bpe().to_files()["vocabulary.json"])
    return path


def ranks_file(folder):
    """All bytes, then some pairs, as tiktoken writes them."""
    tokens = [bytes([i]) for i in range(256)] + [b"th", b"the", b" the", "é".encode()]
    tokens += [b"12", b"34", b"1234"]
    path = folder / "some.tiktoken"
    lines = [b"%s %d\n" % (base64.b64encode(t), i) for i, t in enumerate(tokens)]
    path.write_bytes(b"".join(lines))
    return path


def sentencepiece_file(folder, **options):
    """A small model, by default as today's language models are trained."""
    options = {
        "model_type": "bpe",
        "vocab_size": 310,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "character_coverage": 1.0,
        **options,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=str(folder / "sp"), minloglevel=2, **options
    )
    return folder / "sp.model"


def make_tokenizer(kind, folder):
    """The tokenizer of a kind; its file, where it has one, goes into the folder."""
    if kind == "bytes":
        return tokenizers.ByteTokenizer.from_config(ConfigDict(), ())
    if kind == "bpe":
        return train_bpe()
    node = ConfigDict({"path": str(tokenizer_file(kind, folder)), "pattern": "gpt2"})
    return kind_class("data.tokenizer", kind).from_config(node, ())
