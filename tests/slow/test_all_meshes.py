"""Each connection with CCGQA and experts on meshes of all axes; what a step sends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def run_on_eight_devices(script, *arguments):
    """Runs a script of `tests/sharding` on simulated devices and returns what it printed."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
    }
    done = subprocess.run(
        [sys.executable, str(TESTS / "sharding" / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("connection", ["nag", "prenorm", "residual_free"])
def test_eight_devices_equal_one(connection):
    """Loss, every metric, updated parameters, and what each device holds."""
    out = run_on_eight_devices("step_on_devices.py", f"{connection}_ccgqa_moe")
    assert out.count("agrees:") == 5


def test_a_dense_model_with_fewer_key_value_heads_than_tensor_devices():
    assert run_on_eight_devices("step_on_devices.py", "prenorm").count("agrees:") == 2


def test_decoding_on_eight_devices_equals_one():
    assert run_on_eight_devices("decode_on_devices.py").count("decodes:") == 1


def test_collectives():
    run_on_eight_devices("count_collectives.py", "data", "fsdp", "tensor", "mixed")
