"""The runs that a sweep's flags ask for."""

import pytest

from nag_jax.analysis.grids import variants
from nag_jax.errors import UserError


def test_a_product():
    found = variants(["optimizer.learning_rate=1e-3,3e-3", "seed=0,1"], [], [])
    assert [run.name for run in found] == [
        f"learning_rate={rate},seed={seed}" for rate in ("1e-3", "3e-3") for seed in (0, 1)
    ]
    assert found[1].values == {"optimizer.learning_rate": "1e-3", "seed": "1"}


def test_zips_and_lists_multiply_with_grids():
    found = variants(["seed=0,1"], ["a.x=1,2;b=3,4"], ["c=5;d=6 e=7"])
    assert len(found) == 8
    assert found[0].values == {"seed": "0", "a.x": "1", "b": "3", "c": "5"}
    assert found[-1].values == {"seed": "1", "a.x": "2", "b": "4", "d": "6", "e": "7"}


def test_names_tell_keys_apart_and_are_names_of_folders():
    (run,) = variants([], [], ["model.attention.kind=gqa optimizer.kind=own.parts:My/Muon"])
    assert run.name == "attention.kind=gqa,optimizer.kind=own.parts_My_Muon"


def test_values_with_commas_stand_in_parentheses():
    found = variants(["model.feedforward.num_experts=(4,),(2,8)"], [], [])
    assert [run.values["model.feedforward.num_experts"] for run in found] == ["4,", "2,8"]
    assert [run.name for run in found] == ["num_experts=4+", "num_experts=2+8"]


@pytest.mark.parametrize(
    ("grids", "zips", "lists", "words"),
    [
        ([], [], [], "nothing varies"),
        (["seed"], [], [], "'seed' cannot be read: it must be key=value"),
        (["seed="], [], [], "cannot be read"),
        (["seed=0,,1"], [], [], "an empty one"),
        (["seed=(0,1"], [], [], "a parenthesis alone"),
        (["seed=0,1", "seed=2"], [], [], "seed is varied twice"),
        (["seed=0,0"], [], [], "two runs are the same .* seed=0"),
        ([], ["a=1,2;b=3"], [], "as many values: a has 2, b has 1"),
        ([], [], ["a=1;b"], "'b' must be key=value"),
    ],
)
def test_what_cannot_be_read_is_refused(grids, zips, lists, words):
    with pytest.raises(UserError, match=words):
        variants(grids, zips, lists)
