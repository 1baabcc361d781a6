"""The binaries as a user calls them, and as a user gets them wrong.

Most calls run in this process; a few of each kind are real processes.
"""

import gzip
import json
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from run_helpers import REPOSITORY
from use_helpers import assert_refused, call, call_process, folder_unchanged

import nag_jax
import nag_jax.parameters
from nag_jax import runs
from nag_jax.training import loop

pytestmark = pytest.mark.usefixtures("cached_compilation")

TEXTS = {"a.txt": "first text", "b [red]é.txt": "the second text, naïve café 😀 — ok"}


@pytest.fixture
def once_loaded(loaded, tiny_run, monkeypatch):
    """Binaries in this process share one loaded run, so that it compiles once."""
    real = runs.load_run

    def load_run(path, step=None, **options):
        if str(path) == str(tiny_run.workdir) and step is None:
            return loaded
        return real(path, step, **options)

    monkeypatch.setattr(runs, "load_run", load_run)


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


# --- evaluate ---


def evaluate(tiny_run, *args):
    return call("evaluate", f"--checkpoint={tiny_run.workdir}", *args)


def read_json(done, path):
    assert (done.code, done.err) == (0, ""), done
    return json.loads(path.read_text())


def test_evaluate_on_the_runs_own_corpus(tiny_run, loaded, once_loaded, tmp_path):
    path = tmp_path / "out.json"
    content = read_json(evaluate(tiny_run, f"--json={path}"), path)
    result = loaded.evaluate_validation()
    assert content["bits_per_byte"] == pytest.approx(result.bits_per_byte, rel=1e-6)
    assert content["corpus_fingerprint"] == loaded.corpus_fingerprint
    assert content["loops"] == loaded.model.loops
    (line,) = content["corpus"]
    assert line["documents"] == len(result.document_names) and line["name"] == "all"
    content = read_json(evaluate(tiny_run, f"--json={path}", "--by=document"), path)
    assert [line["name"] for line in content["document"]] == list(result.document_names)
    for line, nats, size in zip(
        content["document"], result.document_nats, result.document_bytes, strict=True
    ):
        assert line["bytes"] == size
        assert line["bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=1e-5)
    content = read_json(evaluate(tiny_run, f"--json={path}", "--by=file"), path)
    assert [line["name"] for line in content["file"]] == list(result.document_names)


def test_evaluate_texts(tiny_run, loaded, once_loaded, texts, tmp_path):
    path = tmp_path / "out.json"
    done = evaluate(tiny_run, f"--text={texts}/*.txt", f"--json={path}", "--batch_size=3")
    content = read_json(done, path)
    result = loaded.evaluate(TEXTS.items())
    assert content["file"] == [
        {
            "name": name,
            "documents": 1,
            "bytes": len(text.encode()),
            "bits_per_byte": pytest.approx(nats / len(text.encode()) / math.log(2), rel=1e-5),
        }
        for (name, text), nats in zip(TEXTS.items(), result.document_nats, strict=True)
    ]
    assert content["bits_per_byte"] == pytest.approx(result.bits_per_byte, rel=1e-6)
    # The table shows names as they are, whatever rich would make of them.
    assert "b [red]é.txt" in done.out and f"{content['bits_per_byte']:.4f}" in done.out
    assert f"{result.tokens} tokens" in done.out
    done = evaluate(tiny_run, f"--text={texts}/*.txt", "--by=corpus")
    assert done.code == 0 and "a.txt" not in done.out
    other = read_json(evaluate(tiny_run, f"--text={texts}/a.txt", f"--json={path}"), path)
    assert other["corpus_fingerprint"] != content["corpus_fingerprint"]


def test_evaluate_json_lines(tiny_run, loaded, once_loaded, tmp_path):
    lines = [json.dumps({"body": text}) for text in ("one", "and two", "three é")]
    with gzip.open(tmp_path / "x.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    (tmp_path / "y.jsonl").write_text(lines[0] + "\n\n" + lines[1])
    (tmp_path / "name:1").write_text("a file whose name ends like a line's")
    (tmp_path / "name:2").write_text("and another")
    path = tmp_path / "out.json"
    flags = [f"--jsonl={tmp_path}/x.jsonl.gz,{tmp_path}/y.jsonl", "--field=body"]
    flags += [f"--json={path}", f"--text={tmp_path}/name*"]
    content = read_json(evaluate(tiny_run, *flags), path)
    counted = {line["name"]: line["documents"] for line in content["file"]}
    assert counted == {"name:1": 1, "name:2": 1, "x.jsonl.gz": 3, "y.jsonl": 2}
    content = read_json(evaluate(tiny_run, *flags, "--by=document"), path)
    names = [line["name"] for line in content["document"]]
    assert names[2:] == [f"x.jsonl.gz:{i}" for i in (1, 2, 3)] + ["y.jsonl:1", "y.jsonl:3"]
    assert sum(line["bytes"] for line in content["document"][2:5]) == len("oneand twothree é") + 1


def test_evaluate_in_a_process(tiny_run, loaded, texts, tmp_path):
    """With undecodable names, a stream that takes no Unicode, and a run found by `~`."""
    os.rename(texts / "a.txt", os.fsencode(texts) + b"/\xff.txt")
    done = call_process(
        tiny_run.place,
        "evaluate",
        "--checkpoint=~/run",
        "--text=texts/*.txt",
        "--json=out.json",
        cwd=tmp_path,
        environment={
            "HOME": str(tiny_run.workdir.parent),
            "PYTHONIOENCODING": "ascii",
        },
    )
    assert (done.code, done.err) == (0, "")
    assert "\\udcff.txt" in done.out and "\\xe9.txt" in done.out
    content = json.loads((tmp_path / "out.json").read_text())
    in_order = [TEXTS["b [red]é.txt"], TEXTS["a.txt"]]
    assert content["bits_per_byte"] == pytest.approx(loaded.bits_per_byte(in_order), rel=1e-5)


# --- generate ---


def generate(tiny_run, *args):
    return call("generate", f"--checkpoint={tiny_run.workdir}", *args)


def test_generate_writes_text_to_stdout_and_why_it_ended_to_stderr(tiny_run, loaded, once_loaded):
    expected = loaded.generate("ab é", temperature=0.8, top_k=9, top_p=0.9, seed=3)
    flags = ["--temperature=0.8", "--top_k=9", "--top_p=0.9", "--seed=3"]
    done = generate(tiny_run, "--prompt=ab é", *flags)
    assert done.out == f"ab é{expected.text}\n"
    run = f"step 6, corpus {loaded.corpus_fingerprint}"
    assert (done.code, done.err) == (0, f"[{run}: the context is full]\n")
    done = generate(tiny_run, "--max_tokens=3")  # an empty prompt
    assert done.out == loaded.generate("", max_tokens=3).text + "\n"
    assert done.err == f"[{run}: --max_tokens reached]\n"
    done = generate(tiny_run, "--prompt=--prompt", "--temperature=0", "--max_tokens=1")
    assert done.out.startswith("--prompt")


def test_generate_in_a_process(tiny_run, loaded):
    step = f"--checkpoint={tiny_run.workdir}/checkpoints/00000006"
    flags = ["--prompt=é ", "--temperature=0", "--max_tokens=4"]
    done = call_process(tiny_run.place, "generate", step, *flags)
    assert done.out == "é " + loaded.generate("é ", temperature=0, max_tokens=4).text + "\n"
    assert done.code == 0 and done.err.endswith(": --max_tokens reached]\n")


def test_a_reader_that_goes_away_ends_it_quietly(tiny_run):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "nag_jax.generate", "--help"],
        env=tiny_run.place.environment(),
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert done.returncode == 141 and done.stderr == ""


# --- mistakes ---


@pytest.fixture
def no_training(monkeypatch):
    """A mistake has to be found before anything of the model's step is made."""

    def never(*args, **options):
        raise AssertionError("the training step was built")

    monkeypatch.setattr(loop, "configured_step", never)


def train(tiny_run, workdir, *flags, **changes):
    """Trains in `workdir` with changes to the tiny run's config; "__" stands for a dot."""
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return call("train", *tiny_run.place.arguments(workdir, changes), *flags)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.d_modl": 3}, ["model.d_modl", "did you mean model.d_model?"]),
        ({"model.d_model": "wide"}, ["model.d_model", "'wide'", "whole number"]),
        ({"model.d_model": 2}, ["model.d_model", "at least 3"]),
        ({"model.d_model": 10**12}, ["model.d_model", "at most 2147483647"]),
        ({"model.d_model": "1" * 5000}, ["model.d_model", "whole number"]),
        ({"train.steps": 2**31}, ["train.steps", "at most 2147483647"]),
        ({"seed": 2**32}, ["seed", "4294967295"]),
        ({"model.attention.num_heads": 3, "model.attention.num_kv_heads": 2}, ["num_kv_heads=2"]),
        ({"model.connection.head": "free"}, ["connection kind prenorm and residual_free"]),
        ({"model.connection.beta_init": 1e6}, ["beta_init", "at most 100"]),
        ({"optimizer.rate_multiplier.head": 2.0}, ["rate_multiplier.head", "prenorm"]),
        ({"optimizer.learning_rate": "nan"}, ["optimizer.learning_rate", "'nan'"]),
        ({"optimizer.clip_norm": "inf"}, ["optimizer.clip_norm", "'inf'"]),
        ({"model.connection.gate_init_scale": "-1"}, ["gate_init_scale", "at least 0"]),
        ({"train.batch_size": 0}, ["train.batch_size", "at least 1"]),
        ({"train.accumulation": 3}, ["train.accumulation=3"]),
        ({"mesh.fsdp": 3}, ["mesh.fsdp=3", "number of devices, 1"]),
        ({"data.source.paths": "gone/*.txt"}, ["data.source.paths", "no file matches", "gone"]),
        ({"data.source.paths": ""}, ["data.source.paths", "at least one file"]),
        ({"data.tokenizer.kind": "sentencepiece"}, ["data.tokenizer.path", "non-empty"]),
    ],
)
def test_mistakes_in_the_config(tiny_run, tmp_path, no_training, changes, words):
    with folder_unchanged(tmp_path):
        done = train(tiny_run, tmp_path / "run", **changes)
        assert_refused(done, *words)
        assert done.out == ""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["corpus is empty", "no document has any text"]),
        (b"good\ntext\nbad \xff here\n", ["x.txt:3: byte 0xff is not UTF-8"]),
    ],
)
def test_texts_that_cannot_be_trained_on(tiny_run, tmp_path, no_training, content, words):
    (tmp_path / "x.txt").write_bytes(content)
    changes = {"data__source__paths": f"{tmp_path}/x.txt", "data__cache_folder": f"{tmp_path}/c"}
    done = train(tiny_run, tmp_path / "run", **changes)
    assert_refused(done, *words)
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "c" / "rows").iterdir())


def test_files_in_the_place_of_folders(tiny_run, tmp_path, no_training):
    file = tmp_path / "file"
    file.write_text("precious")
    with folder_unchanged(tmp_path):
        assert_refused(train(tiny_run, file), f"--workdir={file}", "is a file, not a folder")
        assert_refused(train(tiny_run, file / "below"), f"{file} is a file, not a folder")
        done = train(tiny_run, tmp_path / "run", data__cache_folder=file)
        assert_refused(done, f"data.cache_folder={file}", "cannot be made or written")
        done = train(tiny_run, tmp_path / "run", data__cache_folder="/proc/cache")
        assert_refused(done, "data.cache_folder=/proc/cache", "cannot be made or written")


def test_other_runs_that_are_not_there(tiny_run, tmp_path, no_training):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    good = str(tiny_run.workdir)
    with folder_unchanged(tmp_path):
        for flags, words in (
            ([f"--init_from={tmp_path}/gone"], ["gone", "no such file"]),
            ([f"--init_from={tmp_path}/file"], ["it is a file"]),
            ([f"--init_from={tmp_path}/empty"], ["empty", "looked for step folders"]),
            ([f"--init_from={good}@7"], ["no checkpoint of step 7", "(3, 6)"]),
            ([f"--init_from={good}@x"], ["after @ comes a step"]),
            ([f"--init_from={good}", "--carry=opt"], ["--carry=opt", "must hold params"]),
            ([f"--init_from={good}", "--carry=params,all"], ["--carry=params,all"]),
            (["--carry=params,opt"], ["--init_from", "not given"]),
        ):
            done = train(tiny_run, tmp_path / "run", *flags)
            assert_refused(done, *words)


def test_a_finished_run_is_not_overwritten(tiny_run, no_training):
    with folder_unchanged(tiny_run.workdir):
        changes = {
            "optimizer__learning_rate": 1e-4,
            "model__connection__implementation": "reference",
        }
        done = train(tiny_run, tiny_run.workdir, **changes)
        assert_refused(done, "another config", "optimizer.learning_rate: 0.003 -> 0.0001")
        assert "implementation" not in done.err  # which kernel computes the same is no other config


@pytest.mark.parametrize(
    ("binary", "flags", "words"),
    [
        ("evaluate", [], ["--checkpoint must be given"]),
        ("evaluate", ["--checkpoint=gone"], ["gone", "no such file"]),
        ("evaluate", ["--checkpoint={file}"], ["it is a file"]),
        ("evaluate", ["--checkpoint={empty}"], ["looked for step folders"]),
        ("evaluate", ["--checkpoint={run}", "--by=line"], ["--by", "corpus", "document"]),
        ("evaluate", ["--checkpoint={run}", "--batch_size=0"], ["--batch_size=0"]),
        ("evaluate", ["--checkpoint={run}", "--batch_size=x"], ["--batch_size", "x"]),
        ("evaluate", ["--checkpoint={run}", "--step=4"], ["step 4", "(3, 6)"]),
        ("evaluate", ["--checkpoint={run}", "--text="], ["--text is empty"]),
        ("evaluate", ["--checkpoint={run}", "--json=gs://b/x"], ["remote path", "gcsfs"]),
        ("evaluate", ["--checkpoint={run}", "--text=gone.txt"], ["--text: there is no file"]),
        ("evaluate", ["--checkpoint={run}", "--text={empty}"], ["--text:", "is a folder"]),
        ("evaluate", ["--checkpoint={run}", "--text={bad}"], ["bad.txt:2: byte 0xff"]),
        ("evaluate", ["--checkpoint={run}", "--jsonl={bad}"], ["bad.txt:1: not a JSON value"]),
        ("evaluate", ["--checkpoint={run}", "--jsonl={lines}"], ["'text' (--field)", "body"]),
        ("evaluate", ["--checkpoint={run}", "--parquet={file}"], ["Parquet"]),
        ("evaluate", ["--checkpoint={run}", "--text={nothing}"], ["no token"]),
        ("evaluate", ["--checkpoint={run}", "--json={empty}/no/out"], ["--json=", "no folder"]),
        ("evaluate", ["--checkpoint={run}", "--json={empty}"], ["--json=", "it is a folder"]),
        ("evaluate", ["--checkpoint={run}", "--config.seed=1"], ["takes no --config"]),
        ("generate", ["--checkpoint={run}", "--temperature=-1"], ["temperature is -1"]),
        ("generate", ["--checkpoint={run}", "--temperature=nan"], ["temperature is nan"]),
        ("generate", ["--checkpoint={run}", "--top_p=0"], ["top_p is 0"]),
        ("generate", ["--checkpoint={run}", "--top_k=-1"], ["top_k is -1"]),
        ("generate", ["--checkpoint={run}", "--seed=-1"], ["seed is -1"]),
        ("generate", ["--checkpoint={run}", "--max_tokens=0"], ["max_tokens is 0"]),
        ("generate", ["--checkpoint={run}", "--max_tokens=1.5"], ["--max_tokens", "1.5"]),
        ("generate", ["--checkpoint={run}", "--prompt=" + "x" * 99], ["100 tokens", "16"]),
        ("generate", ["--checkpoint={run}", "--prompt=\udcff"], ["the prompt"]),
        ("generate", ["--checkpoint={run}", "--temprature=1"], ["temprature", "temperature"]),
        ("generate", ["--checkpoint={run}", "text"], ["unexpected argument 'text'"]),
        ("train", ["--workdir={empty}"], ["--config=path.py must be given"]),
        ("train", ["--config={empty}", "--workdir={empty}"], ["a config is a Python file"]),
        ("train", ["--config={broken}", "--workdir={empty}"], ["broken.py, line 2", "SyntaxError"]),
        ("train", ["--config={nag}", "--config={nag}", "--workdir={empty}"], ["given twice"]),
        ("train", ["--config={nag}", "--config.=3", "--workdir={empty}"], ["no config key ''"]),
        ("train", ["--config={nag}"], ["--workdir must be given"]),
        ("train", ["--config={nag}", "--workdir="], ["--workdir is empty"]),
        ("train", ["--config={nag}:deep", "--workdir={empty}"], ["'deep'", "smoke"]),
    ],
)
def test_mistakes_in_flags(tiny_run, once_loaded, tmp_path, no_training, binary, flags, words):
    names = {
        "file": tmp_path / "a file",
        "empty": tmp_path / "ëmpty",
        "bad": tmp_path / "bad.txt",
        "nothing": tmp_path / "nothing.txt",
        "lines": tmp_path / "lines.jsonl",
        "broken": tmp_path / "broken.py",
        "run": tiny_run.workdir,
        "nag": REPOSITORY / "configs" / "nag_small.py",
    }
    names["empty"].mkdir()
    names["file"].write_text("precious")
    names["bad"].write_bytes(b"fine\n\xff")
    names["nothing"].write_text("")
    names["lines"].write_text('{"body": "x"}\n')
    names["broken"].write_text("import os\nx = (\n")
    with folder_unchanged(tmp_path), folder_unchanged(tiny_run.workdir):
        done = call(binary, *(flag.format(**names) for flag in flags))
        assert_refused(done, *words)
        assert done.out == ""


def test_mistakes_in_processes(tiny_run, tmp_path):
    """On eight devices, and where only a process shows that nothing of a traceback is left."""
    place = tiny_run.place
    command = place.arguments(tmp_path / "run", {"train.batch_size": 12})
    with folder_unchanged(tmp_path):
        done = call_process(place, "train", *command, devices=8)
        assert_refused(done, "train.batch_size=12", "8 devices", "8 or 16")
        done = call_process(place, "generate", "--checkpoint=lost", cwd=tmp_path)
        assert_refused(done, f"there is no checkpoint at {tmp_path}/lost")
        assert done.out == ""


@pytest.mark.parametrize(
    "error", [MemoryError("Unable to allocate 9 GiB"), RuntimeError("RESOURCE_EXHAUSTED: 9 GiB\n")]
)
def test_exhausted_memory_is_one_sentence(tiny_run, tmp_path, monkeypatch, error):
    def fails(*args, **options):
        raise error

    monkeypatch.setattr(loop, "configured_step", fails)
    done = train(tiny_run, tmp_path / "run")
    assert done.code == 1
    assert done.err.startswith("failed: not enough memory: ") and done.err.count("\n") == 1
    assert "9 GiB" in done.err


def test_a_users_mistake_in_python_is_a_user_error(tmp_path):
    with pytest.raises(nag_jax.errors.UserError):
        nag_jax.load_run(tmp_path)


def test_damaged_metrics_do_not_stop_a_run(tiny_run, tmp_path):
    """Resuming drops what no program has written."""
    shutil.copytree(tiny_run.workdir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "00000006")
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 99, "x"\ngarbage \x00\n[]\n{"step": "x"}\n')
    done = train(
        tiny_run,
        tmp_path / "run",
        data__validation_bytes=2500,
        evaluation__every=3,
        evaluation__batch_size=8,
    )
    assert done.code == 0, done
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(steps) and max(steps) == 6
    run = nag_jax.load_run(tmp_path / "run")
    for path, value in tiny_run.trained(6).items():
        np.testing.assert_array_equal(nag_jax.parameters.flatten(run.params)[path], value)
