"""The two models of `make demo`: one config, two connections.

Arguments: `connection` (nag or prenorm), `smoke` (seconds).
"""

from ml_collections import ConfigDict

from nag_jax.config import parse_arg, smoke


def get_config(arg: str = "") -> ConfigDict:
    """Returns what differs from the defaults."""
    args = parse_arg(arg, connection="nag")
    config = ConfigDict(
        {
            "data": {
                "tokenizer": {"kind": "bpe", "vocab_size": 2048},
                "row_length": 256,
                "validation_share": 0.05,
            },
            "model": {
                "d_model": 192,
                "num_blocks": 4,
                "connection": {"kind": args.connection},
                "attention": {"num_heads": 3, "num_kv_heads": 1},
                "feedforward": {"hidden": 512},
            },
            "optimizer": {"learning_rate": 5e-3},
            "train": {"steps": 250, "batch_size": 16, "log_every": 5},
            "evaluation": {"every": 50},
        }
    )
    if args.connection == "nag":
        config.model.connection.encode_gain_init = 5.0
        config.model.connection.alpha_warmup_steps = 20
        config.optimizer.rate_multiplier = {"scale": 10.0}
    return smoke(config) if args.smoke else config
