"""Each connection with CCGQA, dense and with experts, on meshes of every kind of axis."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("feedforward", ["swiglu", "moe"])
@pytest.mark.parametrize("connection", ["nag", "prenorm", "residual_free"])
def test_eight_devices_equal_one(connection, feedforward):
    """Loss, every metric, updated parameters, and what each device holds."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
    }
    script, case = TESTS / "sharding/step_on_devices.py", f"{connection}_ccgqa_{feedforward}"
    done = subprocess.run(
        [sys.executable, str(script), case], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agrees:") == 6
