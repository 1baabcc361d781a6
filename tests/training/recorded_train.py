"""The training binary, which also writes what rows it trained on to the file named by $ROWS."""

import json
import os
import pathlib

from run_helpers import RecordingStream

from nag_jax import cli, train
from nag_jax.data import pipeline

if __name__ == "__main__":
    pipeline.TrainingStream = RecordingStream
    try:
        cli.run(train.main)
    finally:
        pathlib.Path(os.environ["ROWS"]).write_text(json.dumps(RecordingStream.seen))
