"""Cross-entropy over a vocabulary without holding every logit at once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def chunked_cross_entropy(
    logits_of: Callable[[Array, Array], Array],
    hidden: Float[Array, "B T d"],
    log_scale: Float[Array, "B T"],
    targets: Int[Array, "B T"],
    vocab_size: int,
    chunk: int,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Negative log-likelihood of each target, and whether it was the most likely token.

    Time steps are taken `chunk` at a time and each chunk's logits are recomputed in the backward
    pass, so that [B, T, V] never exists.

    Args:
        logits_of: (hidden, log_scale) of some time steps -> logits over the padded vocabulary.
        hidden: Final hidden states.
        log_scale: Log of each position's inverse temperature.
        targets: Target tokens, below `vocab_size`.
        vocab_size: True vocabulary; logits from there on are padding and get no probability.
        chunk: Time steps per chunk; 0 or at least T for one chunk.

    Returns:
        (nats, correct), both [B, T] in at least float32.
    """
    length = hidden.shape[1]
    chunk = length if chunk == 0 else min(chunk, length)
    padding = -length % chunk
    pieces = []
    for x in (hidden, log_scale, targets):
        x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
        pieces.append(jnp.moveaxis(x, 1, 0))

    @jax.checkpoint
    def one(xs):
        hidden, log_scale, targets = xs
        logits = logits_of(hidden, log_scale)
        # Reductions alone: where the vocabulary is split over devices, no logit leaves its own.
        tokens = jnp.arange(logits.shape[-1])
        logits = jnp.where(tokens < vocab_size, logits, -jnp.inf)
        chosen = jnp.sum(jnp.where(tokens == targets[..., None], logits, 0), axis=-1)
        nats = jax.nn.logsumexp(logits, axis=-1) - chosen
        peak = jnp.max(logits, axis=-1, keepdims=True)
        first = jnp.min(jnp.where(logits == peak, tokens, logits.shape[-1]), axis=-1)
        correct = jax.lax.stop_gradient(first == targets)
        return nats, correct.astype(nats.dtype)

    if len(pieces[0]) == 1:
        out = jax.tree.map(lambda x: x[None], one(tuple(x[0] for x in pieces)))
    else:
        _, out = jax.lax.scan(lambda _, xs: (None, one(xs)), None, tuple(pieces))
    return tuple(jnp.moveaxis(x, 0, 1).reshape(hidden.shape[0], -1)[:, :length] for x in out)
