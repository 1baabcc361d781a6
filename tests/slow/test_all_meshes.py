"""Each connection with CCGQA and experts on meshes of all axes; what a step sends."""

import pytest
from eight_devices import run_on_eight_devices


@pytest.mark.parametrize("connection", ["nag", "prenorm", "residual_free"])
def test_eight_devices_equal_one(connection):
    """Loss, every metric, updated parameters, and what each device holds."""
    out = run_on_eight_devices("step_on_devices.py", f"{connection}_ccgqa_moe")
    assert out.count("agrees:") == 5


def test_eight_devices_equal_one_where_tokens_skip():
    """40 % of tokens in every sub-layer; the thresholds after the step are among the metrics."""
    out = run_on_eight_devices("step_on_devices.py", "nag_skips")
    assert out.count("agrees:") == 2
    assert "balance/attention_threshold" in out and "balance/feedforward_threshold" in out


def test_a_dense_model_with_fewer_key_value_heads_than_tensor_devices():
    assert run_on_eight_devices("step_on_devices.py", "prenorm").count("agrees:") == 2


def test_decoding_on_eight_devices_equals_one():
    assert run_on_eight_devices("decode_on_devices.py").count("decodes:") == 1


def test_collectives():
    run_on_eight_devices("count_collectives.py", "data", "fsdp", "tensor", "mixed")
