"""The loss on eight simulated devices."""

from eight_devices import run_on_eight_devices


def test_eight_devices():
    assert run_on_eight_devices("loss_on_devices.py").count("checked") == 19
