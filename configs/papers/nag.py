"""The models of P1 (arXiv 2606.16112): NAG and its baselines at five ratios of width to depth.

Every model has about 150M parameters in a token's forward pass and 900M in all, embeddings apart.
*P1* marks what the paper states, *ours* what we inferred or chose; docs/papers.md gives reasons.

Arguments: `ratio` (80, 60, 40, 30 or 20); `connection` (nag, prenorm, or gated_prenorm, the
baseline that can skip); `skip`, the target share of tokens that skip a sub-layer (0: no skipping);
`sublayers` that are skipped (both, attention or feedforward); `router` (linear or zaya); `isoflop`
(the run gets as many tokens as the skipped FLOPs buy); `smoke` (small, for a CPU, without network):

  --config=configs/papers/nag.py:ratio=60,skip=0.2,isoflop=true
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from nag_jax.config import parse_arg, smoke
from nag_jax.config_files import one_of


class Size(NamedTuple):
    """One ratio's model.

    P1 gives d_model at ratios 80 and 20, and that experts come in two numbers, interleaved. Ours:
    d_model between the two as ratio^0.30 in multiples of 32, num_blocks = d_model / ratio, one
    expert a token; hidden and the mean number of experts from 150M and 900M; which numbers of
    experts, 8 and 9, and in which order: the shortest pattern whose mean over all blocks is as near
    to docs/papers.md's as any mix of the two comes.
    """

    d_model: int
    num_blocks: int
    hidden: int  # of an expert
    num_experts: tuple[int, ...]  # blocks take them in turn


SIZES = {
    80: Size(1408, 18, 1328, (8, 8, 9, 8, 9)),
    60: Size(1280, 21, 1272, (9, 8, 8, 8)),
    40: Size(1152, 29, 960, (8, 9, 9, 9, 9)),
    30: Size(1056, 35, 864, (8, 9, 9, 9, 9)),
    20: Size(928, 46, 736, (9, 9, 9, 9, 9, 9, 9, 9, 8)),
}
ROUTERS = {"linear": "moe", "zaya": "moe_zaya"}

ROW_LENGTH = 2048  # P1
ROWS = 1536  # P1: batches of about 3M tokens; ours: 3 * 2^20
TOKENS = 50e9  # P1

NAG = {
    "gate_directions": 32,  # P1
    "alpha_exponent": 0.5,  # P1: alpha starts at 1/sqrt(l); ours: l counts sub-layers
    "beta_init": 1.0,  # ours; P1 says beta > 0
    "beta_trainable": True,  # ours
    "encode_gain_init": 1.0,  # ours
    "embedding_std": 1.0,  # ours
    "alpha_warmup_steps": 100,  # ours, against gates that close for good: 0.3G tokens
    "router_weight": "plain",  # ours
}
PRENORM = {
    "head": "tied",  # ours
    "norm": "rms",  # P1
    "embedding_std": 0.02,  # ours
}
CONNECTIONS = {"nag": NAG, "prenorm": PRENORM, "gated_prenorm": PRENORM}


def get_config(arg: str = "") -> ConfigDict:
    """Returns what differs from the defaults."""
    args = parse_arg(
        arg,
        ratio=60,
        connection="nag",
        skip=0.0,
        sublayers="both",
        router="linear",
        isoflop=False,
    )
    size = SIZES[one_of("ratio", args.ratio, SIZES)]
    config = ConfigDict(
        {
            "data": {
                "source": {
                    "kind": "huggingface",
                    "dataset": "Zyphra/Zyda-2",  # P1
                    # Ours: the data set's own sample, in its authors' proportions.
                    "subset": "sample-100BT",
                    "revision": "",  # not known: what the hub's main branch holds at the start
                },
                "tokenizer": {"kind": "bpe", "vocab_size": 32_000},  # size: P1; which one: ours
                "row_length": ROW_LENGTH,
                # Ours.
                "validation_share": 0.001,
                "validation_bytes": 20_000_000,
                "workers": 16,
            },
            "model": {
                "d_model": size.d_model,
                "num_blocks": size.num_blocks,
                "compute_dtype": "bfloat16",  # ours
                "connection": {
                    "kind": one_of("connection", args.connection, CONNECTIONS),
                    **CONNECTIONS[args.connection],
                },
                "attention": {
                    "kind": "ccgqa",  # P1
                    "num_heads": 8,  # P1
                    "num_kv_heads": 2,  # P1
                    "head_dim": size.d_model // 16,  # ours: the ratio that ZAYA1's code has
                    "rope_theta": 10_000.0,  # ours
                    "rope_fraction": 1.0,  # ours
                },
                "feedforward": {
                    "kind": ROUTERS[one_of("router", args.router, ROUTERS)],  # both ours
                    "hidden": size.hidden,
                    "num_experts": size.num_experts,
                    "top_k": (1,),  # ours
                    "balance_rate": 1e-3,  # ours
                },
            },
            "optimizer": {
                "kind": "muon",  # P1
                "learning_rate": 7.5e-4,  # P1
                # P1: to 5e-5; it mentions no warm-up.
                "schedule": {"kind": "cosine", "warmup_steps": 0, "final_share": 1 / 15},
                # Ours.
                "scaling": "moonshot",
                "momentum": 0.95,
                "newton_schulz_dtype": "bfloat16",
                "weight_decay": 0.1,
                "clip_norm": 1.0,
                "rate_multiplier": {"embedding": 1.0, "scale": 1.0},
            },
            "train": {
                "steps": round(TOKENS / (ROWS * ROW_LENGTH)),
                "batch_size": ROWS,
                "accumulation": 24,  # ours: 64 rows at once, over all devices
            },
            # Ours.
            "evaluation": {"every": 500, "batch_size": 64},
            "checkpoint": {"every": 500},
        }
    )
    if args.skip:
        config.model.skipping = ConfigDict(
            {
                "kind": "threshold",
                "rate": args.skip,
                "sublayers": args.sublayers,
                # Ours, like all of the rule that follows the rate: docs/papers.md.
                "ramp_start": 0.05,
                "ramp_end": 0.15,
                "threshold_rate": 0.05,
                "score": "gate",
                "hard": True,
                "keys_values": "all",
            }
        )
    if args.smoke:
        del config.data.source, config.data.workers  # the default corpus
        config.model.compute_dtype = config.optimizer.newton_schulz_dtype = "float32"
        config.model.feedforward.num_experts = (2, 3)
        config.train.accumulation = 1
        config = smoke(config)
    if args.isoflop:
        config.train.steps = round(_tokens_ratio(config, args) * config.train.steps)
    return config


def _tokens_ratio(config, args):
    """How many times the tokens equal FLOPs buy at the target rates, over all of the run's."""
    from nag_jax.analysis.isoflop import skip_costs
    from nag_jax.config import resolve
    from nag_jax.models.stages import SUBLAYERS
    from nag_jax.models.transformer import build_model

    complete = resolve(config)
    vocab_size = complete.data.tokenizer.vocab_size
    costs = skip_costs(build_model(complete, vocab_size).infos, complete, vocab_size)
    skipped = [name for name in SUBLAYERS if args.sublayers in ("both", name)]
    return costs.tokens(1.0, dict.fromkeys(skipped, args.skip))
