"""The pre-norm twin of `nag_small.py`: the same data, branches, matrix rates and steps.

Embeddings have the rate that suits rows of this size; NAG's have another.

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
            "optimizer": {"learning_rate": 5e-3, "rate_multiplier": {"embedding": 8.0}},
        }
    )
    return smoke(config) if args.smoke else config
