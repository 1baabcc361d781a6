"""Thresholds found after training: rates on held-out text, the table, and what is saved."""

import dataclasses
import json
import random

import jax
import numpy as np
import pytest
from small_models import VOCAB, random_params, small_config
from use_helpers import assert_refused, call, folder_unchanged

import nag_jax
from nag_jax import runs
from nag_jax.errors import UserError
from nag_jax.evals import skipping
from nag_jax.evals.skipping_table import SkippingTable
from nag_jax.models.transformer import build_model, skipping_part
from nag_jax.parameters import flatten
from nag_jax.sharding.mesh import single_device_mesh
from nag_jax.training import start
from nag_jax.training.checkpoints import CheckpointReader

pytestmark = pytest.mark.usefixtures("cached_compilation")

BATCH = 256
THRESHOLD = {"model.skipping.kind": "threshold"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with two files of the same random words: one to calibrate on, one held out."""
    folder = tmp_path_factory.mktemp("texts")
    rng = random.Random(3)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 7))) for _ in range(60)]
    for name in ("calibrate.txt", "held_out.txt"):
        (folder / name).write_text(" ".join(rng.choices(words, k=12_000)))
    return folder


@pytest.fixture(scope="module")
def held_out(loaded, texts):
    return loaded.pack([("held out", (texts / "held_out.txt").read_text())])


@pytest.fixture(scope="module")
def calibration(loaded, texts):
    return loaded.calibration_rows(str(texts / "cal*.txt"))


@pytest.fixture(scope="module")
def skipped(tiny_run, loaded, calibration):
    """The tiny run with 20 % of its feed-forward skipped."""
    with tiny_run.place.in_process():
        return loaded.with_skipping(0.2, "feedforward", calibration, BATCH)


def bytes_of(tree):
    return {path: np.asarray(leaf).tobytes() for path, leaf in flatten(tree).items()}


def shares_of(run, rows):
    """The share of the targets that skipped each sub-layer, measured by scoring."""
    return skipping.by_sublayer(run.model, run.score(rows, BATCH).taps["skipped"])


@pytest.mark.parametrize("rate", [pytest.param(0.05, marks=pytest.mark.slow), 0.4])
def test_the_rate_holds_on_other_text(loaded, calibration, held_out, rate):
    run = loaded.with_skipping(rate, "feedforward", calibration, BATCH)
    told = run.calibration
    assert (told["rate"], told["sublayers"], told["passes"]) == (rate, "feedforward", 2)
    targets = sum(int((row["segment_ids"][1:] > 0).sum()) for row in calibration.rows)
    assert told["tokens"] == targets > 40_000
    before = bytes_of(run.balance)
    for name, values in shares_of(run, calibration.rows).items():
        np.testing.assert_allclose(values, told["skipped"][name], rtol=0, atol=1e-6)
    rates = shares_of(run, held_out)
    assert bytes_of(run.balance) == before  # frozen
    assert rates["attention"] == [0.0]
    assert rates["feedforward"] == pytest.approx([rate], abs=0.01)


@pytest.mark.slow
def test_layers_that_change_each_other():
    """Both kinds in two blocks: attention layers share a threshold, others have their own."""
    config = small_config(skipping__kind="threshold", skipping__rate=0.5, num_blocks=2)
    model = build_model(config, VOCAB)
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, VOCAB, (256, 33)).astype(np.int32)
    rows = Rows([{"tokens": row, "segment_ids": np.ones_like(row)} for row in tokens])
    mesh = single_device_mesh()
    found = skipping.calibrate(
        model,
        jax.device_put(random_params(model)),
        model.initial_balance(),
        skipping.SomeRows(rows, range(len(rows))),
        0.3,
        step=10,
        mesh=mesh,
        batch_size=64,
    )
    assert found.tokens == tokens[:, 1:].size and found.passes > 2
    assert found.skipped["feedforward"] == pytest.approx([0.3, 0.3], abs=0.01)
    # One of two layers sees the token alone: of 12 equally frequent ones a whole number.
    assert np.mean(found.skipped["attention"]) == pytest.approx(0.3, abs=0.5 / 12)
    (blocks,) = skipping_part(found.balance).values()
    thresholds = {name: np.unique(x) for name, x in blocks["blocks"].items()}
    assert {name: len(x) for name, x in thresholds.items()} == {"attention": 1, "feedforward": 2}


class Rows(list):
    row_length = 32


def test_a_rate_of_nothing_is_the_plain_model(loaded, skipped):
    assert loaded.with_skipping(0) is loaded
    plain = skipped.with_skipping(0)
    assert plain.config == loaded.config and plain.calibration is None
    assert plain.balance == {} == plain.model.balance_shapes


def test_options_of_a_run_that_skips_are_kept():
    own = {"keys_values": "executed", "sublayers": "attention"}
    trained = small_config({f"model.skipping.{k}": x for k, x in own.items()} | THRESHOLD)
    assert skipping.own_sublayers(trained) == "attention"
    assert skipping.own_sublayers(small_config()) == "both"
    options = skipping.skipping_config(trained, 0.3, "both").model.skipping
    assert (options.rate, options.keys_values, options.sublayers) == (0.3, "executed", "both")


def test_saved_it_is_a_run(tiny_run, skipped, tmp_path):
    skipped.save(tmp_path / "saved")
    again = nag_jax.load_run(tmp_path / "saved")
    assert (again.step, again.age) == (skipped.step, skipped.age)
    assert again.fingerprint == skipped.fingerprint
    assert again.config == skipped.config and again.config.model.skipping.rate == 0.2
    assert again.calibration == skipped.calibration
    assert bytes_of(again.balance) == bytes_of(skipped.balance)
    assert bytes_of(again.params) == bytes_of(skipped.params)
    assert again.generate("abc", max_tokens=8, seed=1).tokens
    with folder_unchanged(tmp_path), pytest.raises(UserError, match="holds a run already"):
        skipped.save(tmp_path / "saved")
    with folder_unchanged(tiny_run.workdir), pytest.raises(UserError, match="holds a run already"):
        skipped.save(tiny_run.workdir)
    # Weights to start from, without an optimizer to go on with.
    reader = CheckpointReader(tmp_path / "saved" / "checkpoints")
    assert reader.saved_shapes(6)["opt_state"] == {}
    documents = reader.read_documents(6)
    assert documents[start.POSITION_FILE] == skipped.documents[start.POSITION_FILE]
    with pytest.raises(UserError, match="without the optimizer's state: use another --workdir"):
        start.check_start(reader, skipped.config, None)


def test_a_run_of_other_loops_is_not_saved(loaded, tmp_path):
    model = build_model(loaded.config, loaded.model.vocab_size, 3)
    with pytest.raises(UserError, match="3 times instead of 1 cannot be saved"):
        dataclasses.replace(loaded, model=model).save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_one_command(tiny_run, loaded, texts, held_out, tmp_path, monkeypatch):
    real = runs.load_run
    own = str(tiny_run.workdir)  # loaded already, and what it needs is compiled
    monkeypatch.setattr(
        runs, "load_run", lambda path, *a, **k: loaded if path == own else real(path, *a, **k)
    )
    paths = {name: tmp_path / name for name in ("mod.md", "mod.json", "saved")}
    arguments = [
        f"--text={texts / 'held_out.txt'}",
        f"--calibration={texts / 'calibrate.txt'}",
        f"--batch_size={BATCH}",
        f"--json={paths['mod.json']}",
    ]
    done = call(
        "evaluate",
        f"--checkpoint={tiny_run.workdir}",
        "--skip_rate=0,.2",
        "--skip=ffn",
        f"--out={paths['mod.md']}",
        f"--save={paths['saved']}",
        *arguments,
    )
    assert (done.code, done.err) == (0, ""), done
    content = json.loads(paths["mod.json"].read_text())
    plain, at_rate = content["rates"]
    assert content["before_calibration"] == plain and plain["calibration"] is None
    assert plain["bits_per_byte"] == loaded.score(held_out, BATCH).bits_per_byte
    assert plain["skipped"] == {"attention": 0, "feedforward": 0}
    assert plain["saved"] == {"row_length": 0, "long_rows": 0}
    assert (content["sublayers"], content["step"], content["row_length"]) == ("feedforward", 6, 16)
    assert at_rate["rate"] == 0.2
    assert at_rate["skipped"]["feedforward"] == pytest.approx(0.2, abs=0.01)
    assert at_rate["skipped_by_layer"]["feedforward"] == [at_rate["skipped"]["feedforward"]]
    saved = 1 - at_rate["forward_flops_per_token"] / plain["forward_flops_per_token"]
    assert 0 < at_rate["saved"]["row_length"] == pytest.approx(saved)
    assert at_rate["saved"]["long_rows"] == pytest.approx(0, abs=1e-6)
    assert at_rate["training_flops_per_token"] == 3 * at_rate["forward_flops_per_token"]

    table = paths["mod.md"].read_text()
    assert table.startswith(f"# Step 6 of {tiny_run.workdir}")
    assert content["corpus_fingerprint"] in table
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and len({row.count("|") for row in rows}) == 1
    assert rows[2].startswith("| 0.0 % | 0.0 % | 0.0 % |") and rows[3].startswith("| 20.0 % |")
    for result, row in ((plain, rows[2]), (at_rate, rows[3])):
        assert f"| {result['loss']:.4f} | {result['bits_per_byte']:.4f} |" in row
    assert f"{at_rate['bits_per_byte']:.4f}" in done.out and "20.0 %" in done.out

    # What was saved scores the same; its own thresholds are the table's first line.
    done = call("evaluate", f"--checkpoint={paths['saved']}", "--skip_rate=0", *arguments)
    assert (done.code, done.err) == (0, ""), done
    again = json.loads(paths["mod.json"].read_text())
    assert again["before_calibration"] == at_rate and again["rates"] == [plain]
    assert again["sublayers"] == "feedforward"
    assert "as stored" in done.out


def test_the_table_tells_rates_that_were_not_reached():
    result = {
        "rate": 0.1,
        "loss": 1.0,
        "bits_per_byte": 2.0,
        "skipped": {"attention": 0.15, "feedforward": 0.0},
        "skipped_by_layer": {"attention": [0.1, 0.2], "feedforward": [0.0, 0.0]},
        "saved": {"row_length": 0.05, "long_rows": 0.15},
        "calibration": {
            "rate": 0.1,
            "sublayers": "attention",
            "tokens": 5000,
            "passes": 4,
            "skipped": {"attention": [0.1, 0.22], "feedforward": [0.0, 0.0]},
        },
    }
    table = SkippingTable("attention", "train:1M", 1024, result, [result], None)
    assert table.cells()[1][:3] == ["10.0 %", "15.0 % (10.0 to 20.0)", "0.0 %"]
    assert [row[0] for row in table.cells()] == ["as stored", "10.0 %"]
    assert "skip attention by thresholds calibrated on train:1M (5,000 tokens)" in table.notes()[0]
    assert "15.0 % skip attention and 0.0 % skip feed-forward" in table.notes()[1]
    (note,) = table.notes()[3:]
    assert "At 10.0 % the calibration text itself came to 16.0 % of attention after 4" in note
    assert "saved, T=1,024" in table.markdown("x")


def test_calibration_text_of_the_runs_own_corpus(loaded):
    prepared = runs.store.prepare(loaded.config.data)
    train = loaded.calibration_rows("train:100").rows
    assert len(train) == 7  # of 16 targets each
    order = skipping.first_rows(len(prepared.train), loaded.config.seed, 7)
    for row, index in zip(train, order, strict=True):
        assert np.array_equal(row["tokens"], prepared.train[index]["tokens"])
    assert len(loaded.calibration_rows("train:1M").rows) == len(prepared.train)
    validation = loaded.calibration_rows("validation:0.04k").rows
    assert len(validation) == 3
    assert np.array_equal(validation[2]["tokens"], prepared.validation[2]["tokens"])
    other = dataclasses.replace(loaded, fingerprint="x")
    with pytest.raises(UserError, match="corpus has changed"):
        other.calibration_rows("train:100")


def test_what_cannot_be_calibrated_is_refused(loaded):
    for calibration, words in (
        ("train:", "train:200k"),
        ("validation:0", "validation:1M"),
        ("train:1G", "how many tokens"),
        ("nowhere/*.txt", "no file matches"),
        ("", "calibration is empty"),
    ):
        with pytest.raises(UserError, match=words):
            loaded.calibration_rows(calibration)
    for rate in (1.0, -0.1, float("nan")):
        with pytest.raises(UserError, match="at least 0 and below 1"):
            loaded.with_skipping(rate)
    with pytest.raises(UserError, match="model.skipping.sublayers.* one of both, attention"):
        loaded.with_skipping(0.1, "none")
    config = small_config(connection__kind="prenorm")
    model = build_model(config, loaded.model.vocab_size)
    run = dataclasses.replace(loaded, config=config, model=model)
    with pytest.raises(UserError, match="connection.kind=prenorm does not have; allowed .*: nag"):
        run.with_skipping(0.1)
    # A connection of a user's own is asked what it measures.
    params = jax.eval_shape(lambda: random_params(model))
    with pytest.raises(UserError, match="kind=own:Kind has no gate"):
        skipping.require_gate(model, params, "own:Kind")


def test_flags_that_do_not_go_together_are_refused(tiny_run, tmp_path):
    def refused(*args, words, checkpoint=tiny_run.workdir):
        assert_refused(call("evaluate", f"--checkpoint={checkpoint}", *args), *words)

    nothing = tmp_path / "gone"  # refused before anything is loaded
    for flag in ("--skip=ffn", "--out=a.md", "--save=b", "--calibration=train:1k"):
        name = flag.partition("=")[0]
        refused(flag, words=(f"{name} goes with --skip_rate",), checkpoint=nothing)
    for args, words in (
        (["--skip_rate=0,1"], ["1;", "below 1"]),
        (["--skip_rate=-.1"], ["-0.1", "at least 0"]),
        (["--skip_rate=nan"], ["nan", "below 1"]),
        (["--skip_rate=0,x"], ["--skip_rate", "'x' is no number"]),
        (["--skip_rate="], ["--skip_rate is empty"]),
        (["--skip_rate=.1", "--skip=mlp"], ["--skip", "ffn"]),
        (["--skip_rate=.1", "--by=file"], ["--by", "--skip_rate"]),
        (["--skip_rate=.1", "--calibration=train:x"], ["train:x", "train:1M"]),
        (["--skip_rate=.1,.2", "--save=b"], ["--save", "one"]),
        (["--skip_rate=0", "--save=b"], ["--save", "above 0"]),
        (["--skip_rate=.1", "--save=b", "--loops=2"], ["--save", "--loops"]),
        (["--skip_rate=.1", f"--out={tmp_path}"], ["--out", "folder"]),
        (["--skip_rate=.1", f"--out={tmp_path}/gone/a.md"], ["--out", "no folder"]),
        (["--skip_rate=.1", f"--save={tiny_run.workdir}"], ["--save", "holds a run already"]),
        (["--skip_rate=.1", f"--save={__file__}"], ["--save", "is a file"]),
    ):
        refused(*args, words=words, checkpoint=nothing)
