"""Progress: plain lines where there is no terminal, a bar where there is one, or nothing."""

import io

from nag_jax.data import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show(monkeypatch, stream, **options):
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    with progress.Progress("tokenising x", 2_000_000, **options) as shown:
        shown.update(1_000_000, "12 documents, 345,678 tokens")
    return stream.getvalue()


def test_plain_lines(monkeypatch):
    text = show(monkeypatch, io.StringIO())
    assert text.startswith("tokenising x: 50%, 12 documents, 345,678 tokens, ")
    assert text.endswith(" MB/s\n")


def test_bar_on_a_terminal(monkeypatch):
    text = show(monkeypatch, Terminal())
    assert "tokenising x" in text
    assert "345,678 tokens" in text


def test_nothing(monkeypatch):
    assert show(monkeypatch, io.StringIO(), enabled=False) == ""
    assert show(monkeypatch, Terminal(), enabled=False) == ""
