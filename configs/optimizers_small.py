"""One small model for each connection, trained by any optimizer of matrices.

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
# Learning rate of matrices by optimizer, for a model of 6 blocks; it falls with depth.
RATES = {
    "adamw": 3e-3,
    "muon": 5e-3,
    "soap": 3e-3,
    "shampoo": 3e-3,
    "kl_shampoo": 3e-3,
    "sign": 3e-4,
    "spectral": 3e-3,
}


def get_config(arg: str = "") -> ConfigDict:
    """Returns what differs from the defaults."""
    args = parse_arg(arg, optimizer="soap", connection="residual_free")
    blocks, options, embedding = CONNECTIONS[one_of("connection", args.connection, CONNECTIONS)]
    rate = RATES[one_of("optimizer", args.optimizer, RATES)]
    residual_free = args.connection == "residual_free"
    if residual_free:
        rate *= 0.08
    config = ConfigDict(
        {
            "data": {"tokenizer": {"kind": "bytes"}},
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
            },
            "train": {"steps": 250, "batch_size": 8},
            "evaluation": {"every": 50, "batch_size": 8},
        }
    )
    if residual_free:
        # Attention flattens with depth: tau_l = 1.05^-l.
        config.model.attention.temperature_base = 1.05
    return smoke(config) if args.smoke else config
