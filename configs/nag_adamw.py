"""A norm-agnostic model with AdamW on all parameters and MLPs, on bytes: no tokenizer to train.

Arguments: `schedule=constant` or another kind of `optimizer.schedule`; `smoke` (seconds).
"""

from ml_collections import ConfigDict

from nag_jax.config import parse_arg, smoke


def get_config(arg: str = "") -> ConfigDict:
    """Returns what differs from the defaults."""
    args = parse_arg(arg, schedule="warmup_stable_decay")
    config = ConfigDict(
        {
            "data": {"tokenizer": {"kind": "bytes"}},
            "model": {"feedforward": {"kind": "mlp"}},
            "optimizer": {
                "kind": "adamw",
                "learning_rate": 1e-3,
                "schedule": {"kind": args.schedule},
            },
        }
    )
    return smoke(config) if args.smoke else config
