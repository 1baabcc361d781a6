"""The models of P2 (arXiv 2605.25880): 24 blocks without skip connections, and their residual twin.

P2's appendix with the configuration was not readable to us. *P2* marks what its text states, *ours*
what we inferred or chose; docs/papers.md and docs/residual_free.md give reasons. GPT-2's ranks must
lie in the working folder as gpt2.tiktoken; docs/papers.md says how to make the file.

Arguments: `connection` (residual_free or prenorm); `optimizer` (muon, soap, shampoo, kl_shampoo or
adamw); `initialisation` (a kind of `model.initialisation`; by itself orthogonal without skips and
gaussian with them); `smoke` (seconds, needs no network and no file):

  --config=configs/papers/residual_free.py:connection=residual_free,optimizer=muon
"""

from ml_collections import ConfigDict

from nag_jax.config import parse_arg, smoke
from nag_jax.config_files import one_of

# Ours: peak rates. Shampoo's updates are as long as AdamW's.
RATES = {"soap": 1e-3, "shampoo": 6e-4, "kl_shampoo": 1e-3, "adamw": 6e-4}

# Ours: initialisation (its kinds are P2's), Muon's peak rate, base of the temperature.
CONNECTIONS = {
    # P2: the temperature tau_l = base^-l.
    "residual_free": ("orthogonal", 4e-4, 1.05),
    "prenorm": ("gaussian", 6e-4, 1.0),
}


def get_config(arg: str = "") -> ConfigDict:
    """Returns what differs from the defaults."""
    args = parse_arg(arg, connection="residual_free", optimizer="muon", initialisation="default")
    initialisation, muon, base = CONNECTIONS[one_of("connection", args.connection, CONNECTIONS)]
    rates = {"muon": muon} | RATES
    if args.initialisation != "default":
        initialisation = args.initialisation
    config = ConfigDict(
        {
            "data": {
                "source": {
                    "kind": "huggingface",
                    "dataset": "HuggingFaceFW/fineweb-edu",  # P2
                    # Ours: which part and which state of it.
                    "subset": "sample-100BT",
                    "revision": "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
                },
                # Ours: GPT-2's BPE of 50,257 ids.
                "tokenizer": {"kind": "tiktoken", "path": "gpt2.tiktoken", "pattern": "gpt2"},
                "row_length": 512,  # P2
                # Ours.
                "validation_share": 0.001,
                "validation_bytes": 20_000_000,
                "workers": 16,
            },
            "model": {
                # Ours: P2 shows blocks 8, 16 and 22; as wide as GPT-2's 24-block model.
                "d_model": 1024,
                "num_blocks": 24,
                "compute_dtype": "bfloat16",  # ours
                "connection": {
                    "kind": args.connection,  # P2
                    # Ours, one of the two norms that P2 names.
                    "norm": "rms",
                    "head": "tied",
                    "embedding_std": 0.02,
                },
                "attention": {
                    "kind": "gqa",
                    # Ours: multi-head attention, which P2's W_V W_O = alpha I needs.
                    "num_heads": 16,
                    "num_kv_heads": 16,
                    "head_dim": 64,
                    "rope_theta": 10_000.0,
                    "temperature_base": base,
                },
                "feedforward": {"kind": "mlp", "hidden": 4096},  # P2: up, down; ours: GELU, 4 d
                "initialisation": {"kind": initialisation},
            },
            "optimizer": {
                "kind": args.optimizer,  # P2
                # Ours.
                "learning_rate": rates[one_of("optimizer", args.optimizer, rates)],
                "schedule": {"kind": "cosine", "warmup_steps": 1000, "final_share": 0.1},
                "adam_b1": 0.9,
                "adam_b2": 0.95,
                "weight_decay": 0.1,
                "clip_norm": 1.0,
                "rate_multiplier": {"embedding": 1.0, "scale": 1.0},
            },
            "train": {
                "steps": 50_000,  # P2
                "batch_size": 512,  # P2
                "accumulation": 8,  # ours: 64 rows at once, over all devices
            },
            # Ours.
            "evaluation": {"every": 500, "batch_size": 64},
            "checkpoint": {"every": 500},
        }
    )
    if args.smoke:
        del config.data.source, config.data.workers  # the default corpus
        config.data.tokenizer = ConfigDict({"kind": "bytes"})
        config.model.compute_dtype = "float32"
        config.train.accumulation = 1
        config = smoke(config)
    return config
