"""Mixture of depths: which tokens skip a sub-layer, by thresholds on its gate.

A token is executed where its score is at least the threshold, which is stored from earlier steps:
so the decision is causal, and the same in training, evaluation and decoding. After every step of
training thresholds move towards the score below which the target share of tokens lay. P1 (arXiv
2606.16112) states one threshold for each feed-forward layer and one for all attention layers
together; how they are found, and the schedule of the target, are our inference.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from ml_collections import ConfigDict

from nag_jax.errors import UserError
from nag_jax.kinds import REGISTRY, is_registered, kind_class
from nag_jax.models.context import Context
from nag_jax.models.gates import GATE_FLOOR, Gate
from nag_jax.models.stages import SUBLAYERS

# Histograms are over the logit of the score: at the start gates differ by a few hundredths, and a
# trained one has most tokens near 0 or 1. Scores beyond are counted at the ends.
BINS = 1024
LOGIT_LIMIT = 16.0

# Sub-layers whose layers share one threshold (P1).
POOLED = ("attention",)

# By sub-layer, in the order of nested dicts by stage, block and sub-layer.
Thresholds = dict[str, dict[str, dict[str, Array]]]


class NoSkipping:
    """Every token is executed by every sub-layer."""

    sublayers: tuple[str, ...] = ()
    only_executed_keys = False

    @staticmethod
    def defaults() -> dict[str, Any]:
        """No keys."""
        return {}

    def __init__(self, options: ConfigDict):
        del options


class ThresholdSkipping:
    """Tokens whose gate is below a stored threshold pass a sub-layer unchanged.

    With score z of a token (its gate m, or by `score="rotation"` the sine of the angle by which the
    write would turn the stream), threshold t of the layer, and target share r:

        keep = z >= t,        m <- m keep        (no gradient through keep)
        t <- (1 - threshold_rate) t + threshold_rate q,    q the r-quantile of z in the step's batch

    r is 0 for the first `ramp_start` of the run's steps, where t is 0, rises linearly to `rate` at
    `ramp_end`, and the first step with r above 0 takes t = q. With `hard=False` the gate is
    continuous at the threshold: m = ((g - e)/(1 - e))^beta with g^beta the gate, e^beta = t.
    With `keys_values="executed"` later tokens do not attend to those that skip.
    """

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Keys of `model.skipping` for this kind."""
        return {
            "rate": 0.2,
            "sublayers": "both",
            "ramp_start": 0.05,
            "ramp_end": 0.15,
            "threshold_rate": 0.05,
            "score": "gate",
            "hard": True,
            "keys_values": "all",
        }

    @staticmethod
    def validate(config: ConfigDict) -> None:
        """Refuses connections without a gate, and options that do not go together.

        Raises:
            UserError: Names the keys and what is allowed.
        """
        options, kind = config.model.skipping, config.model.connection.kind
        node = "model.connection"
        connection = kind_class(node, kind)
        if is_registered(node, kind) and not getattr(connection, "gated", False):
            gated = [name for name in REGISTRY[node] if _is_gated(name)]
            raise UserError(
                f"model.skipping.kind=threshold skips by a gate, which {node}.kind={kind} does not "
                f"have; allowed with it: {', '.join(gated)}"
            )
        if options.score == "rotation" and not hasattr(connection, "rotation"):
            raise UserError(
                f"model.skipping.score=rotation needs a norm-agnostic stream, but {node}.kind is "
                f"{kind}; allowed with it: gate"
            )
        if options.score == "rotation" and not options.hard:
            raise UserError("model.skipping.hard=False needs model.skipping.score=gate")
        if options.ramp_end < options.ramp_start:
            raise UserError(
                f"model.skipping.ramp_end={options.ramp_end} must be at least "
                f"model.skipping.ramp_start={options.ramp_start}"
            )

    def __init__(self, options: ConfigDict):
        self.options = options

    @property
    def sublayers(self) -> tuple[str, ...]:
        """Sub-layers that tokens may skip; none at a rate of 0."""
        if self.options.rate == 0:
            return ()
        return SUBLAYERS if self.options.sublayers == "both" else (self.options.sublayers,)

    @property
    def only_executed_keys(self) -> bool:
        """Whether tokens that skip attention are no keys for later ones."""
        return self.options.keys_values == "executed"

    def score(self, connection: Any, gate: Gate, context: Context) -> Float[Array, "B T"]:
        """The tokens' scores, in (0, 1) and without gradient."""
        rotation = self.options.score == "rotation"
        return jax.lax.stop_gradient(connection.rotation(gate, context) if rotation else gate.m)

    def decide(
        self, gate: Gate, score: Float[Array, "B T"], threshold: Float[Array, ""]
    ) -> tuple[Bool[Array, "B T"], Float[Array, "B T"]]:
        """Which tokens are executed, and the gate: 0 and without gradient for the others."""
        threshold = threshold.astype(score.dtype)
        keep = score >= threshold
        m = gate.m
        if not self.options.hard:
            total, beta = (m, 1.0) if gate.total is None else (gate.total, gate.beta)
            edge = threshold ** (1 / beta)
            # Held above the floor, where a power below 1 has a finite gradient.
            m = jnp.maximum((total - edge) / jnp.maximum(1 - edge, GATE_FLOOR), GATE_FLOOR) ** beta
        return keep, jnp.where(keep, m, 0)

    def target(self, progress: Float[Array, ""]) -> Float[Array, ""]:
        """The share r of tokens to skip after this share of the run's steps."""
        options = self.options
        length = max(options.ramp_end - options.ramp_start, 1e-9)
        return options.rate * jnp.clip((progress - options.ramp_start) / length, 0, 1)

    def update(
        self, thresholds: Thresholds, counts: Thresholds, progress: Float[Array, ""]
    ) -> Thresholds:
        """Thresholds after a step of training.

        Args:
            thresholds: What the step's forward passes read, each [repeats, loops].
            counts: Their histograms, summed over micro-batches, each [repeats, loops, BINS].
            progress: The step's number over the run's steps.
        """
        share = self.target(progress)

        def move(old: Array, found: Array) -> Array:
            rate = jnp.where(old == 0, 1.0, self.options.threshold_rate)
            return jnp.where(share > 0, (1 - rate) * old + rate * found, 0.0)

        return jax.tree.map(move, thresholds, quantiles(counts, share))


def _is_gated(name: str) -> bool:
    return getattr(kind_class("model.connection", name), "gated", False)


def histogram(score: Float[Array, "B T"], counted: Bool[Array, "B T"]) -> Float[Array, " bins"]:
    """How many counted tokens have the logit of their score in each bin; exact up to 2^24.

    By a product of two-digit codes, which every backend does fast: a scatter is slow on TPU.
    """
    logit = jnp.log(score) - jnp.log1p(-score)
    place = (logit + LOGIT_LIMIT) * (BINS / (2 * LOGIT_LIMIT))
    bins = jnp.clip(jnp.nan_to_num(jnp.floor(place)), 0, BINS - 1).astype(jnp.int32)
    base = round(BINS**0.5)
    digits = jnp.arange(base)
    high = (bins[..., None] // base == digits) & counted[..., None]
    low = bins[..., None] % base == digits
    product = jnp.einsum(
        "bti,btj->ij", *(x.astype(jnp.float32) for x in (high, low)), precision="highest"
    )
    return product.reshape(BINS)


def quantile(counts: Float[Array, " bins"], share: Float[Array, ""]) -> Float[Array, ""]:
    """The score below which this share of the counted tokens lies, linear within a bin."""
    total = jnp.cumsum(counts)
    wanted = share * total[-1]
    index = jnp.minimum(jnp.sum(total < wanted), BINS - 1)
    inside = (wanted - (total[index] - counts[index])) / jnp.maximum(counts[index], 1)
    width = 2 * LOGIT_LIMIT / BINS
    return jax.nn.sigmoid(-LOGIT_LIMIT + width * (index + jnp.clip(inside, 0, 1)))


def quantiles(counts: Thresholds, share: Float[Array, ""]) -> Thresholds:
    """The quantile of each layer's histogram, and of pooled ones that of all together."""
    pooled = {}
    for name in POOLED:
        own = [part[name] for stage in counts.values() for part in stage.values() if name in part]
        if own:
            pooled[name] = quantile(sum(x.sum((0, 1)) for x in own), share)

    def of(name: str, x: Array) -> Array:
        if name in pooled:
            return jnp.broadcast_to(pooled[name], x.shape[:2])
        return jax.vmap(jax.vmap(lambda row: quantile(row, share)))(x)

    return {
        stage: {
            block: {name: of(name, x) for name, x in part.items()} for block, part in blocks.items()
        }
        for stage, blocks in counts.items()
    }
