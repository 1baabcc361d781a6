"""One small model for each connection, trained by any optimizer of matrices, in a minute or two.

Arguments: `optimizer` (adamw, muon, soap, shampoo, kl_shampoo, sign or spectral); `connection`
(nag, prenorm or residual_free); `smoke` (seconds).
"""

from ml_collections import ConfigDict

from nag_jax.config import parse_arg, smoke
from nag_jax.config_files import one_of

# What differs between the connections: blocks, and the rate of the embedding.
CONNECTIONS = {
    "nag": (6, {"encode_gain_init": 5.0, "alpha_warmup_steps": 30}, 0.045),
    "prenorm": (6, {}, 0.024),
    "residual_free": (24, {}, 0.005),
}
# Learning rate of matrices. Searched for adamw, muon, soap and kl_shampoo, each with six short runs
# (docs/reproducing.md); longer runs want lower ones. The others were not searched.
RATES = {
    "nag": {"adamw": 1e-2, "muon": 3e-2, "soap": 1e-2, "kl_shampoo": 1e-2},
    "prenorm": {"adamw": 1e-3, "muon": 3e-2, "soap": 1e-3, "kl_shampoo": 1e-2},
    "residual_free": {"adamw": 7e-5, "muon": 6e-4, "soap": 2e-4, "kl_shampoo": 2e-3},
}
FROM_ADAMW = {"shampoo": 1.0, "sign": 0.1, "spectral": 1.0}


def get_config(arg: str = "") -> ConfigDict:
    """Returns what differs from the defaults."""
    args = parse_arg(arg, optimizer="soap", connection="residual_free")
    blocks, options, embedding = CONNECTIONS[one_of("connection", args.connection, CONNECTIONS)]
    searched = RATES[args.connection]
    rates = searched | {kind: share * searched["adamw"] for kind, share in FROM_ADAMW.items()}
    rate = rates[one_of("optimizer", args.optimizer, rates)]
    residual_free = args.connection == "residual_free"
    config = ConfigDict(
        {
            "data": {
                "tokenizer": {"kind": "bytes"},
                "row_length": 128,
                "validation_bytes": 60_000,
            },
            "model": {
                "d_model": 128,
                "num_blocks": blocks,
                "connection": {"kind": args.connection, **options},
                "attention": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 32},
                "feedforward": {"kind": "mlp", "hidden": 512},
                "initialisation": {"kind": "orthogonal" if residual_free else "fan_in"},
            },
            "optimizer": {
                "kind": args.optimizer,
                "learning_rate": rate,
                "rate_multiplier": {"embedding": embedding / rate},
                "schedule": {"warmup_steps": 10},
            },
            "train": {"steps": 100, "batch_size": 8},
            "evaluation": {"every": 50, "batch_size": 16},
        }
    )
    if residual_free:
        # Attention flattens with depth: tau_l = 1.05^-l.
        config.model.attention.temperature_base = 1.05
    return smoke(config) if args.smoke else config
