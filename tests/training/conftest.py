"""What the tests of whole runs share."""

import hashlib

import pytest
from run_helpers import place_of_session

from nag_jax.data import pipeline


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Where this session's runs share their corpus and compiled programs."""
    return place_of_session(tmp_path_factory)


@pytest.fixture
def rows_seen(monkeypatch):
    """Position in training -> digest of the row that a run in this process trained on there."""
    seen = {}

    class Recording(pipeline.TrainingStream):
        def __init__(self, rows, seed, start_row, *args):
            super().__init__(rows, seed, start_row, *args)
            self.position = start_row

        def __next__(self):
            batch = super().__next__()
            for row in batch["tokens"]:
                seen[self.position] = hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest()
                self.position += 1
            return batch

    monkeypatch.setattr(pipeline, "TrainingStream", Recording)
    return seen
