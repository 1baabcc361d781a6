"""Tokenizers: exact round trips, no special token out of text, self-contained folders."""

import base64
import json
import subprocess
import sys

import numpy as np
import pytest
import tokenizers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict
from tokenizer_files import (
    CORPUS,
    KINDS,
    TEXT,
    make_tokenizer,
    ranks_file,
    sentencepiece_file,
    train_bpe,
)
from tokenizers import decoders, models, pre_tokenizers, processors

from nag_jax.data import tokenizers
from nag_jax.errors import UserError

SPECIAL = "<s></s> <|endoftext|> <|begin_of_text|> [BOS] <bos> <pad> <unk>"
TRICKY = ["", " ", "\n", "  two  spaces ", "\t\r\n\r\n", "\x00", "\ufffd\ufffd", SPECIAL, TEXT]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Builds a tokenizer by its kind, once."""
    folder = tmp_path_factory.mktemp("tokenizers")
    built = {}

    def make(kind):
        if kind not in built:
            built[kind] = make_tokenizer(kind, folder)
        return built[kind]

    return make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TRICKY)
def test_round_trip_and_stream(build, kind, text):
    tokenizer = build(kind)
    ids = tokenizer.encode(text)
    assert isinstance(ids, list)
    assert tokenizer.bos_id not in ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.vocab_size + 5]) == text
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.flush() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    (array,) = tokenizer.encode_batch([text])
    assert array.dtype == np.int32
    assert array.tolist() == ids


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=60))
def test_any_text(build, kind, text):
    tokenizer = build(kind)
    ids = tokenizer.encode(text)
    assert tokenizer.bos_id not in ids
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == text


@pytest.mark.parametrize("kind", ["bytes", "bpe", "tiktoken"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_stream_of_any_ids_is_the_decoded_text(build, kind, data):
    tokenizer = build(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=80))
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


def test_stream_shows_a_character_as_soon_as_it_is_whole():
    stream = tokenizers.ByteTokenizer().stream()
    assert [stream.push(i) for i in "a😀b".encode()] == ["a", "", "", "", "😀", "b"]
    assert stream.push(0xE2) == ""
    assert stream.flush() == "\ufffd"


def test_tiktoken_cuts_text_as_its_pattern_says(build, tmp_path):
    ranks = build("tiktoken").to_files()["ranks.tiktoken"]
    gpt2, cl100k = (tokenizers.TiktokenTokenizer(ranks, name) for name in ("gpt2", "cl100k"))
    numbers = {text: rank for rank, text in enumerate(["12", "34", "1234"], 260)}
    assert gpt2.encode("1234") == [numbers["1234"]]
    assert cl100k.encode("1234") == [numbers["12"], ord("3"), ord("4")]
    for text in TRICKY:
        assert cl100k.decode(cl100k.encode(text)) == text


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece", "tiktoken"])
def test_very_long_runs_are_encoded(build, kind):
    tokenizer = build(kind)
    for text in (" " * 1_000_001, "x" * 50_000, "\n\u3000" * 300_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_saved_folder_is_self_contained(build, kind, tmp_path):
    tokenizer = build(kind)
    tokenizer.save(tmp_path / "a" / "b")
    assert json.loads((tmp_path / "a/b/tokenizer.json").read_text())["kind"] == kind
    loaded = tokenizers.load(tmp_path / "a" / "b")
    assert type(loaded) is type(tokenizer)
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.vocab_size, loaded.bos_id) == (tokenizer.vocab_size, tokenizer.bos_id)


def test_bpe_training_is_the_same_in_another_process(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import tokenizer_files as t; "
        "print(t.train_bpe().fingerprint)"
    )
    folder = str(__import__("pathlib").Path(__file__).parents[1])
    out = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == train_bpe().fingerprint
    assert train_bpe(300).fingerprint != train_bpe().fingerprint
    assert train_bpe().vocab_size == 350


def test_bpe_vocabulary_has_room_for_the_bytes():
    with pytest.raises(UserError, match=r"data\.tokenizer\.vocab_size=256"):
        train_bpe(256)


def json_tokenizer(tmp_path, tokenizer):
    path = tmp_path / "x.json"
    tokenizer.save(str(path))
    return tokenizers.TokenizersJson.from_config(ConfigDict({"path": str(path)}), ())


@pytest.mark.parametrize("name", ["<s>", "[BOS]", "<bos>", "<|begin_of_text|>", "<|endoftext|>"])
def test_bos_by_well_known_name_never_out_of_text(tmp_path, name):
    tokenizer = hf.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    without = json_tokenizer(tmp_path, tokenizer)
    assert (without.bos_id, without.vocab_size) == (300, 301)
    # Not even marked as special, and with the file adding, cutting and padding by itself.
    tokenizer.add_tokens([name])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{name} $A", special_tokens=[(name, 300)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    loaded = json_tokenizer(tmp_path, tokenizer)
    assert (loaded.bos_id, loaded.vocab_size) == (300, 301)
    text = f"a long text {name} with more than four tokens"
    assert loaded.decode(loaded.encode(text)) == text
    assert 300 not in loaded.encode(text)


def test_bos_in_the_plain_vocabulary_never_out_of_text(tmp_path):
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("<", -5.0), ("s>", -6.0), ("a", -1.0), ("b", -1.0)]
    loaded = json_tokenizer(tmp_path, hf.Tokenizer(models.Unigram(pieces, 0)))
    assert loaded.bos_id == 1
    assert loaded.encode("a<s>b<s>") == [4, 2, 3, 5, 2, 3]


def test_sentencepiece_with_normalisation_keeps_white_space(tmp_path):
    path = sentencepiece_file(
        tmp_path,
        normalization_rule_name="nmt_nfkc",
        remove_extra_whitespaces=True,
        bos_id=-1,
    )
    node = ConfigDict({"path": str(path)})
    tokenizer = tokenizers.SentencePieceTokenizer.from_config(node, ())
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (310, 311)
    for text in TRICKY:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_files_that_are_no_tokenizers_are_named(tmp_path):
    path = tmp_path / "x.file"
    path.write_text('{"a": 1}\n')
    node = ConfigDict({"path": str(path), "pattern": "gpt2"})
    classes = (
        tokenizers.TokenizersJson,
        tokenizers.SentencePieceTokenizer,
        tokenizers.TiktokenTokenizer,
    )
    for cls in classes:
        with pytest.raises(UserError, match=r"x\.file"):
            cls.from_config(node, ())
        with pytest.raises(UserError, match=r"data\.tokenizer\.path: there is no file .*gone"):
            cls.from_config(ConfigDict({"path": str(tmp_path / "gone"), "pattern": "gpt2"}), ())
    path.write_bytes(b"\xff\xfe\x00")
    for cls in classes:
        with pytest.raises(UserError, match=r"x\.file"):
            cls.from_config(node, ())


def test_ranks_are_checked(tmp_path):
    path = ranks_file(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)

    def load(content, pattern="gpt2"):
        path.write_bytes(content)
        node = ConfigDict({"path": str(path), "pattern": pattern})
        return tokenizers.TiktokenTokenizer.from_config(node, ())

    with pytest.raises(UserError, match=r"some\.tiktoken: line 3 is not"):
        load(b"".join([*lines[:2], b"what?\n", *lines[3:]]))
    with pytest.raises(UserError, match="no rank for 1 of the 256 bytes, such as 0x41"):
        load(b"".join(lines[:0x41] + lines[0x42:]))
    with pytest.raises(UserError, match="stands twice"):
        load(b"".join([*lines, base64.b64encode(b"sat") + b" 7\n"]))
    with pytest.raises(UserError, match=r"data\.tokenizer\.pattern='other'.*gpt2"):
        load(b"".join(lines), "other")
    gap = load(b"".join([*lines, base64.b64encode(b"sat") + b" 300\n"]))
    assert (gap.bos_id, gap.decode([300, 299, 97])) == (301, "sata")


def test_folders_that_are_no_tokenizers_are_named(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path} holds no readable tokenizer"):
        tokenizers.load(tmp_path)
    tokenizers.ByteTokenizer().save(tmp_path)
    description = tmp_path / "tokenizer.json"
    description.write_text(description.read_text().replace('"bytes"', '"some.module:Class"'))
    with pytest.raises(UserError, match="allow_user_kinds"):
        tokenizers.load(tmp_path)
