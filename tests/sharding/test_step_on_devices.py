"""A step is the same for 1 and 8 devices and any accumulation, in every metric.

Here is one mesh; `tests/slow/test_all_meshes.py` has the others.
"""

import pytest
from eight_devices import run_on_eight_devices

METRICS = {"accuracy", "finite", "gradient_norm", "learning_rate", "loss", "parameter_norm"}
METRICS |= {"tokens", "update_norm", "taps/gain", "taps/norm", "taps/rotation"}
GATES = {"taps/gate", "taps/gate_floored"}
EXPERTS = {"auxiliary_loss", "balance/feedforward_idle_experts"}
EXPERTS |= {"balance/feedforward_load_over_mean"}


@pytest.mark.slow
def test_eight_devices_and_accumulation_equal_one():
    """Metrics to 1e-5, parameters to rounding, bytes a device to 1.1 times its share."""
    out = run_on_eight_devices("step_on_devices.py", "nag")
    assert f"metrics: {sorted(METRICS | GATES | EXPERTS)}" in out
