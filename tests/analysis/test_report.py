"""The report's files and words, from made-up runs."""

import html.parser
import math

import pytest

from nag_jax.analysis.report import RunSummary, Sample, verdict, write_report

SUBLAYERS = ("attention", "feedforward") * 3


def run(name, bits, gates, tokens_per_step=8192):
    metrics = [
        {"step": step, "train/loss": 1 + 4 * math.exp(-step / 60) + 0.05 * math.sin(step)}
        for step in range(1, 301)
    ]
    metrics += [
        {"step": step, "validation/bits_per_byte": bits + 3 * math.exp(-step / 70)}
        for step in range(100, 301, 50)
    ]
    taps = {
        "norm": [1.0 + 0.3 * i * (1 if gates else 4) for i in range(6)],
        "gain": [0.5 / (i + 1) ** 0.5 for i in range(6)],
        "rotation": [0.4 / (i + 1) ** 0.5 for i in range(6)],
    }
    if gates:
        taps["gate"] = [0.5, 0.45, 0.6, 0.4, 0.005, 0.3]
    return RunSummary(
        name=name,
        metrics=metrics,
        tokens_per_step=tokens_per_step,
        bits_per_byte=bits,
        taps=taps,
        sublayers=SUBLAYERS,
        dead_gate_share=1 / 6 if gates else None,
        parameters=5_123_456,
        seconds=101.2,
        config={"model": {"d_model": 256, "connection": {"kind": "<nag>"}}},
    )


BASELINES = {"smoothed byte trigram": 2.47, "xz -9": 1.29}
SAMPLE = Sample("NAG", "def f(x):\n", "    return x < 1 & <script>alert(1)</script>\n")
NOTES = {"corpus": "standard library <of Python>", "corpus fingerprint": "abc123"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports") / "new" / "report"
    page = write_report(
        folder, [run("NAG", 1.9, True), run("Pre-norm", 1.8, False)], BASELINES, SAMPLE, NOTES
    )
    assert str(page) == str(folder / "index.html")
    return folder


class Reader(html.parser.HTMLParser):
    """Collects text, addresses that are referred to, and tags left open."""

    def __init__(self):
        super().__init__()
        self.text, self.addresses, self.open = "", [], []

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_page_is_whole_and_needs_nothing_else(folder):
    reader = Reader()
    reader.feed((folder / "index.html").read_text())
    assert not reader.open
    assert len(reader.addresses) == 2
    assert all(address.startswith("data:image/png;base64,") for address in reader.addresses)


def test_page_shows_results_sample_and_facts_as_text(folder):
    reader = Reader()
    reader.feed((folder / "index.html").read_text())
    for text in ("1.9000", "1.8000", "2.4700", "2,457,600", "17%", "abc123", '"kind": "<nag>"'):
        assert text in reader.text
    assert SAMPLE.prompt + SAMPLE.continuation in reader.text
    assert NOTES["corpus"] in reader.text


def test_figures_are_png_files(folder):
    for name in ("loss.png", "depth.png"):
        data = (folder / name).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 20_000


def test_writing_again_replaces(folder, tmp_path):
    for bits in (1.5, 1.7):
        page = write_report(tmp_path, [run("NAG", bits, True)], {}, SAMPLE, {})
    assert "1.7000" in page.read_text() and "1.5000" not in page.read_text()


def test_verdict_follows_the_numbers():
    nag, prenorm = run("NAG", 1.90, True), run("pre-norm", 1.80, False)
    words = verdict([nag, prenorm], BASELINES)
    assert words.startswith(
        "Pre-norm ends ahead: 1.800 bits per byte against 1.900 of NAG, which is 5.6% more, "
        "after 2,457,600 training tokens each."
    )
    assert "smoothed byte trigram needs 2.470 bits per byte: pre-norm and NAG beat it." in words
    assert (
        "For comparison, xz -9 needs 1.290 bits per byte: pre-norm and NAG do not beat it." in words
    )
    assert "17% of the gates of NAG are dead." in words
    words = verdict([run("NAG", 1.7, True), prenorm], {"yardstick": 1.75})
    assert words.startswith("NAG ends ahead")
    assert "NAG beats it, pre-norm does not." in words


def test_verdict_says_level_and_unequal_training():
    words = verdict([run("NAG", 1.8001, True), run("Pre-norm", 1.8, False, 4096)], {})
    assert "end level at 1.800 bits per byte; they were not trained on equally many" in words


def test_values_that_are_not_finite_are_left_out_of_the_plot(tmp_path):
    broken = run("NAG", 1.9, True)
    broken.metrics[10]["train/loss"] = float("nan")
    broken.taps["gain"][2] = float("inf")
    assert write_report(tmp_path, [broken], BASELINES, SAMPLE, NOTES).exists()
