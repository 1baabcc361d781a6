"""A complete `data` node from what a test says, with its own cache folder."""

from collections.abc import Callable
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from nag_jax import config as config_lib

REAL_DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def data_config(tmp_path) -> Callable[..., ConfigDict]:
    """Takes leaves below `data` by dotted path, as `**{"source.kind": "text"}`."""

    def build(**leaves) -> ConfigDict:
        leaves = {"cache_folder": str(tmp_path / "cache"), **leaves}
        return config_lib.resolve({f"data.{key}": value for key, value in leaves.items()}).data

    return build


@pytest.fixture
def real_data() -> Path:
    """Folder of published texts and tokenizers beside the repository, where there is one."""
    if not REAL_DATA.is_dir():
        pytest.skip("no published texts beside the repository")
    return REAL_DATA
