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
            "model": {
                # A short run has no time to learn a confident scale from 1.
                "connection": {"kind": "nag", "encode_gain_init": 5.0, "alpha_warmup_steps": 30},
            },
            "optimizer": {
                "learning_rate": 5e-3,
                "rate_multiplier": {"embedding": 15.0, "scale": 10.0},
            },
        }
    )
    return smoke(config) if args.smoke else config
