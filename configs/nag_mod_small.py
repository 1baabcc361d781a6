"""A model of which tokens skip sub-layers: `nag_small.py` with NAG-MoD, or its gated baseline.

Arguments: `rate`, the share of tokens that skip a sub-layer; `sublayers` that they may skip (both,
attention or feedforward); `connection` (nag, or gated_prenorm, pre-norm with a router's gate);
`smoke` (seconds).
"""

from ml_collections import ConfigDict

from nag_jax.config import parse_arg, smoke
from nag_jax.config_files import one_of

# The connections with a gate, and the rates that suit their embeddings.
CONNECTIONS = {
    "nag": (
        {"encode_gain_init": 5.0, "alpha_warmup_steps": 30},
        {"embedding": 15.0, "scale": 10.0},
    ),
    "gated_prenorm": ({}, {"embedding": 8.0}),
}


def get_config(arg: str = "") -> ConfigDict:
    """Returns what differs from the defaults."""
    args = parse_arg(arg, rate=0.2, sublayers="both", connection="nag")
    connection, rates = CONNECTIONS[one_of("connection", args.connection, CONNECTIONS)]
    config = ConfigDict(
        {
            "data": {"tokenizer": {"kind": "bpe"}},
            "model": {
                "connection": {"kind": args.connection, **connection},
                "skipping": {"kind": "threshold", "rate": args.rate, "sublayers": args.sublayers},
            },
            "optimizer": {"learning_rate": 5e-3, "rate_multiplier": rates},
        }
    )
    return smoke(config) if args.smoke else config
