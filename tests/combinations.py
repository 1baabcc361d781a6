"""Combinations of parts that hold every two values of every two factors, and what each must do.

Each row of the table is a tiny model. It must train by the project's own step, learn a batch by
heart, keep the contracts of `nag_jax.contracts` and come back from a checkpoint as it was.
"""

import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict
from small_models import packed_batch, small_config

from nag_jax import contracts
from nag_jax.config import from_json, to_json
from nag_jax.models.transformer import build_model
from nag_jax.optim import build_optimizer
from nag_jax.training.checkpoints import CheckpointReader, Checkpoints
from nag_jax.training.start import ITEMS
from nag_jax.training.state import TrainState, initial_state
from nag_jax.training.step import train_step

LENGTH = 24
# A batch counts as learnt by heart when its loss is below this part of what it was at the start.
# Who knows only the previous token, and that perfectly, does not get there.
LEARNT = 0.25

# Isolation of documents is for each attention in the tests of models.
CONTRACTS = ("causality", "cached decode equals full forward")

SIZES = {
    "data.row_length": LENGTH,
    "model.d_model": 32,
    "model.vocab_multiple": 16,
    "model.loss_chunk": LENGTH,
    "model.attention.num_heads": 4,
    "model.attention.num_kv_heads": 2,
    "model.attention.head_dim": 8,
    "model.attention.query_chunk": LENGTH,
    "model.feedforward.hidden": 80,
    "optimizer.learning_rate": 0.01,
    "optimizer.rate_multiplier.embedding": 5.0,
    "optimizer.schedule.warmup_steps": 3,
    "train.steps": 100,
}

# What each value sets besides its own leaf. Residual-free models need lower rates and more steps;
# the narrow values of mqa and gqa slow them most.
FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "connection": {
        "nag": {"model.connection.encode_gain_init": 5.0},
        "prenorm": {},
        "residual_free": {"optimizer.learning_rate": 0.005, "train.steps": 240},
        "gated_prenorm": {},
    },
    "attention": {
        "mha": {"model.attention.num_kv_heads": 4},
        "gqa": {},
        "gqa_qk_norm": {"model.attention.qk_norm": True},
        "mqa": {"model.attention.num_kv_heads": 1},
        # Latents of half the stream's width.
        "ccgqa": {"model.attention.kind": "ccgqa", "model.attention.head_dim": 4},
        "ccgqa_3_4": {
            "model.attention.kind": "ccgqa",
            "model.attention.head_dim": 4,
            "model.attention.num_kv_heads": 1,
            "model.attention.depthwise_kernel": 3,
            "model.attention.grouped_kernel": 4,
        },
    },
    "feedforward": {
        "mlp": {},
        "swiglu": {},
        # Two experts a token, since residual-free models refuse one alone.
        "moe": {
            "model.feedforward.hidden": 40,
            "model.feedforward.num_experts": (4,),
            "model.feedforward.top_k": (2,),
        },
        "moe_zaya": {
            "model.feedforward.hidden": 40,
            "model.feedforward.num_experts": (4,),
            "model.feedforward.shared_hidden": 40,
            "model.feedforward.router_width": 16,
        },
    },
    "initialisation": {
        "fan_in": {},
        "gaussian": {},
        "xavier": {},
        "kaiming": {},
        # Enough for a few blocks; with the default of 8 the one-head bottleneck of a residual-free
        # mqa learns the batch only in part.
        "orthogonal": {"model.initialisation.alpha_qk": 2.0},
    },
    "loop": {
        "none": {"model.num_blocks": 3},
        "twice": {"model.num_blocks": 3, "model.loops": 2},
        "core": {  # block, two blocks three times, block
            "model.num_blocks": 4,
            "model.loops": 3,
            "model.prelude_blocks": 1,
            "model.coda_blocks": 1,
        },
    },
    "dtype": {"float32": {}, "bfloat16": {}},
    "remat": {
        "none": {},
        "nothing_saveable": {},
        "dots_saveable": {},
        "dots_with_no_batch_dims_saveable": {},
    },
    "skipping": {"none": {}, "threshold": {}},
}

# Values of two factors that a config refuses together: nothing can be skipped without a gate.
REFUSED = {("prenorm", "threshold"), ("residual_free", "threshold")}

# Where the value itself is a leaf of the config.
LEAVES = {
    "connection": "model.connection.kind",
    "feedforward": "model.feedforward.kind",
    "initialisation": "model.initialisation.kind",
    "dtype": "model.compute_dtype",
    "remat": "model.remat",
    "skipping": "model.skipping.kind",
}


class Combination(NamedTuple):
    """A value of each factor."""

    connection: str
    attention: str
    feedforward: str
    initialisation: str
    loop: str
    dtype: str
    remat: str
    skipping: str

    def __str__(self) -> str:
        return "-".join(self)

    def config(self) -> ConfigDict:
        """The complete config."""
        found = dict(SIZES)
        for factor, value in self._asdict().items():
            if factor in LEAVES:
                found[LEAVES[factor]] = value
            found |= FACTORS[factor][value]
        return small_config(found)


TABLE = """
nag           ccgqa       mlp      kaiming core float32 dots_with_no_batch_dims_saveable none
nag           ccgqa_3_4   mlp      orthogonal none bfloat16 none none
nag           gqa         swiglu   gaussian none bfloat16 nothing_saveable threshold
nag           gqa_qk_norm moe_zaya kaiming twice float32 nothing_saveable none
nag           mha         moe      gaussian none float32 none none
nag           mha         moe_zaya xavier none bfloat16 nothing_saveable none
nag           mqa         moe      fan_in none float32 nothing_saveable none
nag           mqa         swiglu   kaiming twice bfloat16 dots_saveable none
prenorm       ccgqa       swiglu   gaussian twice float32 dots_saveable none
prenorm       ccgqa_3_4   mlp      xavier twice float32 dots_with_no_batch_dims_saveable none
prenorm       ccgqa_3_4   moe_zaya gaussian core float32 nothing_saveable none
prenorm       gqa         moe      orthogonal core float32 dots_with_no_batch_dims_saveable none
prenorm       gqa_qk_norm moe      fan_in none bfloat16 none none
prenorm       gqa_qk_norm swiglu   orthogonal none float32 dots_with_no_batch_dims_saveable none
prenorm       mha         swiglu   kaiming none float32 nothing_saveable none
prenorm       mqa         moe_zaya orthogonal none float32 dots_saveable none
residual_free ccgqa       swiglu   orthogonal none bfloat16 nothing_saveable none
residual_free ccgqa_3_4   swiglu   fan_in none float32 none none
residual_free gqa         moe_zaya kaiming none float32 none none
residual_free gqa_qk_norm swiglu   xavier core float32 dots_saveable none
residual_free mha         moe      orthogonal twice float32 dots_saveable none
residual_free mqa         mlp      gaussian none float32 dots_with_no_batch_dims_saveable none
gated_prenorm ccgqa       moe      xavier none float32 none none
gated_prenorm ccgqa       moe_zaya fan_in none float32 dots_with_no_batch_dims_saveable threshold
gated_prenorm ccgqa_3_4   moe      kaiming none float32 dots_saveable threshold
gated_prenorm gqa         mlp      fan_in twice float32 dots_saveable none
gated_prenorm gqa         mlp      xavier none float32 nothing_saveable none
gated_prenorm gqa         swiglu   fan_in none bfloat16 dots_saveable none
gated_prenorm gqa_qk_norm mlp      gaussian none float32 none threshold
gated_prenorm mha         mlp      fan_in core bfloat16 dots_with_no_batch_dims_saveable none
gated_prenorm mha         swiglu   orthogonal twice float32 none threshold
gated_prenorm mqa         mlp      xavier core float32 none threshold
"""
COMBINATIONS = [Combination(*line.split()) for line in TABLE.strip().splitlines()]


class Trained(NamedTuple):
    """A model after all steps, on one batch.

    Attributes:
        config: Its config.
        case: The model with its initial parameters, for the contracts.
        state: The state at the end.
        metrics: Those of the step, by step.
    """

    config: ConfigDict
    case: contracts.Case
    state: TrainState
    metrics: dict[str, Any]


def batch() -> dict[str, np.ndarray]:
    """Documents of eight kinds of tokens, so that the previous one does not tell the next."""
    documents = [[LENGTH + 1], [10, 14], [1, 24], [12, 8]]
    return packed_batch(documents, LENGTH, vocab_size=8)


def check(combination: Combination, folder: pathlib.Path) -> None:
    """Everything that a combination must do; `folder` is for its checkpoint."""
    trained = train(combination)
    check_learning(combination, trained)
    for name in CONTRACTS:
        result = contracts.check(name, trained.case)
        assert result.holds, f"{name}: {result.text}"
    check_checkpoint(trained, folder)


def train(combination: Combination) -> Trained:
    """Makes the model and trains it, as one program."""
    config = combination.config()
    model = build_model(config, contracts.VOCABULARY)
    optimizer, schedule = build_optimizer(config.optimizer, config.train.steps, model.infos)
    step = train_step(
        model,
        optimizer,
        schedule,
        steps=config.train.steps,
        accumulation=1,
        taps=config.train.taps,
        skip_not_finite=False,
    )

    @jax.jit
    def run(batch):
        start = initial_state(model, optimizer, config.seed)
        end, metrics = jax.lax.scan(
            lambda state, _: step(state, batch), start, length=config.train.steps
        )
        return contracts.without_zeros(model, start.params), end, metrics

    params, end, metrics = run(batch())
    return Trained(config, contracts.Case(model, params, LENGTH), end, jax.device_get(metrics))


def check_learning(combination: Combination, trained: Trained) -> None:
    """All steps, so the first two, are finite with their taps, and the batch is learnt by heart."""
    for metric in jax.tree.leaves(trained.metrics):
        assert np.isfinite(metric).all()
    assert trained.metrics["finite"].all()
    losses = trained.metrics["loss"]
    assert losses[-1] < LEARNT * losses[0], losses


def check_checkpoint(trained: Trained, folder: pathlib.Path) -> None:
    """Config and state come back bit by bit, into a model made from the saved config alone."""
    saved = {item: getattr(trained.state, item) for item in ITEMS}
    checkpoints = Checkpoints(folder, keep_last=1)
    checkpoints.save(trained.config.train.steps, saved, {"config.json": to_json(trained.config)})
    checkpoints.close()

    reader = CheckpointReader(folder)
    config = from_json(reader.read_documents(reader.newest())["config.json"].decode())
    model = build_model(config, contracts.VOCABULARY)
    optimizer, _ = build_optimizer(config.optimizer, config.train.steps, model.infos)
    shapes = jax.eval_shape(lambda: initial_state(model, optimizer, config.seed))
    _, restored = reader.restore(None, {item: getattr(shapes, item) for item in ITEMS})
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    for old, new in zip(jax.tree.leaves(saved), jax.tree.leaves(restored), strict=True):
        assert old.dtype == new.dtype
        np.testing.assert_array_equal(old, new)
