"""The split follows names alone; the validation set is the lowest hashes up to its size."""

import pytest

from nag_jax.data.sources import Document
from nag_jax.data.splits import Split, ValidationSet, name_hash

NAMES = [f"folder/{i}.txt" for i in range(400)]


def held_out(split, names):
    parts = [part for name in names for part in split(Document(name, "text", name))]
    return [document.name for held, document in parts if held]


def test_the_share_is_held_out_and_more_share_only_adds():
    small, large = (held_out(Split(share, None), NAMES) for share in (0.05, 0.25))
    assert set(small) < set(large)
    assert 5 <= len(small) <= 40
    assert 70 <= len(large) <= 130
    assert held_out(Split(0.0, None), NAMES) == []
    # The order and the company of the names change nothing.
    assert held_out(Split(0.05, None), NAMES[::-1]) == small[::-1]


def test_placing_is_the_same_everywhere():
    assert name_hash("abc.py") == 0x4538B7851783F5F6


@pytest.mark.parametrize("share", [1e-6, 0.999999])
def test_few_documents_give_both_parts(share):
    for names in (NAMES[:2], NAMES[:5]):
        assert len(held_out(Split(share, names), names)) == (1 if share < 0.5 else len(names) - 1)


def test_a_single_document_gives_its_tail():
    text = "".join(f"line {i}\n" for i in range(100))
    (_, head), (held, tail) = Split(0.1, ["a.txt"])(Document("a.txt", text, "a.txt"))
    assert held
    assert head.text + tail.text == text
    assert head.text.endswith("\n")
    assert 50 < len(tail.text) < 100
    assert (head.name, tail.name) == ("a.txt", "a.txt[tail]")
    one_line = list(Split(0.5, ["a.txt"])(Document("a.txt", "abcd", "a.txt")))
    assert [(held, document.text) for held, document in one_line] == [(False, "ab"), (True, "cd")]
    assert len(list(Split(0.1, ["a.txt"])(Document("a.txt", "x", "a.txt")))) == 1


@pytest.mark.parametrize("limit", [0, 1, 250, 100_000])
def test_whole_documents_in_the_order_of_hashes_until_the_limit(limit):
    validation = ValidationSet(limit)
    for i, name in enumerate(NAMES):
        validation.offer(Document(name, None, name), 10 + i % 7)
    expected, size = [], 0
    for name in sorted(NAMES, key=name_hash):
        if limit and size >= limit:
            break
        expected.append(name)
        size += 10 + NAMES.index(name) % 7
    assert [held.document.name for held in validation.documents()] == expected
