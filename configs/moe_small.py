"""P1's own combination at small size: norm-agnostic, CCGQA, mixture of experts, Muon.

Arguments: `feedforward` (moe, or moe_zaya for the router of Zyphra's ZAYA1), `smoke` (seconds).
"""

from ml_collections import ConfigDict

from nag_jax.config import parse_arg, smoke


def get_config(arg: str = "") -> ConfigDict:
    """Returns what differs from the defaults."""
    args = parse_arg(arg, feedforward="moe")
    config = ConfigDict(
        {
            "data": {"tokenizer": {"kind": "bpe"}},
            "model": {
                "connection": {"kind": "nag", "encode_gain_init": 5.0, "alpha_warmup_steps": 30},
                "attention": {"kind": "ccgqa"},
                "feedforward": {"kind": args.feedforward, "hidden": 688},
            },
            "optimizer": {
                "learning_rate": 5e-3,
                # Scales are also the key temperatures, which need no higher rate.
                "rate_multiplier": {"embedding": 15.0, "scale": 1.0},
            },
        }
    )
    return smoke(config) if args.smoke else config
