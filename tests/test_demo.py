"""The demo at its smallest: two runs, the yardsticks, a sample, and a report that shows them."""

import re

import pytest
from run_helpers import REPOSITORY
from use_helpers import assert_refused, call, folder_unchanged

from nag_jax.training.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("cached_compilation")


def bits_shown(text):
    """The table's numbers by name."""
    rows = re.findall(r"│ (NAG|pre-norm|smoothed trigram of bytes|xz -9)\S* .*?│ +([\d.]+) │", text)
    return {name: float(bits) for name, bits in rows}


@pytest.mark.slow
def test_two_runs_and_a_report(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("HOME", str(tmp_path))
    done = call("demo", "--smoke", f"--runs={tmp_path}/runs", f"--out={tmp_path}/out/report")
    assert (done.code, done.err) == (0, ""), done
    shown = bits_shown(done.out)
    assert set(shown) == {"NAG", "pre-norm", "smoothed trigram of bytes", "xz -9"}
    for name, folder in (("NAG", "nag"), ("pre-norm", "prenorm")):
        lines = read_metrics(tmp_path / "runs" / folder)
        bits = [
            line["validation/bits_per_byte"] for line in lines if "validation/bits_per_byte" in line
        ]
        assert shown[name] == round(bits[-1], 4)
    winner = min(("NAG", "pre-norm"), key=shown.get)
    words = " ".join(done.out.split())
    assert f"{winner[0].upper()}{winner[1:]} ends ahead" in words
    assert f"a sample of {winner}" in words and "def read_lines(path):" in words
    folder = tmp_path / "out" / "report"
    assert {path.name for path in folder.iterdir()} == {"depth.png", "index.html", "loss.png"}
    for image in ("depth", "loss"):
        assert (folder / f"{image}.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "index.html").read_text()
    assert f"{shown['NAG']:.4f}" in page and f"{shown['pre-norm']:.4f}" in page
    assert page.count("data:image/png;base64,") == 2 and "http" not in page


def test_mistakes_come_before_the_work(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("HOME", str(tmp_path))
    place = tmp_path / "place"
    place.mkdir()
    (place / "file").write_text("precious")
    runs = f"--runs={place}/runs"
    with folder_unchanged(place):
        assert_refused(call("demo", runs, f"--out={place}/file"), f"--out={place}/file")
        assert_refused(call("demo", runs, f"--out={place}/file/report"), "Not a directory")
        assert_refused(call("demo", "--config=configs/demo.py"), "takes no --config")
