"""What a sub-layer is told besides its input, and what a branch returns."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


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
    """

    segment_ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    gain_warmup: Float[Array, ""]
    taps: bool


@dataclasses.dataclass(frozen=True)
class BranchOut:
    """Output of a branch, which knows nothing of the stream.

    Attributes:
        y: The branch's output, [B, T, d].
        weight: A router's weight of each token, [B, T], which the connection alone places; None
            where there is no router.
    """

    y: Float[Array, "B T d"]
    weight: Float[Array, "B T"] | None = None


def positions_in_document(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Position of each token counted from the start of its own document."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None, :]
    previous = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    starts = jnp.where(segment_ids != previous, index, 0)
    return index - jax.lax.cummax(starts, axis=1)
