"""Published texts and tokenizers, where they lie beside the repository."""

import gzip
import json

import numpy as np
import pytest

from nag_jax.data import store
from nag_jax.data.packing import pack

TEXT = "naïve café 😀 — ok"

TOKENIZERS = {
    "bytes": {},
    "bpe": {"tokenizer.vocab_size": 1024},
    "sentencepiece": {"tokenizer.path": "tokenizers/mistral-v1-32k/tokenizer.model"},
    "tiktoken": {"tokenizer.path": "tokenizers/tiktoken/r50k_base.tiktoken"},
}


def tokenizer_leaves(kind, real_data):
    leaves = dict(TOKENIZERS[kind])
    if "tokenizer.path" in leaves:
        leaves["tokenizer.path"] = str(real_data / leaves["tokenizer.path"])
    return {"tokenizer.kind": kind, **leaves}


def texts_of(rows, tokenizer):
    """The documents put together again from the rows' targets."""
    dicts = [rows[i] for i in range(len(rows))]
    tokens, documents = (
        np.concatenate([row[key][1:] for row in dicts]) for key in ("tokens", "documents")
    )
    text = (documents >= 0) & (tokens != rows.bos_id)
    ends = np.cumsum(np.bincount(documents[text]))
    return [tokenizer.decode(ids.tolist()) for ids in np.split(tokens[text], ends)[:-1]]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_wiki_text_comes_back_and_bytes_are_the_original_ones(kind, real_data, data_config):
    path = real_data / "text/wiki.valid.raw"
    leaves = {"source.kind": "text", "source.paths": (str(path),), "validation_share": 0.05}
    prepared = store.prepare(data_config(**leaves, **tokenizer_leaves(kind, real_data)))
    original = path.read_bytes()
    (tail_bytes,) = prepared.validation.document_bytes.tolist()
    (tail,) = texts_of(prepared.validation, prepared.tokenizer)
    assert tail.encode() == original[-tail_bytes:]
    assert prepared.summary["bytes"] == len(original)
    # A line of difficult characters has the same divisor with every tokenizer, and comes back.
    rows = pack([("line", TEXT)], prepared.tokenizer, 16)
    assert rows.document_bytes.tolist() == [24]
    assert texts_of(rows, prepared.tokenizer) == [TEXT]


def test_compressed_addresses(real_data, data_config):
    path = real_data / "text/sotu.jsonl.gz"
    leaves = {"source.kind": "jsonl", "source.paths": (str(path),), "validation_share": 0.1}
    prepared = store.prepare(data_config(**leaves))
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    assert prepared.summary["documents"] == len(texts) == 233
    assert prepared.summary["bytes"] == sum(len(text.encode()) for text in texts)
    numbers = [int(name.rsplit(":", 1)[1]) for name in prepared.validation.document_names]
    held_out = texts_of(prepared.validation, prepared.tokenizer)
    assert held_out == [texts[number - 1] for number in numbers]
    kept = 0
    for i in range(len(prepared.train)):
        row = prepared.train[i]
        kept += ((row["tokens"] != 256) & (row["segment_ids"] > 0)).sum()
    assert kept == prepared.summary["tokens"]


def test_hub_parquet(real_data, data_config):
    path = real_data / "eval/hf/ybisk_piqa/*.parquet"
    leaves = {"source.kind": "parquet", "source.paths": (str(path),), "source.field": "goal"}
    prepared = store.prepare(data_config(**leaves))
    assert prepared.summary["documents"] + prepared.summary["empty"] == 1838
