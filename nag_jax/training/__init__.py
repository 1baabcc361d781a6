"""The training step and loop, and what a run writes: checkpoints, metrics and the progress line."""
