"""What tests share: the CPU backend, hypothesis without clocks or files, float64, one tiny run."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs that took long to compile are read again: by the other workers, by processes that tests
# start and by the next run of the tests.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "compiled")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
# Tests side by side compile for TPU, each with libtpu.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import pytest
from hypothesis import settings
from small_models import quick_compilation

settings.register_profile(
    "project", deadline=None, database=None, derandomize=True, max_examples=30
)
settings.load_profile("project")


def pytest_collection_modifyitems(items):
    """All of tests/slow is slow; elsewhere single tests are marked."""
    for item in items:
        if item.path.parent.name == "slow":
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def quick_compile():
    """See `small_models.quick_compilation`: no test is about what the optimisations do."""
    with quick_compilation():
        yield


@pytest.fixture
def x64():
    """float64 inside one test only: the switch is this thread's, and other tests keep float32."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def few_rungs(monkeypatch):
    """Fewer capacities for kept rows, which compile faster; `test_kept_rows` has all of them."""
    from nag_jax.models import kept_rows

    monkeypatch.setattr(kept_rows, "EIGHTHS", (0, 5, 8))


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """See `use_helpers.TinyRun`."""
    import run_helpers
    import use_helpers

    return use_helpers.tiny_run(run_helpers.place_of_session(tmp_path_factory))


@pytest.fixture(scope="session")
def loaded(tiny_run):
    """The run of `tiny_run` as `load_run` gives it; tests share what it has compiled."""
    import nag_jax

    return nag_jax.load_run(tiny_run.workdir)


@pytest.fixture
def cached_compilation(tiny_run):
    """Compiles quickly, and takes programs from the cache that all processes of a session share."""
    with tiny_run.place.in_process():
        yield
