"""The binary that prepares data, in a real process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def prepare(*overrides):
    config = f"--config={ROOT}/configs/own_data.py:source=text,tokenizer=bytes"
    return subprocess.run(
        [sys.executable, "-m", "nag_jax.prepare_data", config]
        + [f"--config.data.{override}" for override in overrides],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


def test_it_prints_what_it_prepared(tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"document {i}\n" * 20)
    overrides = (
        f"source.paths={tmp_path}/*.txt",
        f"cache_folder={tmp_path}/cache",
        "workers=2",
        "row_length=64",
    )
    first, second = prepare(*overrides), prepare(*overrides)
    assert first.returncode == 0, first.stderr
    assert "20 documents" in first.stdout
    assert f"{tmp_path}/cache/rows/" in first.stdout
    assert second.stdout == first.stdout


def test_a_mistake_is_one_sentence(tmp_path):
    result = prepare(f"source.paths={tmp_path}/gone.txt", f"cache_folder={tmp_path}/cache")
    assert result.returncode == 2
    assert result.stderr == f"error: data.source.paths: there is no file {tmp_path}/gone.txt\n"
    assert not (tmp_path / "cache").exists()
    (tmp_path / "bad.txt").write_bytes(b"one\n\xff")
    result = prepare(f"source.paths={tmp_path}/bad.txt", f"cache_folder={tmp_path}/cache")
    assert result.returncode == 2
    assert result.stderr == f"error: {tmp_path}/bad.txt:2: byte 0xff is not UTF-8\n"
