"""Sources: what they read, and the one sentence that names the place of what is wrong."""

import gzip
import json
import sys
import sysconfig
import types
from pathlib import Path

import pyarrow
import pytest
from ml_collections import ConfigDict
from pyarrow import parquet

from nag_jax.data import sources
from nag_jax.errors import UserError


def zstd(data):
    return pyarrow.compress(data, "zstd", asbytes=True)


def text_files(*paths):
    return sources.TextFiles(ConfigDict({"paths": tuple(map(str, paths))}))


def json_lines(*paths, field="text"):
    return sources.JsonLines(ConfigDict({"paths": tuple(map(str, paths)), "field": field}))


def parquet_files(*paths, field="text"):
    return sources.Parquet(ConfigDict({"paths": tuple(map(str, paths)), "field": field}))


def pairs(source):
    return [(document.name, document.text) for document in source.documents()]


def test_standard_library_is_all_source_outside_tests():
    source = sources.PythonStandardLibrary(ConfigDict())
    names = source.names()
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py", "importlib/__init__.py"} <= set(names)
    assert not any(
        part in ("test", "tests", "idle_test", "site-packages")
        for name in names
        for part in name.split("/")
    )
    documents = list(source.documents())
    assert [document.name for document in documents] == names
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = {document.name: document.text for document in documents}
    assert texts["abc.py"] == (library / "abc.py").read_bytes().decode()
    assert source.total_bytes() > 5e6


def test_undecodable_library_file_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes("# -*- coding: latin-1 -*-\n# é\n".encode("latin-1"))
    (tmp_path / "bad.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "broken_link.py").symlink_to(tmp_path / "gone.py")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "hidden.py").write_text("x")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert pairs(sources.PythonStandardLibrary(ConfigDict())) == [
        ("bad.py", None),
        ("good.py", "x = 1\n"),
        ("latin.py", "# -*- coding: latin-1 -*-\n# é\n"),
    ]


def test_text_files_and_patterns(tmp_path, monkeypatch):
    (tmp_path / "b" / "deep").mkdir(parents=True)
    for name in ("a.txt", "b/a.txt", "b/deep/c.txt", "b/no.md"):
        (tmp_path / name).write_bytes(name.encode() + b"\r\n")
    (tmp_path / "b" / "odd[1].txt").write_text("odd")
    assert pairs(text_files(tmp_path / "b/**/*.txt")) == [
        ("a.txt", "b/a.txt\r\n"),
        ("deep/c.txt", "b/deep/c.txt\r\n"),
        ("odd[1].txt", "odd"),
    ]
    assert pairs(text_files(tmp_path / "b/odd[1].txt")) == [("odd[1].txt", "odd")]
    # A file named twice is read once; equal names of two files are told apart.
    names = text_files(tmp_path / "a.txt", tmp_path / "*.txt", tmp_path / "b/a.txt").names()
    assert names == ["a.txt", str(tmp_path / "b/a.txt")]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "b")
    assert pairs(text_files("~/a.txt", "deep/c.txt")) == [
        ("a.txt", "a.txt\r\n"),
        ("c.txt", "b/deep/c.txt\r\n"),
    ]


def test_missing_files_and_folders_are_named(tmp_path):
    for source in (text_files, json_lines, parquet_files):
        with pytest.raises(UserError, match=r"data\.source\.paths: there is no file .*gone\.txt"):
            source(tmp_path / "gone.txt")
        with pytest.raises(UserError, match=r"no file matches .*\*\.none"):
            source(tmp_path / "*.none")
        with pytest.raises(UserError, match=f"{tmp_path} is a folder"):
            source(tmp_path)
        with pytest.raises(UserError, match=r"data\.source\.paths is empty"):
            source("")


def test_undecodable_text_names_file_and_line(tmp_path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"one\ntwo\nthree \xff\n")
    documents = text_files(tmp_path / "*.txt").documents()
    assert next(documents).text == "fine"
    with pytest.raises(UserError, match=r"b\.txt:3: byte 0xff is not UTF-8"):
        next(documents)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines_plain_and_compressed(tmp_path, suffix):
    records = [{"body": "naïve 😀"}, {"body": "two\nlines"}]
    data = "".join(json.dumps(record) + "\n\n" for record in records).encode()
    path = tmp_path / f"x.jsonl{suffix}"
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstd}
    # Two members or frames in one file are one stream.
    path.write_bytes(compress[suffix](data) + compress[suffix](b'{"body": "end"}'))
    expected = [("x.jsonl" + suffix + ":1", "naïve 😀"), ("x.jsonl" + suffix + ":3", "two\nlines")]
    assert pairs(json_lines(path, field="body")) == [*expected, (f"x.jsonl{suffix}:5", "end")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "not a JSON value"),
        (b"[1, 2]", "must hold a JSON object, not a list"),
        (b'{"body": "a"}', "no field 'text' .*it has body"),
        (b'{"text": 7}', "field 'text' holds a number, not a text"),
        (b'{"text": null}', "holds null"),
        (b'{"text": "\xff"}', "byte 0xff is not UTF-8"),
    ],
)
def test_a_bad_line_names_file_and_line(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    documents = json_lines(path).documents()
    assert next(documents).text == "good"
    with pytest.raises(UserError, match=rf"x\.jsonl:3: .*{message}"):
        next(documents)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_truncated_compressed_file_is_named(tmp_path, suffix):
    data = b"".join(json.dumps({"text": f"line {i * i}"}).encode() + b"\n" for i in range(5000))
    compress = gzip.compress if suffix == ".gz" else zstd
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(compress(data)[:-200])
    with pytest.raises(UserError, match=rf"x\.jsonl{suffix}:\d+: "):
        pairs(json_lines(path))
    path.write_bytes(b"no such format")
    with pytest.raises(UserError, match=rf"x\.jsonl{suffix}:1: cannot be read"):
        pairs(json_lines(path))


def test_parquet(tmp_path):
    path = tmp_path / "x.parquet"
    texts = [f"text {i}" for i in range(600)]
    for kind in (pyarrow.string(), pyarrow.large_string()):
        table = pyarrow.table({"id": range(600), "text": pyarrow.array(texts, kind)})
        parquet.write_table(table, path, row_group_size=100)
        assert pairs(parquet_files(path)) == [(f"x.parquet:{i}", t) for i, t in enumerate(texts)]
    with pytest.raises(UserError, match=r"x\.parquet: no column 'body' .*it has id, text"):
        pairs(parquet_files(path, field="body"))
    with pytest.raises(UserError, match=r"x\.parquet, row 0: field 'id' holds a number"):
        pairs(parquet_files(path, field="id"))
    parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    with pytest.raises(UserError, match=r"x\.parquet, row 1: field 'text' holds null"):
        pairs(parquet_files(path))
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UserError, match=r"x\.parquet cannot be read as Parquet"):
        pairs(parquet_files(path))


def hub(monkeypatch, rows):
    """Stands in for the hub's libraries; returns the calls they got."""
    calls = []
    datasets = types.ModuleType("datasets")
    datasets.load_dataset = lambda *args, **kwargs: calls.append((args, kwargs)) or iter(rows)
    library = types.ModuleType("huggingface_hub")

    class HfApi:
        def dataset_info(self, name, revision):
            if name == "no/where":
                raise ConnectionError("offline")
            return types.SimpleNamespace(sha="b" * 40)

    library.HfApi = HfApi
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    return calls


def hub_node(**values):
    return ConfigDict({**sources.HuggingFace.defaults(), "dataset": "some/thing", **values})


def test_hub_data_set_is_streamed_at_a_commit(monkeypatch):
    calls = hub(monkeypatch, [{"text": "one"}, {"text": "two"}, {"text": 3}])
    source = sources.HuggingFace(hub_node(revision="main"))
    assert source.listing() == [f"some/thing@{'b' * 40}"]
    documents = source.documents()
    assert [next(documents)[:2] for _ in range(2)] == [
        ("some/thing/train:0", "one"),
        ("some/thing/train:1", "two"),
    ]
    with pytest.raises(UserError, match="some/thing/train, row 2: field 'text' holds a number"):
        next(documents)
    ((args, kwargs),) = calls
    assert args == ("some/thing", None)
    assert kwargs == {"split": "train", "revision": "b" * 40, "streaming": True}


def test_a_commit_needs_no_look_up_and_failures_are_told(monkeypatch):
    hub(monkeypatch, [])
    pinned = sources.HuggingFace(hub_node(dataset="no/where", revision="a" * 40))
    assert pinned.listing() == [f"no/where@{'a' * 40}"]
    with pytest.raises(UserError, match="no/where.*offline.*data.source.revision"):
        sources.HuggingFace(hub_node(dataset="no/where"))
    with pytest.raises(UserError, match="data.source.dataset is empty"):
        sources.HuggingFace(hub_node(dataset=""))

    def broken():
        yield {"text": "one"}
        raise OSError("connection lost")

    hub(monkeypatch, broken())
    documents = sources.HuggingFace(hub_node(revision="a" * 40)).documents()
    next(documents)
    with pytest.raises(UserError, match="after row 0: connection lost"):
        next(documents)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"\[hf\]"):
        sources.HuggingFace(hub_node())


def test_listing_changes_with_a_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = text_files(path).listing()
    assert text_files(path).listing() == before
    path.write_text("two!")
    source = text_files(path)
    assert source.listing() != before
    path.unlink()
    with pytest.raises(UserError, match=f"{path} cannot be read: No such file"):
        source.listing()
    with pytest.raises(UserError, match=f"{path} cannot be read: No such file"):
        pairs(source)
