"""`nag_jax.plan`: a configuration on devices that are simulated, or not there."""

import importlib.util

import pytest
from run_helpers import REPOSITORY, Place
from use_helpers import assert_refused, call, call_process

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
        "training step of 8 rows in 1 micro-batches on cpu:4",
        "received in",
    ):
        assert words in result.out, (words, result.out)
    assert "seconds of compute" not in result.out  # nobody knows this CPU's speed


def test_decoding_on_simulated_devices(plan):
    """As many rows as the devices share, and nothing of training."""
    result = plan(SMOKE, "--topology=cpu:4", "--step=decode", "--batch_size=3", "--context=10")
    assert result.code == 0, result.err
    assert "decoding a token for 4 rows, each at 10 on cpu:4" in result.out
    assert "memory per device, compiled" in result.out
    for words in ("training", "optimizer", "gradients", "steps (", "micro-batches", "chunked"):
        assert words not in result.out, (words, result.out)


@pytest.mark.parametrize(
    "args, words",
    [
        (("--topology=v9:2x2",), ("--topology=v9:2x2", "v5e:4x4")),
        (("--topology=h200:0",), ("--topology=h200:0", "no devices")),
        (("--topology=cpu:2x2",), ("--topology=cpu:2x2", "cpu:8")),
        (("--topology=cpu:4", "--step=decode", "--context=65"), ("--context=65", "1 to 64 tokens")),
        (("--topology=cpu:4", "--step=decode", "--batch_size=0"), ("--batch_size=0", "at least 1")),
        (("--topology=cpu:4", "--step=decode", "--tokens=1e9"), ("--tokens", "--step=train")),
        (("--topology=cpu:4", "--context=9"), ("--context", "--step=decode")),
        (("--topology=cpu:4", "--compile=2"), ("--compile=2", "--search")),
        (("--topology=cpu:4", "--tokens=-1"), ("--tokens=-1", "above 0")),
        (("--topology=cpu:4", "--places=5"), ("--places=5", "a TPU")),
    ],
)
def test_mistakes_are_told_at_once(args, words):
    assert_refused(call("plan", f"--config={REPOSITORY}/configs/nag_small.py:smoke", *args), *words)


def test_what_does_not_fit_the_devices_is_told_before_anything_compiles(plan):
    assert_refused(
        plan(SMOKE, "--topology=cpu:4", "--config.mesh.data=3"), "do not fit the number of devices"
    )
    assert_refused(plan(SMOKE, "--topology=cpu:4", "--search"), "--search", "not cpu")


@pytest.mark.absent_device
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
        "lower bound",
        "device-hours",
    ):
        assert words in result.out, (words, result.out)


@pytest.mark.absent_device
@pytest.mark.slow
@pytest.mark.parametrize(
    "step, words",
    [
        ("evaluate", "evaluation of 8 rows on v5e:2x2"),
        ("decode", "decoding a token for 4 rows, each at 64 on v5e:2x2"),
    ],
)
def test_other_steps_on_chips_that_are_not_there(plan, step, words):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    result = plan(SMOKE, "--topology=v5e:2x2", f"--step={step}", "--config.mesh.fsdp=4")
    assert result.code == 0, result.err
    for part in (words, "16.9 GB: fits", "tokens/s", "received in"):
        assert part in result.out, (part, result.out)
    for part in ("training", "optimizer", "gradients", "steps ("):
        assert part not in result.out.partition("- Products")[0], (part, result.out)


@pytest.mark.absent_device
@pytest.mark.slow
def test_a_search_ends_with_a_plan_that_fits(plan):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    result = plan(SMOKE, "--topology=v5e:2x2", "--search", "--compile=1")
    assert result.code == 0, result.err
    assert "by estimate" in result.out and "16.9 GB: fits" in result.out
    result = plan(SMOKE, "--topology=v5e:2x2", "--search", "--compile=0")
    assert result.code == 0, result.err
    assert "by estimate" in result.out and "16.9 GB" not in result.out
