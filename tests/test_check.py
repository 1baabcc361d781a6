"""The contract tests on parts that keep the contracts and on parts that each break one."""

import re

import jax
import numpy as np
import pytest
import run_helpers
from small_models import VOCAB, random_params, small_config, small_model
from use_helpers import assert_refused, call

from nag_jax import contracts
from nag_jax.errors import UserError
from nag_jax.models.transformer import build_model
from nag_jax.sharding.mesh import single_device_mesh
from nag_jax.sharding.rules import MESH_AXES

pytestmark = pytest.mark.usefixtures("cached_compilation")

LENGTH = 20
# What compiles fast.
PLAIN = {
    "num_blocks": 1,
    "connection__kind": "prenorm",
    "feedforward__kind": "mlp",
    "attention__query_chunk": 32,
    "loss_chunk": 0,
    "remat": "none",
}


def case_of(row_length=LENGTH, **keys):
    config = small_config({"data.row_length": row_length}, **(PLAIN | keys))
    return contracts.make_case(config, build_model(config, contracts.VOCABULARY))


def results(names, **keys):
    """Outcome by contract."""
    case = case_of(**keys)
    return {name: contracts.check(name, case) for name in names}


BROKEN = {
    "Unmasked": (
        "attention",
        {"causality": False, "document isolation": False},
        r"position 0 of a row changed when only tokens from position 13 on were changed .* "
        r"the part that does so is model.attention.kind=broken_parts:Unmasked$",
    ),
    "BehindAZero": ("attention", {"causality": False}, "model.attention.kind=broken_parts:Beh"),
    "Neighbour": (
        "feedforward",
        {
            "document isolation": False,
            "causality": True,
            "cached decode equals full forward": False,
        },
        r"position 6 of a row changed when only tokens of another document, before position 6, .* "
        r"the part that does so is model.feedforward.kind=broken_parts:Neighbour$",
    ),
    "RowPositions": (
        "attention",
        {"document isolation": False},
        r"a document at position 6 .* counts positions from the row's start .* model.attention",
    ),
    "Forgetful": (
        "attention",
        {"cached decode equals full forward": False},
        r"after a prompt of \d+ and 2 more tokens .* model.attention.kind=broken_parts:Forgetful, "
        "with the cache it keeps",
    ),
    "NoDirection": (
        "connection",
        {"describe": False},
        r"the direction that describe of model.connection.kind=broken_parts:NoDirection gives has "
        "rms .*; it must be 1",
    ),
    "NoGradient": (
        "feedforward",
        {"gradients finite": False},
        r"the gradient of .* is not finite, .* the part that does so is "
        "model.feedforward.kind=broken_parts:NoGradient$",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_part_is_named(name):
    part, expected, words = BROKEN[name]
    found = results(expected, **{f"{part}__kind": f"broken_parts:{name}"})
    assert {name: result.holds for name, result in found.items()} == expected, found
    first = next(name for name, holds in expected.items() if not holds)
    assert re.search(words, found[first].text), found[first].text
    if name == "Neighbour":  # it is not the attention's cache that differs
        text = found["cached decode equals full forward"].text
        assert "Neighbour gives a token other outputs without its neighbours" in text


def test_the_packages_own_parts_hold():
    """In bfloat16, whose tolerances are others; `tests/test_examples.py` has float32."""
    found = results(contracts.CONTRACTS, compute_dtype="bfloat16")
    mesh = found.pop("mesh equals single device")
    assert mesh.holds is None and "takes 4 devices" in mesh.text
    assert all(result.holds for result in found.values()), found


def test_a_mesh_that_changes_results(monkeypatch):
    """A mesh of one device will do; `tests/test_examples.py` has one of four."""
    monkeypatch.setattr(contracts, "MESH", dict.fromkeys(MESH_AXES, 1))
    name = "mesh equals single device"
    result = results([name], feedforward__kind="broken_parts:OnAMesh")[name]
    assert result.holds is False
    words = r"losses differ by .*; the part that does so is model.feedforward.kind=.*:OnAMesh$"
    assert re.fullmatch(words, result.text), result.text


def test_what_no_gradient_reaches_is_noted():
    result = results(["gradients finite"], feedforward__kind="broken_parts:Unused")
    result = result["gradients finite"]
    assert result.holds
    assert result.text.endswith("NOTE: no gradient reaches stage_0/blocks/feedforward/branch/idle")


def test_rows_of_one_token_have_nothing_to_check():
    case = case_of(row_length=1)
    names = ("causality", "document isolation", "cached decode equals full forward")
    found = [contracts.check(name, case) for name in names]
    assert all(x.holds is None and "rows of 1 tokens" in x.text for x in found)


# --- the binary ---


def check(*args, **keys):
    keys = {"connection.kind": "prenorm", "num_blocks": 1, **keys}
    overrides = [f"--config.model.{key}={value}" for key, value in keys.items()]
    config = run_helpers.REPOSITORY / "configs" / "nag_small.py"
    return call("check", f"--config={config}:smoke", *args, *overrides)


def rows_of(done):
    """First words of each contract's row of the table."""
    return dict(re.findall(r"│ (\w[^│]*?) +│ (PASS|FAIL|SKIP) │", done.out))


def squeezed(done):
    """What the table says, without the ends of its lines."""
    return re.sub(r"[│\s]+", "", done.out)


def test_a_model_that_cannot_be_built():
    done = check(**{"feedforward.kind": "broken_parts:Undeclared"})
    assert (done.code, done.err) == (1, "")
    rows = rows_of(done)
    assert rows.pop("parameters declared") == "FAIL" and set(rows.values()) == {"SKIP"}
    assert "parameterstage_0/blocks/feedforward/branch/extrahasnologicalaxes" in squeezed(done)


def test_an_exception_is_told_with_its_place():
    done = check(**{"feedforward.kind": "broken_parts:Raises"})
    assert (done.code, done.err) == (1, "") and "Traceback" not in done.out
    text = squeezed(done)
    assert re.search(r"ValueError:no\[such\]rows\(\S*tests/broken_parts\.py:\d+\)", text), text


def test_a_large_model_is_refused():
    done = check("--max_parameters=1000")
    assert_refused(done, "parameters, more than --max_parameters=1,000", ":smoke")


def test_a_kernel_of_another_device_is_refused_before_any_contract():
    done = check(**{"attention.implementation": "splash"})
    assert_refused(done, "'splash' cannot serve", "runs on TPU, not on CPU")


# --- the probe of a training run ---


def test_a_broken_model_is_not_trained(tiny_run, tmp_path):
    """Also where the part that breaks it is behind a gain that starts at zero."""
    arguments = tiny_run.place.arguments(tmp_path / "run", run_helpers.PLAIN)
    kind = "model.attention.kind=broken_parts:BehindAZero"
    done = call("train", *arguments, f"--config.{kind}")
    assert_refused(done, "the output at position 0", "tokens from position", kind, "nag_jax.check")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_probe_sees_other_documents():
    kind = "broken_parts:Neighbour"
    model = small_model(**(PLAIN | {"feedforward__kind": kind}))
    with pytest.raises(UserError, match=f"tokens of another document.*model.feedforward.*{kind}"):
        contracts.probe(model, random_params(model), single_device_mesh(), LENGTH)


def test_the_probe_is_for_rows_with_something_to_see():
    model = small_model(**PLAIN)
    params, mesh = random_params(model), single_device_mesh()
    assert not contracts.probe(model, params, mesh, 2)
    assert contracts.probe(model, params, mesh, 3)


def test_rows_of_the_probe():
    rows = contracts.leak_rows(LENGTH, VOCAB)
    original, later, other = rows.tokens
    changed = original != later
    assert changed[rows.cut :].all() and not changed[: rows.cut].any()
    changed = original != other
    assert changed[: rows.boundary].all() and not changed[rows.boundary :].any()
    assert rows.tokens.min() >= 0 and rows.tokens.max() < VOCAB
    groups = np.split(original, [rows.boundary, rows.cut])
    assert [set(part // rows.group) for part in groups] == [{0}, {1}, {2}]


def test_outputs_that_are_all_zero_leak_nothing():
    model = small_model(**PLAIN)
    params = jax.tree.map(np.zeros_like, random_params(model))
    assert contracts.probe(model, params, single_device_mesh(), LENGTH)
