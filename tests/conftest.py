"""What every test shares: the CPU backend, hypothesis without clocks or files, and float64."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from hypothesis import settings
from small_models import quick_compilation

settings.register_profile(
    "project", deadline=None, database=None, derandomize=True, max_examples=30
)
settings.load_profile("project")


@pytest.fixture
def quick_compile():
    """See `small_models.quick_compilation`."""
    with quick_compilation():
        yield


@pytest.fixture
def x64(quick_compile):
    """float64 inside one test only: the switch is this thread's, and other tests keep float32."""
    with jax.enable_x64(True):
        yield
