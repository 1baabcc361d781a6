"""A norm-agnostic model on the source text of Python's standard library, in minutes on a laptop.

Argument: `smoke` (seconds). Its pre-norm twin is `prenorm_small.py`.
"""

from ml_collections import ConfigDict

from nag_jax.config import parse_arg, smoke


def get_config(arg: str = "") -> ConfigDict:
    """Returns what differs from the defaults."""
    args = parse_arg(arg)
    config = ConfigDict(
        {
            "data": {"tokenizer": {"kind": "bpe"}},
            "model": {"connection": {"kind": "nag"}},
        }
    )
    return smoke(config) if args.smoke else config
