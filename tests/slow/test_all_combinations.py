"""Every row of the table of combinations, some seconds each."""

import pytest
from combinations import COMBINATIONS, check


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_combination(combination, tmp_path, few_rungs):
    check(combination, tmp_path / "checkpoints")
