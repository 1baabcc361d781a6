"""The rows of the table of combinations that the default suite leaves out, some seconds each."""

import pytest
from combinations import COMBINATIONS, IN_DEFAULT_SUITE, check


@pytest.mark.parametrize("combination", COMBINATIONS[IN_DEFAULT_SUITE:], ids=str)
def test_combination(combination, tmp_path, few_rungs):
    check(combination, tmp_path / "checkpoints")
