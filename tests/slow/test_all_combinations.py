"""Every row of the table of combinations: about 30 tiny models, some seconds each."""

import pytest
from combinations import COMBINATIONS, check


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_combination(combination, tmp_path, quick_compile):
    check(combination, tmp_path / "checkpoints")
