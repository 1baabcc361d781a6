"""The two models of `make demo`: P1's combination and its pre-norm twin.

Arguments: `connection` (nag or prenorm), `smoke` (seconds).
"""

from ml_collections import ConfigDict

from nag_jax.config import parse_arg, smoke


def get_config(arg: str = "") -> ConfigDict:
    """Returns what differs from the defaults."""
    args = parse_arg(arg, connection="nag")
    nag = args.connection == "nag"
    config = ConfigDict(
        {
            "data": {
                "tokenizer": {"kind": "bpe", "vocab_size": 2048},
                "row_length": 256,
                "validation_share": 0.05,
                "validation_bytes": 150_000,
            },
            "model": {
                "d_model": 128,
                "num_blocks": 4,
                "connection": {"kind": args.connection},
                "attention": {
                    "kind": "ccgqa",
                    "num_heads": 4,
                    "num_kv_heads": 2,
                    "head_dim": 16,
                },
                "feedforward": {"kind": "moe", "hidden": 384, "num_experts": (8,), "top_k": (1,)},
            },
            "optimizer": {
                "learning_rate": 5e-3,
                # Chosen for each model between 8 and 15, on the demo's own validation documents:
                # rows of unit size (NAG) and of size 0.02 need other rates. The demo says so.
                "rate_multiplier": {"embedding": 15.0 if nag else 8.0},
            },
            "train": {"steps": 110, "batch_size": 16, "log_every": 5},
            "evaluation": {"every": 55},
        }
    )
    if nag:
        # A run this short has no time to learn a confident scale from 1, nor for a long warm-up.
        config.model.connection.encode_gain_init = 5.0
        config.model.connection.alpha_warmup_steps = 20
        config.optimizer.rate_multiplier.scale = 10.0
    return smoke(config) if args.smoke else config
