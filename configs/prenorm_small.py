"""The pre-norm twin of `nag_small.py`: the same data, branches, optimizer and steps.

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
            "model": {"connection": {"kind": "prenorm"}},
        }
    )
    return smoke(config) if args.smoke else config
