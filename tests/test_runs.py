"""`load_run`: any path to a run, on any devices, in any precision; what a run offers in Python."""

import dataclasses
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from small_models import random_params, small_config
from use_helpers import STEPS

import nag_jax
from nag_jax import config as config_lib
from nag_jax import runs
from nag_jax.data.tokenizers import ByteTokenizer
from nag_jax.errors import UserError
from nag_jax.models import attention
from nag_jax.models.transformer import build_model
from nag_jax.parameters import flatten
from nag_jax.training import start
from nag_jax.training.checkpoints import Checkpoints, folder_documents
from nag_jax.training.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("cached_compilation")

HERE = Path(__file__).parent


def assert_params(run, expected):
    params = {path: np.asarray(leaf) for path, leaf in flatten(run.params).items()}
    assert params.keys() == expected.keys()
    for path, value in expected.items():
        assert params[path].dtype == value.dtype and params[path].shape == value.shape, path
        assert params[path].tobytes() == value.tobytes(), path


def test_it_is_all_there(tiny_run, loaded):
    assert loaded.step == 6
    assert_params(loaded, tiny_run.trained(6))
    assert isinstance(loaded.tokenizer, ByteTokenizer)
    assert loaded.config.train.steps == 6 and loaded.config.is_locked
    assert loaded.config.data.source.paths == (f"{tiny_run.place.folder / 'corpus'}/*.txt",)
    assert loaded.model.vocab_size == 257


@pytest.mark.parametrize("path", ["", "checkpoints", "checkpoints/00000003", "checkpoints/"])
def test_any_path_to_it(tiny_run, path):
    step = 3 if path.endswith("3") else 6
    run = nag_jax.load_run(f"{tiny_run.workdir}/{path}")
    assert run.step == step
    assert_params(run, tiny_run.trained(step))
    assert_params(nag_jax.load_run(tiny_run.workdir / path, step=3), tiny_run.trained(3))


def test_relative_and_home_paths(tiny_run, monkeypatch):
    monkeypatch.chdir(tiny_run.workdir.parent)
    monkeypatch.setenv("HOME", str(tiny_run.workdir.parent))
    for path in ("run", "./run/checkpoints/00000006", "../tiny/run", "~/run"):
        assert_params(nag_jax.load_run(path), tiny_run.trained(6))


def test_what_is_not_there_is_told(tiny_run, tmp_path):
    for path, step, words in (
        (tmp_path / "gone", None, "no such file"),
        (tmp_path, None, "looked for step folders"),
        (HERE / "test_runs.py", None, "it is a file"),
        (tiny_run.workdir, 4, r"no checkpoint of step 4 .*\(3, 6\)"),
        (tiny_run.workdir, -1, "no checkpoint of step -1"),
        (tiny_run.workdir, 10**30, "no checkpoint of step 1000"),
        (tiny_run.workdir / "checkpoints" / "00000003", 6, "step 6 is asked for.* is step 3"),
        (tiny_run.workdir / "checkpoints" / "00000005", None, "no such file"),
    ):
        with pytest.raises(UserError, match=words):
            nag_jax.load_run(path, step=step)
    assert not (tmp_path / "gone").exists()
    for loops in (0, 10_001):
        with pytest.raises(UserError, match=f"loops is {loops}; .* between 1 and 10000"):
            nag_jax.load_run(tmp_path / "gone", loops=loops)


def test_a_damaged_checkpoint_is_passed_over_unless_asked_for(tiny_run, tmp_path, capsys):
    shutil.copytree(tiny_run.workdir, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "00000006" / "config.json").write_text("{}")
    run = nag_jax.load_run(tmp_path / "run")
    assert_params(run, tiny_run.trained(3))
    assert "Passed over a damaged checkpoint, step 6" in capsys.readouterr().out
    with pytest.raises(UserError, match="step 6 is damaged: .*config.json has"):
        nag_jax.load_run(tmp_path / "run", step=6)


def test_cast_to_bfloat16(tiny_run):
    run = nag_jax.load_run(tiny_run.workdir, dtype=jnp.bfloat16)
    assert_params(
        run, {path: value.astype(jnp.bfloat16) for path, value in tiny_run.trained(6).items()}
    )


def test_the_files_may_be_read_only(tiny_run, tmp_path):
    shutil.copytree(tiny_run.workdir, tmp_path / "run")
    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    for path in paths:
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        assert_params(nag_jax.load_run(tmp_path / "run"), tiny_run.trained(6))
    finally:
        for path in paths:
            path.chmod(0o700)


def test_it_moves_to_another_place_whole(tiny_run, tmp_path):
    folder = tmp_path / "ünïcode and [spaces]"
    shutil.copytree(tiny_run.workdir / "checkpoints" / "00000006", folder / "00000006")
    run = nag_jax.load_run(folder)
    assert_params(run, tiny_run.trained(6))
    assert run.tokenizer.decode(run.tokenizer.encode("é😀")) == "é😀"


def test_classes_of_a_user_are_imported_only_when_allowed(tmp_path, monkeypatch):
    """The run of somebody else may name any class."""
    (tmp_path / "their_parts.py").write_text(
        "from nag_jax.models.feedforward import MLP\n\n\nclass Part(MLP):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = small_config(feedforward__kind="their_parts:Part")
    model = build_model(config, ByteTokenizer.vocab_size)
    del sys.modules["their_parts"]
    ByteTokenizer().save(tmp_path / "tokenizer")
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=1)
    params = random_params(model)
    rows = types.SimpleNamespace(fingerprint="x", corpus_fingerprint="y")
    position = start.Position(1, 8, 1).to_json(rows)
    documents = {"config.json": config_lib.to_json(config), "data.json": position}
    documents |= folder_documents(tmp_path / "tokenizer", "tokenizer")
    checkpoints.save(1, {"params": params, "opt_state": {}, "balance": {}}, documents, None)
    checkpoints.close()
    with pytest.raises(UserError, match="names the class 'their_parts:Part'.*allow_user_kinds"):
        nag_jax.load_run(tmp_path)
    assert "their_parts" not in sys.modules
    run = nag_jax.load_run(tmp_path, allow_user_kinds=True)
    assert_params(run, flatten(params))
    assert "their_parts" in sys.modules


@pytest.mark.parametrize(
    ("part", "name", "trained", "loaded"),
    [
        ("attention", "implementation", "splash", "auto"),
        ("attention", "implementation", "auto", "auto"),
        ("attention", "implementation", "chunked", "chunked"),
        ("attention", "mixing", "mosaic_tpu", "auto"),
        ("connection", "implementation", "mosaic_gpu", "auto"),
        ("connection", "implementation", "reference", "reference"),
    ],
)
def test_a_run_needs_no_kernel_of_the_devices_it_was_trained_on(
    part, name, trained, loaded, monkeypatch
):
    config = small_config(
        {f"model.{part}.{name}": trained}, attention__kind="ccgqa", connection__kind="nag"
    )
    assert runs._for_any_device(config).model[part][name] == loaded
    assert config.model[part][name] == trained
    # A user's own kind may mean anything by the name.
    monkeypatch.setattr(runs, "is_registered", lambda node, kind: False)
    assert runs._for_any_device(config).model[part][name] == trained


@pytest.mark.slow
def test_on_other_meshes():
    """Saved on mesh (4, 2); read on (2, 4), (1, 8) and one device; really divided."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "restore_on_meshes.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "all meshes agree" in done.stdout


def test_logits_compile_once_and_know_documents(loaded):
    tokens = [256, *b"abc", 256, *b"xyz"]
    runs._logits.cache_clear()
    alone = loaded.logits([256, *b"xyz", 0, 0, 0, 0])
    row = loaded.logits(tokens)
    assert row.shape == (8, 257) and row.dtype == jnp.float32
    assert runs._logits(loaded.model)._cache_size() == 1
    assert np.abs(row[4:] - alone[:4]).max() > 1e-6  # it sees "abc"
    batch = loaded.logits([tokens, tokens], [[1] * 4 + [2] * 4, [1] * 8])
    np.testing.assert_allclose(batch[0, 4:], alone[:4], rtol=0, atol=1e-5)
    np.testing.assert_allclose(batch[1], row, rtol=0, atol=1e-5)


def test_a_row_of_logits_is_one_document_unless_told_otherwise(loaded, monkeypatch):
    """Fused kernels that cannot tell documents apart may serve it."""
    packed, attend = set(), attention.attend

    def told(*args, **options):
        packed.add(options["packed"])
        return attend(*args, **options)

    monkeypatch.setattr(attention, "attend", told)
    loaded.logits([256, *b"abcd"])
    assert packed == {False}
    loaded.logits([256, *b"abcd"], [[1, 1, 1, 2, 2]])
    assert packed == {False, True}


def test_the_validation_set_scores_as_it_did_in_training(tiny_run, loaded):
    result = loaded.evaluate_validation()
    logged = {
        line["step"]: line["validation/bits_per_byte"]
        for line in read_metrics(tiny_run.workdir)
        if "validation/bits_per_byte" in line
    }
    assert tuple(logged) == STEPS
    assert result.bits_per_byte == pytest.approx(logged[6], rel=1e-5)
    assert len(result.document_names) > 2
    assert result.document_bytes.sum() >= 2500


def test_a_changed_corpus_is_told(tiny_run, loaded, tmp_path):
    shutil.copytree(tiny_run.place.folder / "corpus", tmp_path / "corpus")
    changes = {
        "data.source.paths": (f"{tmp_path}/corpus/*.txt",),
        "data.cache_folder": str(tmp_path / "cache"),
    }
    config = config_lib.resolve(loaded.config.to_dict() | changes)
    run = dataclasses.replace(loaded, config=config)
    run.evaluate_validation()  # the same texts in another place are the same corpus
    with (tmp_path / "corpus" / "00.txt").open("a") as file:
        file.write("more")
    with pytest.raises(UserError, match=f"corpus has changed.*{run.fingerprint} then"):
        run.evaluate_validation()
    shutil.rmtree(tmp_path / "corpus")
    with pytest.raises(UserError, match=r"no file matches .*corpus/\*\.txt"):
        run.evaluate_validation()
