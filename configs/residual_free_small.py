"""A residual-free model as P2 (arXiv 2605.25880) describes it and docs/residual_free.md reads it.

Twelve blocks; deeper ones need a lower rate: 0.003 was right for 24 where 0.01 was for 12. The
other initialisations are the controls.

Arguments: `initialisation=gaussian` or another kind of `model.initialisation`; `smoke` (seconds).
"""

from ml_collections import ConfigDict

from nag_jax.config import parse_arg, smoke


def get_config(arg: str = "") -> ConfigDict:
    """Returns what differs from the defaults."""
    args = parse_arg(arg, initialisation="orthogonal")
    config = ConfigDict(
        {
            "data": {"tokenizer": {"kind": "bytes"}},
            "model": {
                "d_model": 128,
                "num_blocks": 12,
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
            "optimizer": {"learning_rate": 0.01},
        }
    )
    return smoke(config) if args.smoke else config
