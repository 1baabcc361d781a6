"""Tokenises a config's corpus into the row store, which training otherwise does when it starts.

python -m nag_jax.prepare_data --config=configs/nag_small.py [--config.data.workers=8]

It can be stopped at any time; the same command goes on after the last finished shard.
"""

from __future__ import annotations

from absl import flags
from ml_collections import ConfigDict

from nag_jax import cli
from nag_jax.data import store


def main(config: ConfigDict, flags: flags.FlagValues) -> None:
    """Prepares `config.data` and prints what it holds."""
    del flags
    prepared = store.prepare(config.data)
    for line in prepared.summary_lines():
        print(line)
    print(f"rows        {prepared.folder}")


if __name__ == "__main__":
    cli.run(main)
