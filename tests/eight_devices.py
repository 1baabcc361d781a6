"""Scripts of `tests/sharding` on eight simulated devices, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run_on_eight_devices(script: str, *arguments: str) -> str:
    """Runs a script of `tests/sharding` and returns what it printed."""
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
