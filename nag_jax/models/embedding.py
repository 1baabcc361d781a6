"""The token table, padded to a multiple that hardware likes."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nag_jax.models.linear import Numerics, gathered
from nag_jax.parameters import declare
from nag_jax.sharding import rules


class TokenTable(nnx.Module):
    """Rows of token embeddings.

    Rows past `vocab_size` are zero and no token or logit uses them, so that padding changes neither
    loss nor samples, and true rows start the same whatever the padding.
    """

    def __init__(
        self,
        vocab_size: int,
        padded_size: int,
        d_model: int,
        std: float,
        centred: bool,
        numerics: Numerics,
        rngs: nnx.Rngs,
    ):
        rows = jax.random.normal(rngs.params(), (vocab_size, d_model)) * std
        if centred:
            rows = rows - jnp.mean(rows, axis=-1, keepdims=True)
        rows = jnp.pad(rows, ((0, padded_size - vocab_size), (0, 0)))
        self.rows = declare(rows, ("vocabulary", "embed"), "embedding", centred=centred)
        self.numerics = numerics

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T d"]:
        """Looks tokens up, in the stored precision."""
        return rules.constrain(
            jnp.take(gathered(self.rows, self.rows.dtype), tokens, axis=0), "batch", None, None
        )
