"""Thresholds of skipping for a trained model, found on calibration text; its weights stay.

This is how P1 (arXiv 2606.16112) trades accuracy for compute after training; the procedure is our
inference. Thresholds are frozen from then on: nothing that is evaluated or decoded moves them.
What a model scores with them is reported by `skipping_table.py`.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from nag_jax import config as config_lib
from nag_jax.data.pipeline import first_rows
from nag_jax.dotted import flatten
from nag_jax.errors import UserError
from nag_jax.evals.bits_per_byte import placed_batches
from nag_jax.models.blocks import Balance
from nag_jax.models.skipping import POOLED, quantiles
from nag_jax.models.stages import SUBLAYERS
from nag_jax.models.transformer import LanguageModel, skipping_part, with_thresholds

# Realised rates this near to the target need no other pass.
TOLERANCE = 0.005
MAX_PASSES = 4

# Splits of a run's own corpus on which thresholds can be calibrated.
SPLITS = ("train", "validation")

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([kM]?)")


def parse_split(calibration: str) -> tuple[str, int] | None:
    """Reads `train:1M` or `validation:200k`: the split and how many of its tokens.

    Returns:
        None where it names no split, and so files.

    Raises:
        UserError: A split without a number of tokens.
    """
    name, colon, amount = calibration.partition(":")
    if name not in SPLITS or not colon:
        return None
    match = _AMOUNT.fullmatch(amount)
    tokens = int(float(match[1]) * {"": 1, "k": 1_000, "M": 1_000_000}[match[2]]) if match else 0
    if tokens < 1:
        raise UserError(
            f"calibration {calibration}: after {name}: comes how many tokens to use, such as "
            f"{name}:200k or {name}:1M"
        )
    return name, tokens


def require_rate(rate: float) -> None:
    """Refuses a target rate that is no share below 1.

    Raises:
        UserError: It is not.
    """
    if not 0 <= rate < 1:
        raise UserError(f"a rate of skipping is {rate:g}; it must be at least 0 and below 1")


def own_sublayers(config: ConfigDict) -> str:
    """Which sub-layers a run's tokens may skip; both where it was trained without skipping."""
    return config.model.skipping.get("sublayers", "both")


def skipping_config(config: ConfigDict, rate: float, sublayers: str) -> ConfigDict:
    """The config of the same weights that skip at another rate, or at a rate of 0 of none.

    Other options of skipping are those of the run, and the defaults for one that had none.

    Args:
        config: The run's complete config.
        rate: Target share of tokens that skip a sub-layer.
        sublayers: As `model.skipping.sublayers`.

    Raises:
        UserError: Its connection has no gate to skip by, or an argument is not allowed.
    """
    require_rate(rate)
    node = "model.skipping"
    leaves = {
        key: value
        for key, value in flatten(config.to_dict()).items()
        if not key.startswith(f"{node}.")
    }
    own = config.model.skipping
    options = {"kind": "none"}
    if rate > 0:
        before = own.to_dict() if own.kind == "threshold" else {}
        options = before | {"kind": "threshold", "rate": float(rate), "sublayers": sublayers}
    config = config_lib.resolve(leaves | {f"{node}.{key}": x for key, x in options.items()})
    if rate > 0:
        config_lib.validate(config)
    return config


def require_gate(model: LanguageModel, params: dict[str, Any], kind: str) -> None:
    """Refuses a connection of a user's own that has no gate.

    Raises:
        UserError: The model without skipping measures none.
    """
    row = {
        "tokens": jax.ShapeDtypeStruct((1, 2), jnp.int32),
        "segment_ids": jax.ShapeDtypeStruct((1, 2), jnp.int32),
        "valid": jax.ShapeDtypeStruct((1, 2), bool),
    }
    step = jax.ShapeDtypeStruct((), jnp.int32)
    measured = jax.eval_shape(
        lambda *args: model.evaluate_batch(*args[:3], True, args[3])["taps"],
        params,
        row,
        step,
        model.balance_shapes,
    )
    if "gate" not in measured:
        raise UserError(f"model.connection.kind={kind} has no gate by which tokens could skip")


@dataclasses.dataclass(frozen=True)
class CalibrationRows:
    """Text to calibrate thresholds on.

    Attributes:
        name: What to call it, such as "train:1M".
        rows: Its rows, as `evaluation_batches` reads them.
    """

    name: str
    rows: Any


class SomeRows:
    """Some rows of a store, in an order of their own.

    Attributes:
        row_length: T.
    """

    def __init__(self, rows: Any, indices: Sequence[int]):
        self._rows, self._indices = rows, indices
        self.row_length = rows.row_length

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = self._rows[self._indices[index]]
        return {"documents": np.full_like(row["tokens"], -1)} | row


def rows_of_split(prepared: Any, split: str, tokens: int, seed: int) -> SomeRows:
    """The first rows of a split that hold this many targets, or all if they hold fewer.

    Args:
        prepared: The run's prepared corpus.
        split: One of `SPLITS`; training rows come in the order in which the run read them first, so
            that few of them are of all the corpus.
        tokens: How many targets.
        seed: The run's seed, which decides that order.

    Raises:
        UserError: The split is empty.
    """
    rows = getattr(prepared, split)
    count = -(-tokens // rows.row_length)
    if not len(rows):
        raise UserError(f"the run's corpus has no {split} rows to calibrate on")
    if split == "train":
        return SomeRows(rows, first_rows(len(rows), seed, count))
    return SomeRows(rows, range(min(count, len(rows))))


def by_sublayer(model: LanguageModel, values: Sequence[float]) -> dict[str, list[float]]:
    """Values of sub-layers in order of execution, by kind of sub-layer."""
    return {
        name: [float(x) for own, x in zip(model.sublayer_names, values, strict=True) if own == name]
        for name in SUBLAYERS
    }


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """Thresholds, and how they were found.

    Attributes:
        balance: The model's balance with them.
        passes: Passes over the calibration text.
        tokens: Targets in it.
        skipped: Share of these that skipped each sub-layer, by kind, in order of execution.
    """

    balance: Balance
    passes: int
    tokens: int
    skipped: dict[str, list[float]]


def calibrate(
    model: LanguageModel,
    params: dict[str, Any],
    balance: Balance,
    rows: Any,
    rate: float,
    *,
    step: int,
    mesh: Mesh,
    batch_size: int,
) -> Calibrated:
    """Finds thresholds at which this share of tokens skips: quantiles of the gates on some text.

    Tokens that skip an early sub-layer change the gates of all later ones, so one pass does not do:
    each pass reads the gates under the thresholds of the one before, until the rates that were
    realised are within `TOLERANCE` of the target (in each layer where it has a threshold of its
    own, in the mean where layers share one), or `MAX_PASSES` are made; the thresholds that came
    nearest, in the mean, are returned. Equal scores are not divided, so that a rate may not be
    reached where a sub-layer sees the token and nothing else: a first attention layer, and for
    tokens that skip it the feed-forward layer after it.

    Args:
        model: A model that skips, at whatever rate.
        params: Its parameters.
        balance: Its balance, with thresholds to begin with; 0 skips nothing.
        rows: Calibration text, as `evaluation_batches` reads it.
        rate: Target share, above 0.
        step: Optimizer steps behind the parameters.
        mesh: Where the parameters live.
        batch_size: Rows per forward pass; no result depends on it.
    """
    whole = NamedSharding(mesh, P())
    found = []
    for number in range(1, MAX_PASSES + 1):
        counts, skipped, tokens = _pass(model, params, balance, rows, step, mesh, batch_size)
        if number > 1:  # the first pass has thresholds of another rate
            distances = _distances(model, skipped, rate)
            found.append((np.mean(distances), Calibrated(balance, number, tokens, skipped)))
            if max(distances) <= TOLERANCE or number == MAX_PASSES:
                break
        thresholds = quantiles(jax.tree.map(jnp.asarray, counts), jnp.float32(rate))
        balance = with_thresholds(balance, jax.device_put(thresholds, whole))
    nearest = min(found, key=lambda pair: pair[0])[1]
    return dataclasses.replace(nearest, passes=number)


def _distances(model: LanguageModel, skipped: dict[str, list[float]], rate: float) -> list[float]:
    """How far the realised rate of each threshold is from the target."""
    each = [
        [np.mean(skipped[name])] if name in POOLED else skipped[name]
        for name in model.skipping.sublayers
    ]
    return [abs(float(x) - rate) for rates in each for x in rates]


def _pass(model, params, balance, rows, step, mesh, batch_size):
    """Histograms of the scores (float64), shares that skipped, by sub-layer, and targets."""
    measure = _measurer(model, mesh)
    counts, skipped, tokens = None, 0.0, 0
    for batch, placed in placed_batches(rows, batch_size, mesh):
        with jax.set_mesh(mesh):
            measured = measure(params, balance, placed, jnp.asarray(step, jnp.int32))
        own, own_skipped = jax.tree.map(lambda x: x.astype(np.float64), jax.device_get(measured))
        counts = own if counts is None else jax.tree.map(np.add, counts, own)
        skipped = skipped + own_skipped
        tokens += int(batch["valid"][:, 1:].sum())
    return counts, by_sublayer(model, skipped / max(tokens, 1)), tokens


@functools.lru_cache(maxsize=8)
def _measurer(model: LanguageModel, mesh: Mesh) -> Callable:
    def measure(params, balance, batch, step):
        out = model.evaluate_batch(params, batch, step, True, balance)
        return skipping_part(out["statistics"]), out["taps"]["skipped"]

    return jax.jit(measure, out_shardings=NamedSharding(mesh, P()))
