"""What a sub-layer is told besides its input, and what a branch returns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

if TYPE_CHECKING:
    from nag_jax.models.cache import LayerCache


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Where a call of decoding stands.

    Attributes:
        position: Column of the call's first token.
        start: First column of each row's document, [B]; before it is padding.
        prefill: Whether the call holds whole prompts (from column 0 on), not one token a row.
    """

    position: Int[Array, ""]
    start: Int[Array, " B"]
    prefill: bool


@dataclasses.dataclass(frozen=True)
class Context:
    """Facts of the batch that every sub-layer may read.

    Attributes:
        segment_ids: Document of each position within its row, [B, T]; positions of different
            documents never see each other.
        positions: Position within the document, [B, T].
        valid: Positions whose target counts, [B, T]; taps are summed over them.
        gain_warmup: Factor on every NAG gain in (0, 1], a forward input so that evaluation sets it
            to its value at the saved step.
        taps: Whether sub-layers measure themselves.
        packed: Whether a row may hold several documents. If not, a row is one document from its
            first position on, perhaps followed by padding that nobody reads.
        layer: 1-based number of the running block in order of execution, iterations of a loop
            counted.
        sublayer: The same counted in sub-layers.
        first_sublayer: `sublayer` in the first iteration; the same where there is no loop.
        decoding: Where decoding stands; None in training and evaluation.
        cache: What the sub-layer keeps between tokens, in decoding only.
        balance: The sub-layer's state that is neither parameter nor optimizer, such as a router's
            bias; read here and updated between steps.
        memo: What the sub-layer of the same name in the block before left, zeros in the first.
        threshold: Score below which a token skips the sub-layer; None where none may.
        only_executed_keys: Whether tokens that skip attention are no keys for later ones.
    """

    segment_ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    gain_warmup: Float[Array, ""]
    taps: bool
    packed: bool = True
    layer: Int[Array, ""] | int = 1
    sublayer: Int[Array, ""] | int = 1
    first_sublayer: Int[Array, ""] | int = 1
    decoding: Decoding | None = None
    cache: LayerCache | None = None
    balance: dict[str, Array] = dataclasses.field(default_factory=dict)
    memo: dict[str, Array] = dataclasses.field(default_factory=dict)
    threshold: Float[Array, ""] | None = None
    only_executed_keys: bool = False


@dataclasses.dataclass(frozen=True)
class BranchOut:
    """Output of a branch, which knows nothing of the stream.

    Attributes:
        y: The branch's output, [B, T, d].
        weight: A router's weight of each token, [B, T], which the connection alone places; None
            where there is no router.
        cache: The sub-layer's cache after these tokens, in decoding.
        memo: For the sub-layer of the same name in the next block; None passes on what came.
        auxiliary_loss: A term of the training loss, in nats, summed over valid tokens.
        statistics: Sums over valid tokens that the update of `Context.balance` wants.
    """

    y: Float[Array, "B T d"]
    weight: Float[Array, "B T"] | None = None
    cache: LayerCache | None = None
    memo: dict[str, Array] | None = None
    auxiliary_loss: Float[Array, ""] | None = None
    statistics: dict[str, Array] = dataclasses.field(default_factory=dict)


def positions_in_document(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Position of each token counted from the start of its own document."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None, :]
    previous = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    starts = jnp.where(segment_ids != previous, index, 0)
    return index - jax.lax.cummax(starts, axis=1)
