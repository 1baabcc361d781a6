"""Checkpoints survive what happens to files, and restore exactly what was saved."""

import os
import pathlib
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nag_jax
from nag_jax.errors import UserError
from nag_jax.training import checkpoints as checkpoints_module
from nag_jax.training import manifest as manifest_module
from nag_jax.training.checkpoints import (
    CheckpointReader,
    Checkpoints,
    SaveFailed,
    find_checkpoint,
    folder_documents,
)


def make_arrays(seed=0):
    """Parameters with bfloat16, scalar and dotted leaves, their AdamW state, and an empty item."""
    key = jax.random.key(seed)
    params = {
        "layers": {
            "query": jax.random.normal(key, (4, 3)),
            "gate.weight": jax.random.normal(key, (5,), jnp.bfloat16),
        },
        "layers.query": jax.random.normal(key, (4, 3)) + 1,
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = optimizer.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    _, state = optimizer.update(grads, state, params)
    params["step"] = jnp.asarray(7 + seed, jnp.int32)
    return {"params": params, "opt_state": state, "balance": {}}


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save_steps(folder, steps, **options):
    """Saves a checkpoint at each step, of arrays made with the step as seed."""
    said = []
    options = {"keep_last": len(steps), "say": said.append, **options}
    checkpoints = Checkpoints(folder, **options)
    for step in steps:
        checkpoints.save(step, make_arrays(step), {"config.json": f'{{"at": {step}}}'}, 1.0 / step)
    checkpoints.close()
    return said


def data_file(folder, step):
    """The largest file of the parameters: where their numbers are."""
    files = [p for p in (folder / f"{step:08d}" / "params").rglob("*") if p.is_file()]
    return max(files, key=lambda p: p.stat().st_size)


def run_python(code, **environment):
    root = str(pathlib.Path(nag_jax.__file__).parents[1])
    paths = [root, str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_round_trip_is_exact(tmp_path):
    arrays = make_arrays()
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "ranks.bin").write_bytes(b"\x00\xff")
    checkpoints = Checkpoints(tmp_path / "c", keep_last=1)
    documents = {"config.json": "{}", **folder_documents(tmp_path / "tokenizer", "tokenizer")}
    assert checkpoints.save(5, arrays, documents, metric=2.5)
    checkpoints.wait()
    step, restored = checkpoints.restore(None, abstract(arrays))
    assert step == 5
    assert_same(restored, arrays)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))
    read = checkpoints.read_documents(5)
    assert set(read) == {"config.json", "tokenizer/ranks.bin", "versions.json"}
    assert read["tokenizer/ranks.bin"] == b"\x00\xff"
    assert b'"jax"' in read["versions.json"]
    assert checkpoints.metric(5) == 2.5
    shapes = checkpoints.saved_shapes(5)
    assert shapes["params"]["layers/query"] == jax.ShapeDtypeStruct((4, 3), jnp.float32)
    assert shapes["balance"] == {}
    checkpoints.close()


def test_one_item_alone_and_cast(tmp_path):
    save_steps(tmp_path, [1])
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if x.ndim else x.dtype),
        make_arrays()["params"],
    )
    _, restored = CheckpointReader(tmp_path).restore(1, {"params": wanted})
    expected = jax.tree.map(lambda w, x: x.astype(w.dtype), wanted, make_arrays(1)["params"])
    assert_same(restored["params"], expected)


def test_donation_right_after_save_does_not_reach_the_checkpoint(tmp_path):
    def fresh():
        return {f"w{i}": jnp.full((257, 129 + i), float(i)) for i in range(12)}

    overwrite = jax.jit(lambda t: jax.tree.map(lambda x: -x - 1, t), donate_argnums=0)
    jax.block_until_ready(overwrite(fresh()))
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        values = fresh()
        checkpoints.save(step, {"params": values}, {})
        for _ in range(3):
            values = overwrite(values)
        jax.block_until_ready(values)
    checkpoints.wait()
    for step in (1, 2, 3):
        _, restored = checkpoints.restore(step, {"params": abstract(fresh())})
        assert_same(restored["params"], fresh())
    checkpoints.close()


def truncate(folder):
    path = data_file(folder, 3)
    path.write_bytes(path.read_bytes()[:-7])
    return path


def flip_a_bit(folder):
    path = data_file(folder, 3)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def flip_a_bit_of_a_document(folder, step=3):
    path = folder / f"{step:08d}" / "config.json"
    path.write_text('{"at": 7}')
    return path


def delete_a_file(folder):
    path = data_file(folder, 3)
    path.unlink()
    return path


def delete_the_manifest(folder):
    path = folder / "00000003" / "manifest.json"
    path.unlink()
    return path


def truncate_the_manifest(folder):
    path = folder / "00000003" / "manifest.json"
    path.write_text(path.read_text()[:-20])
    return path


def change_the_manifest(folder):
    path = folder / "00000003" / "manifest.json"
    path.write_text(path.read_text().replace('"step": 3', '"step": 4'))
    return path


def put_junk_in_its_place(folder):
    (folder / "00000003").rename(folder.parent / "elsewhere")
    (folder / "00000003").mkdir()
    (folder / "00000003" / "notes.txt").write_text("not a checkpoint")
    return folder / "00000003"


def put_a_file_in_its_place(folder):
    (folder / "00000003").rename(folder.parent / "elsewhere")
    (folder / "00000003").write_text("not a folder")
    return folder / "00000003"


def put_another_step_in_its_place(folder):
    (folder / "00000003").rename(folder.parent / "elsewhere")
    (folder / "00000001").rename(folder / "00000003")
    return folder / "00000003"


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        flip_a_bit,
        flip_a_bit_of_a_document,
        delete_a_file,
        delete_the_manifest,
        truncate_the_manifest,
        change_the_manifest,
        put_junk_in_its_place,
        put_a_file_in_its_place,
        put_another_step_in_its_place,
    ],
)
def test_damage_is_found_told_passed_over_and_repaired(tmp_path, damage):
    folder = tmp_path / "checkpoints"
    save_steps(folder, [1, 2, 3])
    path = damage(folder)
    said = []
    checkpoints = Checkpoints(folder, keep_last=3, say=said.append)
    with pytest.raises(UserError, match="step 3") as caught:
        checkpoints.restore(3, abstract(make_arrays()))
    assert str(path) in str(caught.value)
    step, restored = checkpoints.restore(None, abstract(make_arrays()))
    assert step == 2
    assert_same(restored, make_arrays(2))
    assert any("step 3" in line and str(path) in line for line in said)
    assert checkpoints.steps()[-1] == 2
    # The run goes on and comes to the damaged step again.
    assert checkpoints.save(3, make_arrays(3), {})
    checkpoints.close()
    step, restored = CheckpointReader(folder).restore(None, abstract(make_arrays()))
    assert step == 3
    assert_same(restored, make_arrays(3))


def test_damage_is_told_once_and_content_is_read_once(tmp_path, monkeypatch):
    save_steps(tmp_path, [1, 2])
    flip_a_bit_of_a_document(tmp_path, step=2)
    read = []
    checksum = manifest_module._checksum
    monkeypatch.setattr(
        manifest_module, "_checksum", lambda path: (read.append(path.name), checksum(path))[1]
    )
    said = []
    reader = CheckpointReader(tmp_path, say=said.append)
    assert reader.newest(["params"]) == 1
    assert len(said) == 2 and "step 2" in said[0] and "step 1" in said[1]
    said.clear()
    read.clear()
    assert reader.newest(["params"]) == 1
    reader.read_documents(1)
    reader.restore(1, {"params": abstract(make_arrays()["params"])})
    assert not said and not read


def test_half_written_checkpoint_is_removed_and_told(tmp_path):
    save_steps(tmp_path, [1, 2])
    (tmp_path / "00000002").rename(tmp_path / "00000002.orbax-checkpoint-tmp")
    (tmp_path / "00000007.deleting").mkdir()
    reader = CheckpointReader(tmp_path)
    assert reader.steps() == (1,)
    assert (tmp_path / "00000002.orbax-checkpoint-tmp").exists(), "a reader deletes nothing"
    said = save_steps(tmp_path, [2])
    assert len(said) == 1 and "half-written checkpoint of step 2" in said[0]
    assert os.listdir(tmp_path) == ["00000002"]


def test_all_damaged_refuses_to_start_over(tmp_path):
    save_steps(tmp_path, [1])
    data_file(tmp_path, 1).unlink()
    reader = CheckpointReader(tmp_path)
    assert reader.steps() == () and not reader.is_empty()
    with pytest.raises(UserError, match="no checkpoint in .* is intact .*move the folder away"):
        reader.restore(None, {"params": {}})
    assert CheckpointReader(tmp_path / "nothing").is_empty()
    with pytest.raises(UserError, match="there is no checkpoint in"):
        CheckpointReader(tmp_path / "nothing").restore(None, {})
    with pytest.raises(UserError, match="no checkpoint of step 9 .*none"):
        reader.restore(9, {})


def test_junk_folder_is_neither_latest_nor_counted_nor_deleted(tmp_path):
    (tmp_path / "00000999").mkdir()
    (tmp_path / "12").mkdir()
    (tmp_path / "notes").mkdir()
    said = []
    checkpoints = Checkpoints(tmp_path, keep_last=1, say=said.append)
    checkpoints.save(1, make_arrays(), {})
    checkpoints.save(2, make_arrays(), {})
    checkpoints.close()
    assert checkpoints.steps() == (2,)
    assert checkpoints.restore(None, {"balance": {}})[0] == 2
    assert {"00000999", "12", "notes"} < set(os.listdir(tmp_path))


def test_retention(tmp_path):
    checkpoints = Checkpoints(
        tmp_path, keep_last=2, keep_best=2, keep_steps=(3,), keep_log_spaced=1
    )
    metrics = {1: 9.0, 2: 8.0, 3: 7.0, 4: 6.0, 5: 1.0, 6: 2.0, 7: float("nan"), 8: None}
    metrics |= {9: 5.0, 10: 4.0, 11: 3.0}
    arrays = {"params": {"w": jnp.ones(2)}}
    for step, metric in metrics.items():
        checkpoints.save(step, arrays, {}, metric)
    checkpoints.close()
    assert checkpoints.steps() == (1, 2, 3, 4, 5, 6, 8, 10, 11)
    assert sorted(int(name) for name in os.listdir(tmp_path)) == list(checkpoints.steps())
    # A new process reads the metrics of the steps that are there.
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=1)
    checkpoints.save(12, arrays, {}, 3.0)
    checkpoints.close()
    assert checkpoints.steps() == (5, 12)


def test_a_damaged_checkpoint_takes_no_place_among_the_last(tmp_path):
    """Or deleting the others would leave nothing but the damaged one."""
    arrays = {"params": {"w": jnp.ones(2)}}
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in (1, 3):
        checkpoints.save(step, arrays, {})
    checkpoints.close()
    flip_a_bit(tmp_path)  # of step 3
    checkpoints = Checkpoints(tmp_path, keep_last=1, say=lambda text: None)
    assert checkpoints.newest(("params",)) == 1
    checkpoints.save(2, arrays, {})
    checkpoints.wait()
    assert 2 in checkpoints.steps() and checkpoints.newest(("params",)) == 2
    checkpoints.close()


def test_marked_steps(tmp_path):
    def marked(**options):
        checkpoints = Checkpoints(tmp_path, keep_last=1, **options)
        steps = [step for step in range(40) if checkpoints.is_marked(step)]
        checkpoints.close()
        return steps

    assert marked() == []
    assert marked(keep_steps=(5, 30)) == [5, 30]
    assert marked(keep_log_spaced=1) == [1, 2, 4, 8, 16, 32]
    assert marked(keep_log_spaced=2) == [1, 2, 3, 4, 6, 8, 12, 16, 23, 32]


def test_old_step_is_deleted_only_after_the_new_one_is_committed(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, make_arrays(), {})
    checkpoints.wait()
    release = threading.Event()
    finalize = checkpoints_module._SealingHandler.finalize

    def slow(self, directory):
        release.wait(30)
        finalize(self, directory)

    monkeypatch.setattr(checkpoints_module._SealingHandler, "finalize", slow)
    checkpoints.save(2, make_arrays(), {})
    checkpoints.check()
    assert checkpoints.steps() == (1,)
    release.set()
    checkpoints.wait()
    assert checkpoints.steps() == (2,)
    checkpoints.close()


def test_a_complete_step_is_not_saved_again(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    assert checkpoints.save(1, make_arrays(1), {})
    assert not checkpoints.save(1, make_arrays(2), {})
    checkpoints.close()
    assert_same(checkpoints.restore(1, abstract(make_arrays()))[1], make_arrays(1))


def fail_finalize(monkeypatch, at):
    finalize = checkpoints_module._SealingHandler.finalize

    def failing(self, directory):
        if self.pending.step == at:
            raise OSError(28, "No space left on device")
        finalize(self, directory)

    monkeypatch.setattr(checkpoints_module._SealingHandler, "finalize", failing)


def test_failed_save_in_mid_run(tmp_path, monkeypatch):
    fail_finalize(monkeypatch, at=2)
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, make_arrays(1), {})
    checkpoints.save(2, make_arrays(2), {})
    with pytest.raises(SaveFailed, match="step 2 .*No space left.*last good .* step 1") as caught:
        for _ in range(3000):
            checkpoints.check()
            threading.Event().wait(0.01)
    assert (caught.value.step, caught.value.last_good) == (2, 1)
    with pytest.raises(SaveFailed, match="step 2"):
        checkpoints.save(3, make_arrays(3), {})
    with pytest.raises(SaveFailed, match="step 2"):
        checkpoints.close()
    assert CheckpointReader(tmp_path).steps() == (1,)
    assert_same(checkpoints.restore(None, abstract(make_arrays()))[1], make_arrays(1))


def test_failed_save_at_the_end(tmp_path, monkeypatch):
    fail_finalize(monkeypatch, at=1)
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, make_arrays(1), {})
    with pytest.raises(SaveFailed, match="step 1 .*there is no earlier checkpoint"):
        checkpoints.close()
    assert CheckpointReader(tmp_path).steps() == ()


def test_failed_start_of_a_save(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep_last=1)
    checkpoints.save(1, make_arrays(1), {})
    checkpoints.wait()
    (tmp_path / "c").rename(tmp_path / "moved")
    (tmp_path / "c").write_text("in the way")
    with pytest.raises(SaveFailed, match="step 2"):
        checkpoints.save(2, make_arrays(2), {})
        checkpoints.wait()
    with pytest.raises(SaveFailed, match="step 2"):
        checkpoints.close()
    assert CheckpointReader(tmp_path / "moved").steps() == (1,)


@pytest.mark.parametrize("when", ["mid-run", "at the end"])
def test_file_size_limit(tmp_path, when):
    done = run_python(
        f"""
        import resource
        import jax
        from nag_jax.training.checkpoints import Checkpoints, SaveFailed
        checkpoints = Checkpoints({str(tmp_path)!r}, keep_last=1)
        arrays = {{"params": {{"w": jax.random.normal(jax.random.key(0), (1024, 300))}}}}
        checkpoints.save(10, arrays, {{"config.json": "x"}})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        checkpoints.save(20, arrays, {{"config.json": "x"}})
        try:
            if {when == "mid-run"}:
                checkpoints.save(30, arrays, {{}})
            checkpoints.close()
        except SaveFailed as failure:
            print(failure)
            raise SystemExit(1)
        """
    )
    assert done.returncode == 1, done.stderr
    assert "step 20" in done.stdout and "last good checkpoint is step 10" in done.stdout
    assert "File too large" in done.stdout and len(done.stdout) < 700
    assert "Traceback" not in done.stderr
    reader = CheckpointReader(tmp_path)
    assert reader.steps() == (10,)
    wanted = {"params": {"w": jax.ShapeDtypeStruct((1024, 300), jnp.float32)}}
    assert reader.restore(None, wanted)[0] == 10


def test_restores_onto_other_meshes(tmp_path):
    done = run_python(
        f"""
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
        from nag_jax.training.checkpoints import Checkpoints

        def sharding(shape, spec):
            mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "fsdp"))
            return NamedSharding(mesh, spec)

        value = jnp.arange(384, dtype=jnp.float32).reshape(16, 24) - 100.3
        specs = {{"both": P("data", "fsdp"), "one": P(None, "fsdp"), "none": P()}}
        arrays = {{k: jax.device_put(value, sharding((4, 2), s)) for k, s in specs.items()}}
        checkpoints = Checkpoints({str(tmp_path)!r}, keep_last=1)
        checkpoints.save(1, {{"params": arrays, "opt_state": (arrays["both"],)}}, {{}})
        checkpoints.wait()
        one = SingleDeviceSharding(jax.devices()[3])
        for where in (lambda s: sharding((2, 4), s), lambda s: sharding((8, 1), s), lambda s: one):
            for dtype in (jnp.float32, jnp.bfloat16):
                wanted = {{k: jax.ShapeDtypeStruct(value.shape, dtype, sharding=where(s))
                           for k, s in specs.items()}}
                _, got = checkpoints.restore(None, {{"params": wanted}})
                for k in specs:
                    assert got["params"][k].sharding == wanted[k].sharding, k
                    assert got["params"][k].dtype == dtype
                    np.testing.assert_array_equal(got["params"][k], value.astype(dtype))
        checkpoints.close()
        print("fine")
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
        JAX_PLATFORMS="cpu",
    )
    assert done.stdout.strip() == "fine", done.stderr
    # Eight devices wrote it; this process has its own few.
    wanted = {"params": {"both": jax.ShapeDtypeStruct((16, 24), jnp.float32)}}
    with pytest.raises(UserError, match="only in the checkpoint: params/none"):
        CheckpointReader(tmp_path).restore(None, wanted)
    shape = jax.ShapeDtypeStruct((16, 24), jnp.float32)
    wanted = {"opt_state": (shape,), "params": {"both": shape, "one": shape, "none": shape}}
    _, got = CheckpointReader(tmp_path).restore(None, wanted)
    assert_same(got["params"]["none"], jnp.arange(384, dtype=jnp.float32).reshape(16, 24) - 100.3)


def test_differences_are_told_by_path(tmp_path):
    save_steps(tmp_path, [1])
    wanted = abstract(make_arrays())
    layers = wanted["params"]["layers"]
    layers["query"] = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    layers["key"] = jax.ShapeDtypeStruct((2,), jnp.float32)
    del layers["gate.weight"]
    wanted["params"]["step"] = jax.ShapeDtypeStruct((), jnp.float32)
    wanted["router"] = {"load": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with pytest.raises(UserError) as caught:
        CheckpointReader(tmp_path).restore(None, wanted)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("00000001 does not fit what is asked of it:")
    assert lines[1:] == [
        "  differs: params/layers/query saved float32[4, 3], asked float32[4, 8]",
        "  differs: params/step saved int32[], asked float32[]",
        "  not in the checkpoint: params/layers/key float32[2]",
        "  not in the checkpoint: router/load float32[3]",
        "  only in the checkpoint: params/layers/gate.weight bfloat16[5]",
    ]


def test_a_changed_optimizer_chain_is_told(tmp_path):
    save_steps(tmp_path, [1])
    params = {"layers": {"query": jnp.zeros((4, 3))}}
    wanted = {"opt_state": abstract(optax.sgd(0.1, momentum=0.9).init(params))}
    with pytest.raises(UserError, match=r"not in the checkpoint: opt_state/0/trace/layers/query"):
        CheckpointReader(tmp_path).restore(None, wanted)


def test_matching_leaves_are_carried(tmp_path):
    save_steps(tmp_path, [1])
    values = jax.tree.map(jnp.zeros_like, make_arrays()["params"])
    values["layers"]["query"] = jnp.zeros((4, 8))
    values["new"] = jnp.zeros(2)
    del values["step"]
    step, items, carried = CheckpointReader(tmp_path).restore_matching(None, {"params": values})
    assert step == 1
    assert carried.kept == ("params/layers/gate.weight", "params/layers.query")
    assert carried.new == ("params/layers/query", "params/new")
    assert set(carried.dropped) == {"params/layers/query", "params/step"}
    saved = make_arrays(1)["params"]
    assert_same(items["params"]["layers.query"], saved["layers.query"])
    assert_same(items["params"]["layers"]["gate.weight"], saved["layers"]["gate.weight"])
    assert_same(items["params"]["layers"]["query"], jnp.zeros((4, 8)))


def test_a_folder_that_cannot_be_written_is_found_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="checkpoints cannot be written in .*file"):
            Checkpoints(folder, keep_last=1)
    with pytest.raises(UserError, match="checkpoints cannot be written in /proc/here"):
        Checkpoints("/proc/here", keep_last=1)
    with pytest.raises(UserError, match="keep_last is 0"):
        Checkpoints(tmp_path / "c", keep_last=0)


def test_document_names_stay_inside(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    for name in ("../x", "/x", "manifest.json", "params/x", ""):
        with pytest.raises(ValueError, match="cannot be the name of a document"):
            checkpoints.save(1, make_arrays(), {name: ""})
    checkpoints.close()


def test_find_checkpoint(tmp_path, monkeypatch):
    run = tmp_path / "run"
    save_steps(run / "checkpoints", [1, 20], keep_last=2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = run / "checkpoints"
    for text in ("run", "~/run", "run/checkpoints", "~/run/checkpoints", "./run/", str(folder)):
        assert find_checkpoint(text) == (folder, None), text
    for text in ("run/checkpoints/00000001", "~/run/checkpoints/00000001"):
        assert find_checkpoint(text) == (folder, 1), text
    (run / "metrics.jsonl").write_text("")
    (tmp_path / "empty").mkdir()
    (folder / "00000020").rename(tmp_path / "mine")
    for text, sentence in {
        "nowhere": "no such file or folder",
        "run/metrics.jsonl": "it is a file",
        "empty": "looked for step folders such as .*empty/checkpoints/00000100",
        "mine": "one step's checkpoint under another name",
    }.items():
        with pytest.raises(UserError, match=sentence):
            find_checkpoint(text)


def test_relative_and_home_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    save_steps("there/checkpoints", [1])
    save_steps("~/checkpoints", [2])
    monkeypatch.chdir("/")
    assert CheckpointReader(tmp_path / "there" / "checkpoints").steps() == (1,)
    assert CheckpointReader(tmp_path / "home" / "checkpoints").steps() == (2,)


def test_documents_need_no_device(tmp_path):
    save_steps(tmp_path, [1])
    done = run_python(
        f"""
        from nag_jax.training.checkpoints import CheckpointReader
        print(CheckpointReader({str(tmp_path)!r}).read_documents(1)["config.json"].decode())
        """,
        JAX_PLATFORMS="nonexistent",
    )
    assert done.stdout.strip() == '{"at": 1}', done.stderr
