"""The trigram and the xz yardstick, against computations from their definitions."""

import lzma
import math
from collections import Counter

import numpy as np
import pytest

from nag_jax.analysis.baselines import (
    XZ_DICTIONARY_BYTES,
    TrigramModel,
    trigram_bits_per_byte,
    xz_bits_per_byte,
)

TRAIN = ["abracadabra", "naïve café 😀 — ok\n", "", "def f(x):\n    return x + 1\n"]
VALIDATION = ["abra cadabra", "def g(y):\n    return y\n", "é"]


def witten_bell_by_dictionaries(texts, document):
    """Bits of `document`, straight from the recursion over contexts held in dictionaries."""
    follows = {}
    for text in texts:
        symbols = [256, 256, *text.encode()]
        for i in range(2, len(symbols)):
            for order in range(3):
                context = tuple(symbols[i - order : i])
                follows.setdefault(context, Counter())[symbols[i]] += 1

    def probability(byte, context):
        lower = probability(byte, context[1:]) if context else 1 / 256
        counts = follows.get(context)
        if not counts:
            return lower
        kinds = len(counts)
        return (counts[byte] + kinds * lower) / (counts.total() + kinds)

    symbols = [256, 256, *document.encode()]
    return -sum(
        math.log2(probability(symbols[i], tuple(symbols[i - 2 : i])))
        for i in range(2, len(symbols))
    )


def test_trigram_follows_the_recursion():
    model = TrigramModel(TRAIN)
    for document in VALIDATION:
        expected = witten_bell_by_dictionaries(TRAIN, document)
        assert model.bits(document) == pytest.approx(expected, rel=1e-12)


def test_trigram_bits_per_byte_divides_by_utf8_bytes():
    model = TrigramModel(TRAIN)
    total = sum(model.bits(text) for text in VALIDATION)
    size = sum(len(text.encode()) for text in VALIDATION)
    assert trigram_bits_per_byte(iter(TRAIN), iter(VALIDATION)) == pytest.approx(total / size)


def test_trigram_probabilities_are_distributions():
    model = TrigramModel(TRAIN)
    for context in (b"", b"a", b"ab", b"zq", b"\xff\xfe"):
        probabilities = model.probabilities(context)
        assert probabilities.sum() == pytest.approx(1.0, abs=1e-12)
        assert np.all(probabilities > 0)


def test_untrained_trigram_is_uniform():
    assert trigram_bits_per_byte([], ["any text"]) == pytest.approx(8.0)


def test_xz_is_the_difference_of_two_compressions():
    train = ["the quick brown fox jumps over the lazy dog\n" * 20]
    validation = ["the quick brown fox sleeps\n" * 3, "1f9c0a7b"]
    prefix, text = "".join(train).encode(), "".join(validation).encode()
    sizes = [len(lzma.compress(data, preset=9)) for data in (prefix, prefix + text)]
    result = xz_bits_per_byte(iter(train), iter(validation))
    assert result.bits_per_byte == 8 * (sizes[1] - sizes[0]) / len(text)
    assert result.prefix_bytes == len(prefix)
    # The prefix pays: text like it costs less than on its own.
    assert result.bits_per_byte < 8 * len(lzma.compress(text, preset=9)) / len(text)


def test_xz_uses_the_end_of_a_longer_prefix():
    train = ["a" * 1000, "x1y2z3" * 50]
    short = xz_bits_per_byte(["x1y2z3" * 50], ["x1y2z3"])
    assert xz_bits_per_byte(train, ["x1y2z3"], prefix_limit=300) == short


def test_xz_preset_has_the_stated_dictionary():
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": XZ_DICTIONARY_BYTES}]
    data = bytes(range(256)) * 10
    assert lzma.compress(data, filters=filters) == lzma.compress(data, preset=9)


def test_no_validation_bytes_raise():
    for baseline in (trigram_bits_per_byte, xz_bits_per_byte):
        with pytest.raises(ValueError, match="no bytes"):
            baseline(["text"], [])
