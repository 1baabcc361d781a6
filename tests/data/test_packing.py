"""Packing against a token-by-token definition: each document token is a target exactly once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nag_jax.data.packing import Packer, from_record, pack, to_record, token_dtype
from nag_jax.data.tokenizers import ByteTokenizer
from nag_jax.errors import UserError

BOS = 999


def documents_of(lengths):
    """Documents of the given lengths in which every token is another number."""
    ends = np.cumsum(lengths)
    return [np.arange(end - n, end, dtype=np.int32) for n, end in zip(lengths, ends, strict=True)]


def packed(documents, row_length, first=0, offset=0):
    packer = Packer(row_length, BOS)
    rows = []
    for index, tokens in enumerate(documents):
        if index >= first:
            rows += packer.add(index, tokens, offset if index == first else 0)
    return [*rows, *packer.finish()]


def by_definition(documents, row_length):
    """The same rows one token at a time: lists of (token, segment, document)."""
    rows, row, segment = [], [], 0
    for index, tokens in enumerate(documents):
        for position, token in enumerate(tokens):
            if len(row) == row_length + 1:
                rows.append(row)
                row, segment = [], 0
            if position == 0 or not row:
                segment += 1
                row.append((BOS, segment, index))
                if len(row) == row_length + 1:  # this BOS is the row's last target
                    rows.append(row)
                    row, segment = [(BOS, 1, index)], 1
            row.append((int(token), segment, index))
    if row:
        rows.append(row + [(BOS, 0, -1)] * (row_length + 1 - len(row)))
    return rows


def as_arrays(row):
    return from_record(to_record(row, token_dtype(1000)), token_dtype(1000))


def assert_equals_definition(lengths, row_length):
    documents = documents_of(lengths)
    rows = [as_arrays(row) for row in packed(documents, row_length)]
    keys = ("tokens", "segment_ids", "documents")
    triples = [list(zip(*(row[key].tolist() for key in keys), strict=True)) for row in rows]
    assert triples == by_definition(documents, row_length)
    return rows


def test_each_token_of_six_documents_is_a_target_once():
    lengths = [3, 5, 2, 40, 4, 1]
    rows = assert_equals_definition(lengths, 8)
    targets = np.concatenate([row["tokens"][1:][row["segment_ids"][1:] > 0] for row in rows])
    assert sorted(targets[targets != BOS]) == list(range(sum(lengths)))
    for row in rows:
        assert row["tokens"].shape == (9,)
        assert row["tokens"][0] == BOS
        # Inside a segment no token is BOS but the first.
        starts = np.flatnonzero(np.diff(row["segment_ids"], prepend=0) > 0)
        inside = row["segment_ids"] > 0
        assert np.array_equal(np.flatnonzero((row["tokens"] == BOS) & inside), starts)
    assert all((row["segment_ids"] > 0).all() for row in rows[:-1])


def test_the_end_of_a_document_is_a_target_unless_a_row_ends_there():
    rows = assert_equals_definition([3, 4], 8)
    assert len(rows) == 1
    assert rows[0]["tokens"].tolist() == [BOS, 0, 1, 2, BOS, 3, 4, 5, 6]
    rows = assert_equals_definition([8, 4], 8)
    assert rows[1]["tokens"].tolist() == [BOS, 8, 9, 10, 11, BOS, BOS, BOS, BOS]
    assert rows[1]["segment_ids"].tolist() == [1] * 5 + [0] * 4


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 12))
def test_any_lengths(lengths, row_length):
    assert_equals_definition(lengths, row_length)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 9), st.data())
def test_a_fresh_packer_goes_on_after_any_row(lengths, row_length, data):
    documents = documents_of(lengths)
    whole = packed(documents, row_length)
    stop = data.draw(st.integers(0, len(whole) - 1))
    resumed = packed(documents, row_length, whole[stop].next_document, whole[stop].next_offset)
    assert len(resumed) == len(whole) - stop - 1
    for a, b in zip(resumed, whole[stop + 1 :], strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a[1:] == b[1:]


def test_large_ids_are_stored():
    assert token_dtype(65536).itemsize == 2
    assert token_dtype(65537).itemsize == 4
    packer = Packer(3, 100_000)
    (row,) = [*packer.add(0, np.array([70_000, 99_999])), *packer.finish()]
    assert from_record(to_record(row, token_dtype(100_001)), token_dtype(100_001))[
        "tokens"
    ].tolist() == [100_000, 70_000, 99_999, 100_000]


def test_pack_keeps_names_and_byte_counts():
    rows = pack([("a", "naïve café 😀 — ok"), ("nothing", ""), ("b", "x")], ByteTokenizer(), 16)
    assert rows.document_names == ["a", "b"]
    assert rows.document_bytes.tolist() == [len("naïve café 😀 — ok".encode()), 1]
    assert (rows.row_length, rows.bos_id) == (16, 256)
    tokens = np.concatenate([rows[i]["tokens"][1:] for i in range(len(rows))])
    documents = np.concatenate([rows[i]["documents"][1:] for i in range(len(rows))])
    for index, text in enumerate(["naïve café 😀 — ok", "x"]):
        kept = tokens[(documents == index) & (tokens != 256)]
        assert bytes(kept.tolist()).decode() == text


def test_half_a_surrogate_pair_is_refused_by_name():
    with pytest.raises(UserError, match="poem"):
        pack([("poem", "a\ud800b")], ByteTokenizer(), 8)
