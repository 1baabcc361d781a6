"""The row store: found again, resumed with identical rows, and clear when anything is wrong."""

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from nag_jax.data import building, sources, store, tokenizers
from nag_jax.data.packing import pack
from nag_jax.errors import UserError

ROOT = Path(__file__).parents[2]


def write_corpus(folder, count=60, words=40):
    """Text files that differ; some held out, one empty."""
    folder.mkdir(exist_ok=True)
    for i in range(count):
        text = " ".join(f"{i * j * 7919 % 1009}" for j in range(1, words + i % 13))
        (folder / f"{i:03d}.txt").write_text(f"naïve {i} 😀\n{text}\n")
    (folder / "empty.txt").write_text("")


@pytest.fixture
def corpus_config(data_config, tmp_path):
    """A `data` node over a small corpus of text files, in rows of 32 tokens."""
    write_corpus(tmp_path / "corpus")

    def build(**leaves):
        base = {
            "source.kind": "text",
            "source.paths": (str(tmp_path / "corpus/*.txt"),),
            "row_length": 32,
            "validation_share": 0.2,
        }
        return data_config(**{**base, **leaves})

    return build


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(building, "SHARD_TOKENS", 33 * 20)  # 20 rows of 32 + 1


def all_rows(rows):
    return {key: np.stack([rows[i][key] for i in range(len(rows))]) for key in rows[0]}


def assert_same_rows(a, b):
    a, b = all_rows(a), all_rows(b)
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_array_equal(a[key], b[key], strict=True)


def assert_same(a, b):
    """Equal in everything but the folder."""
    assert_same_rows(a.train, b.train)
    assert_same_rows(a.validation, b.validation)
    assert (a.fingerprint, a.corpus_fingerprint) == (b.fingerprint, b.corpus_fingerprint)
    assert a.summary == b.summary


def partial_shards(cache):
    return sorted(path.name for path in Path(cache).glob("partial/*/train-*.array_record"))


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_every_document_is_stored_once(corpus_config, tmp_path, kind):
    leaves = {"tokenizer.vocab_size": 300} if kind == "bpe" else {}
    prepared = store.prepare(corpus_config(**{"tokenizer.kind": kind, **leaves}))
    train, validation = prepared.train, prepared.validation
    files = {path.name: path for path in sorted((tmp_path / "corpus").glob("*.txt"))}
    held_out = validation.document_names
    assert 3 <= len(held_out) <= 25
    assert validation.document_bytes.tolist() == [files[n].stat().st_size for n in held_out]
    training = [(name, path.read_text()) for name, path in files.items() if name not in held_out]
    expected = all_rows(pack(training, prepared.tokenizer, 32))
    del expected["documents"]
    for key, value in all_rows(train).items():
        np.testing.assert_array_equal(value, expected[key], strict=True)
    by_hash = [(name, files[name].read_text()) for name in held_out]
    assert_same_rows(validation, pack(by_hash, prepared.tokenizer, 32))
    assert (train.row_length, train.bos_id) == (32, prepared.tokenizer.bos_id)
    texts = [text for _, text in training if text]
    assert store.split_texts(corpus_config()) == (texts, by_hash)

    summary = prepared.summary
    targets = all_rows(train)
    assert summary["documents"] == 60
    assert summary["empty"] == 1
    assert summary["train_documents"] == 60 - len(held_out)
    assert summary["rows"] == len(train)
    assert summary["tokens"] == sum(len(prepared.tokenizer.encode(text)) for _, text in training)
    bos = (targets["tokens"] == train.bos_id) & (targets["segment_ids"] > 0)
    assert summary["tokens"] == ((targets["segment_ids"] > 0) & ~bos).sum()
    assert summary["padding_share"] == pytest.approx((targets["segment_ids"] == 0).mean())
    assert summary["validation_bytes"] == validation.document_bytes.sum()
    lines = "\n".join(prepared.summary_lines())
    for word in ("60 documents", "1 empty", "cuts", "padding", prepared.fingerprint):
        assert word in lines


def test_cuts_are_counted(data_config, tmp_path):
    for name, size in (("a", 3), ("b", 5), ("c", 2), ("d", 40), ("e", 4), ("f", 1)):
        (tmp_path / f"{name}.txt").write_text("x" * size)
    prepared = store.prepare(
        data_config(
            **{
                "source.kind": "text",
                "source.paths": (str(tmp_path / "?.txt"),),
                "row_length": 8,
                "validation_share": 0.0,
            }
        )
    )
    # Rows: aaa.bbbb | b.cc.ddd | 8 d | 8 d | 8 d | 8 d | ddddd.ee | ee.f
    assert prepared.summary["cuts"] == 7
    assert prepared.summary["cut_documents"] == 3
    assert prepared.summary["rows"] == 8
    assert len(prepared.validation) == 0
    assert prepared.validation.document_names == []


def test_second_start_reads_no_document(corpus_config, monkeypatch):
    first = store.prepare(corpus_config())

    def fail(self):
        raise AssertionError("read again")

    monkeypatch.setattr(sources.TextFiles, "documents", fail)
    second = store.prepare(corpus_config(workers=3, prefetch_rows=0))
    assert_same(first, second)
    assert first.folder == second.folder


def test_fingerprints_follow_content_alone(corpus_config, tmp_path):
    first = store.prepare(corpus_config())
    for path in (tmp_path / "corpus").iterdir():
        os.utime(path, ns=(1, 1))
    touched = store.prepare(corpus_config())
    assert touched.folder != first.folder
    assert_same(first, touched)
    longer = store.prepare(corpus_config(row_length=64))
    assert longer.corpus_fingerprint == first.corpus_fingerprint
    assert longer.fingerprint != first.fingerprint
    path = tmp_path / "corpus/007.txt"
    path.write_text(path.read_text() + "!")
    changed = store.prepare(corpus_config())
    assert changed.corpus_fingerprint != first.corpus_fingerprint
    assert changed.fingerprint != first.fingerprint


def test_shards_do_not_change_the_rows(corpus_config, data_config, monkeypatch, tmp_path):
    whole = store.prepare(corpus_config())
    monkeypatch.setattr(building, "SHARD_TOKENS", 33 * 20)
    cut = store.prepare(corpus_config(cache_folder=str(tmp_path / "other")))
    assert_same(whole, cut)
    assert len(list(Path(cut.folder).glob("train-*.array_record"))) > 5


def test_processes_do_not_change_the_rows(corpus_config, monkeypatch, tmp_path):
    one = store.prepare(corpus_config())
    monkeypatch.setattr("nag_jax.data.encoding.CHUNK_CHARACTERS", 500)
    two = store.prepare(corpus_config(workers=2, cache_folder=str(tmp_path / "other")))
    assert_same(one, two)
    assert not multiprocessing.active_children()


def test_a_process_that_dies_is_told(corpus_config, tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text(
        textwrap.dedent(
            """
            import multiprocessing, os
            from nag_jax.data.tokenizers import ByteTokenizer

            class Deadly(ByteTokenizer):
                def encode_batch(self, texts):
                    if multiprocessing.parent_process():
                        os._exit(1)
                    return super().encode_batch(texts)
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = corpus_config(**{"tokenizer.kind": "deadly:Deadly", "workers": 2})
    with pytest.raises(UserError, match=r"a tokenising process died \(data\.workers=2\)"):
        store.prepare(config)
    assert not multiprocessing.active_children()


def test_a_bad_file_keeps_shards_and_mended_goes_on(corpus_config, small_shards, tmp_path):
    good = store.prepare(corpus_config(cache_folder=str(tmp_path / "other")))
    path = tmp_path / "corpus/050.txt"
    content = path.read_bytes()
    path.write_bytes(content[:30] + b"\n\xff")
    with pytest.raises(UserError, match=r"050\.txt:3: byte 0xff"):
        store.prepare(corpus_config())
    kept = partial_shards(tmp_path / "cache")
    assert len(kept) >= 5
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob(kept[0])}
    path.write_bytes(content)
    mended = store.prepare(corpus_config())
    assert_same(good, mended)
    # The first shard is the very file that the first try wrote.
    assert (Path(mended.folder) / kept[0]).stat().st_mtime_ns in written.values()
    assert not list((tmp_path / "cache/partial").iterdir())


def test_shards_of_changed_documents_are_written_anew(corpus_config, small_shards, tmp_path):
    path, early = tmp_path / "corpus/050.txt", tmp_path / "corpus/003.txt"
    content = path.read_bytes()
    path.write_bytes(b"\xff")
    with pytest.raises(UserError):
        store.prepare(corpus_config())
    path.write_bytes(content)
    early.write_text("changed " * 20)
    resumed = store.prepare(corpus_config())
    fresh = store.prepare(corpus_config(cache_folder=str(tmp_path / "other")))
    assert_same(resumed, fresh)


KILLED = """
    import json, sys, time
    from ml_collections import ConfigDict
    from nag_jax.data import building, sources, store

    config = ConfigDict(json.loads(sys.argv[1]))
    config.source.paths = tuple(config.source.paths)
    building.SHARD_TOKENS = 33 * 20
    read = sources.TextFiles.documents

    def slowly(self):
        for document in read(self):
            time.sleep(0.01)
            yield document

    if __name__ == "__main__":
        if sys.argv[2] == "slow":
            sources.TextFiles.documents = slowly
            import nag_jax.data.encoding
            nag_jax.data.encoding.CHUNK_CHARACTERS = 100
        print(store.prepare(config, progress=False).fingerprint)
"""


def run_program(program, config, *args, **options):
    return subprocess.Popen(
        [sys.executable, str(program), json.dumps(config.to_dict()), *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_killed_and_run_again_gives_identical_rows(corpus_config, small_shards, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(KILLED))
    config = corpus_config()
    process = run_program(program, config, "slow")
    deadline = time.monotonic() + 60
    while len(partial_shards(tmp_path / "cache")) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = partial_shards(tmp_path / "cache")
    assert len(kept) >= 3
    resumed = store.prepare(config)
    assert_same(resumed, store.prepare(corpus_config(cache_folder=str(tmp_path / "other"))))


def test_two_at_a_time_wait_for_each_other(corpus_config, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(KILLED))
    config = corpus_config(**{"tokenizer.kind": "bpe", "tokenizer.vocab_size": 300})
    processes = [run_program(program, config, "slow") for _ in range(2)]
    results = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0][0] == results[1][0] != ""
    assert store.prepare(config).fingerprint == results[0][0].strip()
    assert not list((tmp_path / "cache/partial").iterdir())


def test_full_disk_keeps_finished_shards(corpus_config, small_shards, tmp_path):
    config = corpus_config()
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(KILLED).replace("33 * 20", "33 * 20 if sys.argv[2] == 'ok' else 33 * 400")
    )

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))

    process = run_program(program, config, "limited", preexec_fn=limited)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "UserError: writing" in errors
    assert "train-00000.array_record failed" in errors
    assert not list((tmp_path / "cache").rglob("*.tmp"))
    assert store.prepare(config).summary["documents"] == 60


def test_damaged_shards_are_named(corpus_config):
    config = corpus_config()
    prepared = store.prepare(config)
    path = Path(prepared.folder) / "train-00000.array_record"
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    with pytest.raises(UserError, match=rf"{path} is damaged .*bytes.*{prepared.folder}"):
        store.prepare(config)
    path.unlink()
    with pytest.raises(UserError, match=rf"{path} is damaged"):
        store.prepare(config)
    flipped = bytearray(content)
    for place in range(2000, len(flipped), 500):
        flipped[place] ^= 0xFF
    path.write_bytes(flipped)
    again = store.prepare(config)
    with pytest.raises(UserError, match=rf"{path} is damaged"):
        all_rows(again.train)
    (Path(prepared.folder) / "store.json").write_text("{")
    with pytest.raises(UserError, match=r"store\.json is damaged"):
        store.prepare(config)


def test_empty_corpora_leave_nothing_behind(data_config, tmp_path):
    def config(**leaves):
        paths = (str(tmp_path / "*.txt"),)
        return data_config(**{"source.kind": "text", "source.paths": paths, **leaves})

    (tmp_path / "a.txt").write_text("")
    for leaves in ({}, {"tokenizer.kind": "bpe"}, {"validation_share": 0.0}):
        with pytest.raises(UserError, match=r"data\.source text \(.*\.txt\): the corpus is empty"):
            store.prepare(config(**leaves))
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n')
    lines = {"source.kind": "jsonl", "source.paths": (str(path),), "validation_share": 0.9999999}
    with pytest.raises(UserError, match=r"all 1 documents are held out at data\.validation_share"):
        store.prepare(data_config(**lines))
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert {path.parent.name for path in left} <= {"locks"}
    assert not list((tmp_path / "cache/partial").iterdir())


def test_missing_corpus_makes_no_folder(data_config, tmp_path):
    leaves = {"source.kind": "text", "source.paths": (str(tmp_path / "gone.txt"),)}
    with pytest.raises(UserError, match="gone"):
        store.prepare(data_config(**leaves))
    assert not (tmp_path / "cache").exists()


def test_cache_folder_that_cannot_be_is_named(corpus_config, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nag_jax"):
        with pytest.raises(UserError, match=rf"data\.cache_folder={folder} cannot be"):
            store.prepare(corpus_config(cache_folder=str(folder)))
    with pytest.raises(UserError, match="data.cache_folder=gs://x: it must be a local folder"):
        store.prepare(corpus_config(cache_folder="gs://x"))


def test_no_validation_is_said(data_config, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    leaves = {"source.kind": "jsonl", "source.paths": (str(path),), "validation_share": 1e-9}
    prepared = store.prepare(data_config(**leaves))
    assert len(prepared.validation) == 0
    assert "no document was held out" in prepared.summary_lines()[-1]


def test_one_file_is_validated_on_its_tail(data_config, tmp_path):
    path = tmp_path / "novel.txt"
    path.write_text("".join(f"This is line {i}.\n" for i in range(1000)))
    prepared = store.prepare(
        data_config(**{"source.kind": "text", "source.paths": (str(path),), "row_length": 32})
    )
    assert prepared.validation.document_names == ["novel.txt[tail]"]
    (training,), ((_, tail),) = store.split_texts(
        data_config(**{"source.kind": "text", "source.paths": (str(path),)})
    )
    assert training + tail == path.read_text()


def test_own_source_and_tokenizer(data_config, tmp_path, monkeypatch):
    (tmp_path / "own_data_parts.py").write_text(
        textwrap.dedent(
            """
            from nag_jax.data.sources import Document
            from nag_jax.data.tokenizers import Tokenizer

            class Numbers:
                @staticmethod
                def defaults():
                    return {"count": 10}

                def __init__(self, node):
                    self.count = node.count

                def listing(self):
                    return [str(self.count)]

                def documents(self):
                    for i in range(self.count):
                        yield Document(f"n{i}", " ".join(map(str, range(i))), f"number {i}")

            class Digits(Tokenizer):
                vocab_size, bos_id = 12, 11

                @staticmethod
                def defaults():
                    return {}

                @classmethod
                def from_config(cls, node, training_texts):
                    return cls()

                @classmethod
                def from_files(cls, content):
                    return cls()

                def to_files(self):
                    return {}

                def encode(self, text):
                    return ["0123456789 ".index(c) for c in text]

                def _decode(self, ids):
                    return "".join("0123456789 "[i] for i in ids)
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    leaves = {
        "source.kind": "own_data_parts:Numbers",
        "source.count": 40,
        "tokenizer.kind": "own_data_parts:Digits",
        "row_length": 16,
    }
    prepared = store.prepare(data_config(**leaves))
    assert prepared.summary["documents"] == 39
    assert prepared.tokenizer.decode(prepared.tokenizer.encode("1 23")) == "1 23"
    assert store.prepare(data_config(**leaves)).folder == prepared.folder
    assert store.prepare(data_config(**{**leaves, "source.count": 41})).folder != prepared.folder
    loaded = tokenizers.load(prepared.folder / "tokenizer", allow_user_kinds=True)
    assert loaded.fingerprint == prepared.tokenizer.fingerprint
