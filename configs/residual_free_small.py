"""A residual-free model on the data, branches and optimizer of `nag_small.py`.

Argument: `smoke` (seconds).
"""

from ml_collections import ConfigDict

from nag_jax.config import parse_arg, smoke


def get_config(arg: str = "") -> ConfigDict:
    """Returns what differs from the defaults."""
    args = parse_arg(arg)
    config = ConfigDict(
        {
            "data": {"tokenizer": {"kind": "bpe"}},
            "model": {"connection": {"kind": "residual_free"}},
        }
    )
    return smoke(config) if args.smoke else config
