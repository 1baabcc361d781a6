"""A residual-free model as P2 (arXiv 2605.25880) describes it and docs/residual_free.md reads it.

The matrices' rate falls with depth, the embedding's does not. The other initialisations are the
controls.

Arguments: `depth=48` blocks (24 by default); `initialisation=gaussian` or another kind of
`model.initialisation`; `smoke` (seconds).
"""

from ml_collections import ConfigDict

from nag_jax.config import parse_arg, smoke


def get_config(arg: str = "") -> ConfigDict:
    """Returns what differs from the defaults."""
    args = parse_arg(arg, initialisation="orthogonal", depth=24)
    rate = 0.0096 / max(args.depth, 1)
    config = ConfigDict(
        {
            "data": {"tokenizer": {"kind": "bytes"}},
            "model": {
                "d_model": 128,
                "num_blocks": args.depth,
                "connection": {"kind": "residual_free"},
                "attention": {
                    "num_heads": 4,
                    "num_kv_heads": 4,
                    "head_dim": 32,
                    # Attention flattens with depth: tau_l = 1.05^-l.
                    "temperature_base": 1.05,
                },
                "feedforward": {"kind": "mlp", "hidden": 512},
                "initialisation": {"kind": args.initialisation},
            },
            "optimizer": {
                "learning_rate": rate,
                "rate_multiplier": {"embedding": 0.005 / rate},
            },
            "train": {"steps": 250, "batch_size": 8},
            "evaluation": {"every": 50, "batch_size": 8},
        }
    )
    return smoke(config) if args.smoke else config
