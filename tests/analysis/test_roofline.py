"""The arithmetic of estimates, on numbers that can be checked by hand."""

import pytest

from nag_jax.analysis.optimizer_flops import update_flops
from nag_jax.analysis.roofline import Work, estimate, training_bytes
from nag_jax.errors import UserError
from nag_jax.parameters import ParamInfo
from nag_jax.sharding.hardware import CHIPS
from nag_jax.sharding.topologies import absent_devices, parse_topology, target_config


def test_a_step_is_bound_by_its_slowest_part():
    chip = CHIPS["h200"]
    work = Work(989e12, 0.4 * 989e12, 0.1 * 67e12, 4800e9, 900e9, 1000, 8, False, True)
    found = estimate(work, chip, one_host=True)
    assert (found.compute, found.memory, found.links) == (1.5, 1.0, 2.0)
    assert (found.bound, found.total) == (2.0, 4.5)
    # What is computed again is no use: utilisation counts the model's own.
    assert found.utilisation(found.bound) == 0.5
    assert estimate(work, chip, one_host=False).links == 18.0
    slow = estimate(work._replace(float32=True), chip, one_host=True)
    assert slow.compute == pytest.approx(1.4 * 989 / 67 + 0.1)
    fast = estimate(work._replace(optimizer_float32=False), chip, one_host=True)
    assert fast.compute == pytest.approx(1.4 + 0.1 * 67 / 989)


def test_bytes_of_memory():
    memory = {
        "parameters": 400,
        "gradients": 400,
        "optimizer state": 800,
        "kept activations": 1000,
        "workspace": 5000,
    }
    assert training_bytes(memory, 200, 1) == 3 * 200 + 2 * 400 + 2 * 1000 + 2 * 1200
    # Half the rows at a time: as many activations in all, and weights and gradients twice.
    halves = training_bytes(memory | {"kept activations": 500}, 200, 2)
    assert halves == training_bytes(memory, 200, 1) + 3 * 200 + 2 * 400


def info(shape, rows, columns, role="matrix"):
    return ParamInfo(tuple("abcd"[: len(shape)]), role, rows, columns, False, shape, "float32")


def test_flops_of_an_update():
    infos = {"w": info((3, 4, 10), (1,), (2,)), "b": info((7,), (), (), "bias")}
    # Five times A = X X^T, A A and (b A + c A A) X of 4 x 10, for three matrices.
    one = 5 * (2 * 4 * 4 * 10 + 2 * 4**3 + 2 * 4 * 4 * 10)
    assert update_flops({"kind": "muon", "newton_schulz_steps": 5}, infos) == (3 * one, 0)
    assert update_flops({"kind": "adamw"}, infos) == (0, 0)
    shampoo = {"kind": "shampoo", "refresh_every": 2, "block_size": 5, "max_side": 5}
    # Two blocks of 4 x 5 in each matrix: eigh at 9 n^3 and the root's product, and both factors.
    roots, factors = 11 * (4**3 + 5**3) / 2, 4 * 4 * 5 * (4 + 5)
    assert update_flops(shampoo, infos) == (6 * roots, 6 * factors)
    for kind in ("soap", "kl_shampoo"):
        often = update_flops({"kind": kind, "refresh_every": 1, "max_side": 10}, infos)
        seldom = update_flops({"kind": kind, "refresh_every": 10, "max_side": 10}, infos)
        assert often.shared == pytest.approx(10 * seldom.shared) and seldom.shared > 0
        assert often.repeated == seldom.repeated > 0


@pytest.mark.parametrize(
    "kind, refresh, step",
    [("soap", 4 + 8 / 3, 6), ("shampoo", 9 + 2, 4), ("kl_shampoo", 2 + 8 / 3, 8)],
)
def test_a_side_without_a_factor_costs_nothing(kind, refresh, step):
    """Of 4 x 10 with factors up to 4 the rows' alone counts; with none, nothing."""
    infos = {"w": info((4, 10), (0,), (1,))}
    options = {"kind": kind, "refresh_every": 1, "max_side": 4}
    products = 4 * 4 * 10
    found = update_flops(options, infos)
    assert found.repeated == step * products
    assert found.shared == pytest.approx(refresh * 4**3 + (4 * products if kind == "soap" else 0))
    assert update_flops(options | {"max_side": 3}, infos) == (0, 0)


def test_memory_that_programs_get():
    assert CHIPS["v5e"].usable == CHIPS["v5e"].memory == 15.75 * 2**30
    assert CHIPS["h200"].usable == 0.75 * 141e9


@pytest.mark.parametrize("name", ["v9:2x2", "v5e", "v5e:2x", "4x4", "h100:0", ""])
def test_topologies_that_are_none(name):
    with pytest.raises(UserError, match=f"--topology={name} "):
        parse_topology(name)


def test_topologies():
    assert parse_topology("v5p:2x2x1") == ("v5p", (2, 2, 1))
    assert parse_topology("cpu:8") == ("cpu", (8,))
    with pytest.raises(UserError, match="this process has 1 CPU devices"):
        absent_devices("cpu:3")
    assert 'device_description_str: "NVIDIA H200"' in target_config(CHIPS["h200"])
    assert "device_memory_size: 141000000000" in target_config(CHIPS["h200"])
