"""`nag_jax.plan`: a configuration on devices that are simulated, or not there."""

import importlib.util

import pytest
from run_helpers import Place
from use_helpers import assert_refused, call_process

SMOKE = "--config=configs/nag_small.py:smoke"


@pytest.fixture
def plan(tmp_path):
    """Runs it with arguments, in a process of its own."""
    place = Place(tmp_path)
    return lambda *args: call_process(place, "plan", *args)


def test_a_step_on_simulated_devices(plan):
    result = plan(SMOKE, "--topology=cpu:4", "--config.mesh.fsdp=2")
    assert result.code == 0, result.err
    for words in (
        "mesh data 2, fsdp 2, tensor 1, expert 1",
        "residual update: reference (no fused kernel for CPU",
        "memory per device, compiled",
        "all-gather, received in every step",
    ):
        assert words in result.out, (words, result.out)
    assert "seconds of compute" not in result.out  # nobody knows this CPU's speed


def test_mistakes_are_told_at_once(plan):
    assert_refused(plan(SMOKE, "--topology=v9:2x2"), "--topology=v9:2x2", "v5e:4x4")
    assert_refused(
        plan(SMOKE, "--topology=cpu:4", "--config.mesh.data=3"), "do not fit the number of devices"
    )
    assert_refused(plan(SMOKE, "--topology=cpu:4", "--search"), "--search", "not cpu")


@pytest.mark.slow
def test_a_step_on_chips_that_are_not_there(plan):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    result = plan(
        SMOKE, "--topology=v5e:2x2", "--tokens=1e6", "--config.model.compute_dtype=bfloat16"
    )
    assert result.code == 0, result.err
    for words in (
        "residual update: mosaic_tpu",
        "kernel nag_update_forward",
        "kernel nag_update_backward",
        "16.9 GB: fits",
        "step, lower bound",
        "device-hours",
    ):
        assert words in result.out, (words, result.out)


@pytest.mark.slow
def test_a_search_ends_with_a_plan_that_fits(plan):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    result = plan(SMOKE, "--topology=v5e:2x2", "--search", "--compile=1")
    assert result.code == 0, result.err
    assert "estimated bound" in result.out and "16.9 GB: fits" in result.out
