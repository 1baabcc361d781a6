"""Bits per byte against sums over `Run.logits`: per document, whatever the packing and batches."""

import dataclasses

import numpy as np
import pytest
from tokenizer_files import KINDS, TEXT, make_tokenizer, tokenizer_file

from nag_jax import config as config_lib
from nag_jax.data import store
from nag_jax.data.packing import pack
from nag_jax.errors import UserError
from nag_jax.evals.bits_per_byte import Evaluation

pytestmark = pytest.mark.usefixtures("cached_compilation")

T = 16  # row length of the tiny run


def nats_of_targets(run, rows):
    """-ln p of every token after the first of each row, in float64, all rows of one shape."""
    padded = np.zeros((len(rows), T + 1), int)
    for padded_row, row in zip(padded, rows, strict=True):
        padded_row[: len(row)] = row
    logits = np.asarray(run.logits(padded[:, :-1]), np.float64)
    top = logits.max(-1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_p, padded[:, 1:, None], -1)[..., 0]
    return [values[: len(row) - 1] for values, row in zip(nats, rows, strict=True)]


def nats_of_pieces(run, *pieces):
    """Nats of a document that rows cut into these pieces of bytes: each starts after a BOS."""
    rows = [[run.tokenizer.bos_id, *piece] for piece in pieces]
    return sum(values.sum() for values in nats_of_targets(run, rows))


def evaluate(run, *texts, **options):
    return run.evaluate([(f"d{i}", text) for i, text in enumerate(texts)], **options)


def test_documents_alone(loaded):
    texts = ["abc", "a" * T, "b" * (T + 1), "é😀" * 7, "x"]
    for text in texts:
        data = text.encode()
        pieces = [data[i : i + T] for i in range(0, len(data), T)]
        result = evaluate(loaded, text)
        assert result.document_bytes.tolist() == [len(data)]
        np.testing.assert_allclose(result.document_nats, nats_of_pieces(loaded, *pieces), rtol=1e-5)
        assert result.tokens == len(data)  # no target is a BOS
        np.testing.assert_allclose(result.loss, result.document_nats.sum() / len(data), rtol=1e-6)
        bits = result.document_nats.sum() / np.log(2) / len(data)
        assert result.bits_per_byte == pytest.approx(bits, rel=1e-12)
        assert loaded.bits_per_byte([text]) == pytest.approx(bits, rel=1e-6)


def test_documents_together(loaded):
    """Row 1: BOS a BOS b1; row 2: BOS b2; row 3: BOS b3 BOS c. BOS counts in the loss alone."""
    a, b, c = b"first", b"the second one, which is cut", b"last"
    first = T + 1 - 2 - len(a)
    pieces = [b[:first], b[first : first + T], b[first + T :]]
    result = evaluate(loaded, *(text.decode() for text in (a, b, c)))
    expected = [nats_of_pieces(loaded, *parts) for parts in ([a], pieces, [c])]
    np.testing.assert_allclose(result.document_nats, expected, rtol=1e-5)
    bos = loaded.tokenizer.bos_id
    begins = nats_of_targets(loaded, [[bos, *a, bos], [bos, *pieces[2], bos]])
    total = sum(expected) + sum(nats[-1] for nats in begins)
    assert result.tokens == len(a + b + c) + 2
    np.testing.assert_allclose(result.loss * result.tokens, total, rtol=1e-5)
    assert result.bits_per_byte == pytest.approx(
        sum(expected) / np.log(2) / len(a + b + c), rel=1e-5
    )
    # A document that no row cuts scores the same wherever it stands.
    for texts in (["last", "first"], ["x", "last"]):
        other = evaluate(loaded, *texts)
        np.testing.assert_allclose(other.document_nats[texts.index("last")], expected[2], rtol=1e-5)


def test_no_result_depends_on_the_batch(loaded):
    rows = store.prepare(loaded.config.data).validation
    reference = loaded.evaluate_validation(batch_size=16)
    assert len(rows) % 16 and len(rows) % 7  # ragged tails
    for size in (7, 10**6):  # the last takes all rows at once
        result = loaded.evaluate_validation(batch_size=size)
        np.testing.assert_allclose(result.document_nats, reference.document_nats, rtol=1e-6)
        assert result.tokens == reference.tokens
        assert result.accuracy == pytest.approx(reference.accuracy, abs=1.5 / result.tokens)
        for name, values in reference.taps.items():
            np.testing.assert_allclose(result.taps[name], values, rtol=1e-5, atol=1e-9)
    assert result.document_names == tuple(rows.document_names)
    bos_targets = sum(int((row["tokens"][1:] == rows.bos_id).sum()) for row in map_rows(rows))
    assert reference.tokens == result.document_bytes.sum() + bos_targets


def map_rows(rows):
    for i in range(len(rows)):
        row = rows[i]
        yield {"tokens": row["tokens"][row["segment_ids"] > 0]}


@pytest.mark.parametrize("kind", KINDS)
def test_the_divisor_is_the_text_itself(kind, tmp_path):
    rows = pack([("a", TEXT), ("b", ""), ("c", TEXT * 3)], make_tokenizer(kind, tmp_path), 8)
    size = len("naïve café 😀 — ok".encode())
    assert size == 24
    assert rows.document_names == ["a", "c"]
    assert rows.document_bytes.tolist() == [size, 3 * size]
    # The same through the store, which holds out every document but one.
    for name in ("x", "y"):
        (tmp_path / f"{name}.txt").write_text(TEXT)
    leaves = {
        "source.kind": "text",
        "source.paths": (f"{tmp_path}/?.txt",),
        "tokenizer.kind": kind,
        "validation_share": 0.5,
        "cache_folder": str(tmp_path / "cache"),
    }
    if kind not in ("bytes", "bpe"):
        leaves["tokenizer.path"] = str(tokenizer_file(kind, tmp_path))
    config = config_lib.resolve({f"data.{key}": value for key, value in leaves.items()})
    prepared = store.prepare(config.data, progress=False)
    assert prepared.validation.document_bytes.tolist() == [size]
    assert prepared.summary["validation_bytes"] == size


def test_texts_without_a_token_are_refused(loaded):
    for texts in ([], [""], ["", ""]):
        with pytest.raises(UserError, match="no token"):
            loaded.bits_per_byte(texts)
    with pytest.raises(UserError, match="d0: the text has half of a surrogate pair"):
        evaluate(loaded, "\ud800")


def test_metrics_of_an_evaluation(loaded):
    result = evaluate(loaded, "some text to measure")
    metrics = result.metrics()
    assert metrics["validation/bits_per_byte"] == result.bits_per_byte
    assert metrics["validation/tokens"] == 20 and metrics["validation/loss"] == result.loss
    sublayers = len(loaded.model.sublayer_names)
    assert {len(values) for values in result.taps.values()} == {sublayers}
    assert set(result.taps) == {"norm", "rotation", "gain", "gate", "gate_floored"}
    assert metrics["validation/taps/gate/001"] == result.taps["gate"][1]
    assert 0 <= metrics["validation/dead_gate_share"] <= 1
    assert all(isinstance(value, float) for value in metrics.values())
    closed = dataclasses.replace(result, taps={**result.taps, "gate": [0.5, 0.009]})
    assert closed.dead_gate_share == 0.5
    taps = {name: values for name, values in result.taps.items() if "gate" not in name}
    plain = dataclasses.replace(result, taps=taps)
    assert plain.dead_gate_share is None
    assert "validation/dead_gate_share" not in plain.metrics()


def test_sums_are_per_document_not_means():
    result = Evaluation(("a", "b"), np.array([2.0, 6.0]), np.array([1, 3]), 4, 2.0, 0.5, {})
    assert result.bits_per_byte == pytest.approx(2 / np.log(2))


def test_accuracy_is_that_of_the_most_likely_token(loaded):
    text = b"the end of it"
    logits = np.asarray(loaded.logits([256, *text[:-1]]))
    share = np.mean(logits.argmax(-1) == np.frombuffer(text, np.uint8))
    assert evaluate(loaded, text.decode()).accuracy == pytest.approx(share)
