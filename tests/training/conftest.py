"""What the tests of whole runs share."""

import pytest
from run_helpers import RecordingStream, place_of_session

from nag_jax.data import pipeline


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Where this session's runs share their corpus and compiled programs."""
    return place_of_session(tmp_path_factory)


@pytest.fixture
def rows_seen(monkeypatch):
    """Position in training -> digest of the row that a run in this process trained on there."""
    seen = {}
    monkeypatch.setattr(RecordingStream, "seen", seen)
    monkeypatch.setattr(pipeline, "TrainingStream", RecordingStream)
    return seen
