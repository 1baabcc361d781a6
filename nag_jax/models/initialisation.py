"""How block weights start: the kinds of `model.initialisation`.

A kind makes the weights of an attention and of a feed-forward layer from their sizes, so that every
branch can start in every way. Biases, norms, gates and convolutions start in their own modules.
All kinds work under `jax.vmap` over keys. P2 is arXiv 2605.25880; docs/residual_free.md says what
of the orthogonal kind is the paper's.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from nag_jax.models import initializers


@dataclasses.dataclass(frozen=True)
class AttentionWeights:
    """Start values of an attention's four projections, float32."""

    query: Float[Array, "d H h"]
    key: Float[Array, "d K h"]
    value: Float[Array, "d K h"]
    output: Float[Array, "H h d"]


class FanIn:
    """Normal values of standard deviation 1/sqrt(inputs)."""

    # Where q-k normalisation cancels the scale of query and key, their gain starts at this.
    key_gain = 1.0

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Keys of `model.initialisation` for this kind."""
        return {}

    def __init__(self, options: ConfigDict):
        self.options = options

    def draw(self, key: jax.Array, shape: tuple[int, ...], inputs: int, outputs: int) -> Array:
        """Independent entries of a weight of this shape that maps `inputs` to `outputs`."""
        del outputs
        return initializers.fan_in_normal(key, shape, inputs)

    def attention(
        self, rngs: nnx.Rngs, d_model: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> AttentionWeights:
        """Weights of an attention with `num_heads` query and `num_kv_heads` key-value heads."""

        def to_heads(heads: int) -> Array:
            return self.draw(rngs.params(), (d_model, heads, head_dim), d_model, heads * head_dim)

        return AttentionWeights(
            query=to_heads(num_heads),
            key=to_heads(num_kv_heads),
            value=to_heads(num_kv_heads),
            output=self.draw(
                rngs.params(), (num_heads, head_dim, d_model), num_heads * head_dim, d_model
            ),
        )

    def up(self, rngs: nnx.Rngs, d_model: int, hidden: int) -> Float[Array, "d hidden"]:
        """A feed-forward layer's first weight (its gate's too)."""
        return self.draw(rngs.params(), (d_model, hidden), d_model, hidden)

    def down(self, rngs: nnx.Rngs, hidden: int, d_model: int) -> Float[Array, "hidden d"]:
        """A feed-forward layer's last weight."""
        return self.draw(rngs.params(), (hidden, d_model), hidden, d_model)


class Gaussian(FanIn):
    """Normal values of one standard deviation for all weights."""

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Keys of `model.initialisation` for this kind."""
        return {"std": 0.02}

    def draw(self, key: jax.Array, shape: tuple[int, ...], inputs: int, outputs: int) -> Array:
        """Normal values of standard deviation `std`."""
        del inputs, outputs
        return initializers.gaussian(key, shape, self.options.std)


class Xavier(FanIn):
    """Normal values of variance 2/(inputs + outputs), a projection's heads taken together."""

    def draw(self, key: jax.Array, shape: tuple[int, ...], inputs: int, outputs: int) -> Array:
        """Normal values of variance 2/(inputs + outputs)."""
        return initializers.xavier(key, shape, inputs, outputs)


class Kaiming(FanIn):
    """Normal values of variance 2/inputs."""

    def draw(self, key: jax.Array, shape: tuple[int, ...], inputs: int, outputs: int) -> Array:
        """Normal values of variance 2/inputs."""
        del outputs
        return initializers.kaiming(key, shape, inputs)


class Orthogonal:
    """P2's weights for residual-free layers: V O, Q K^T and the feed-forward near isometries.

    The structure is P2's; its constants and everything about shared key-value heads are ours.
    """

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Keys of `model.initialisation` for this kind: factors on products of two weights."""
        return {"alpha_qk": 8.0, "alpha_vo": 1.0, "alpha_up": 1.0, "alpha_down": 1.0}

    def __init__(self, options: ConfigDict):
        self.options = options

    @property
    def key_gain(self) -> float:
        """alpha_qk: on the key's gain it gives a token the same logit on itself as in weights."""
        return self.options.alpha_qk

    def attention(
        self, rngs: nnx.Rngs, d_model: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> AttentionWeights:
        """Weights of an attention with G = num_heads/num_kv_heads query heads per key-value head.

        Query and key: sqrt(alpha_qk) times one semi-orthogonal [d, h] matrix per key-value head,
        which the query heads of its group share; heads are independent.

        Value: sqrt(alpha_vo) times one semi-orthogonal [d, K h] matrix over all heads; output: the
        query heads of a group have (I + N_i) V_j^T/G, N_i normal and of sum 0 over the group. They
        attend alike at first, so that together they are V_j^T; with outputs alike too they would
        have one gradient, and stay one head for good. Where every token attends to itself alone the
        branch is alpha_vo times the orthogonal projector on the value columns, of rank
        min(K h, d): a rotation-free isometry if K h >= d, else a partial isometry.
        """
        group = num_heads // num_kv_heads

        def to_head(key: jax.Array) -> Array:
            return initializers.semi_orthogonal(key, d_model, head_dim)

        head_keys = jax.random.split(rngs.params(), num_kv_heads)
        key = math.sqrt(self.options.alpha_qk) * jax.vmap(to_head, out_axes=1)(head_keys)
        value_key = rngs.params()
        value = math.sqrt(self.options.alpha_vo) * initializers.semi_orthogonal(
            value_key, d_model, num_kv_heads * head_dim
        ).reshape(d_model, num_kv_heads, head_dim)
        shape = (num_kv_heads, group, head_dim, head_dim)
        noise = jax.random.normal(jax.random.fold_in(value_key, 1), shape) / math.sqrt(head_dim)
        shares = (jnp.eye(head_dim) + noise - jnp.mean(noise, axis=1, keepdims=True)) / group
        return AttentionWeights(
            query=jnp.repeat(key, group, axis=1),
            key=key,
            value=value,
            output=jnp.einsum("kgij,dkj->kgid", shares, value, precision="highest").reshape(
                num_heads, head_dim, d_model
            ),
        )

    def up(self, rngs: nnx.Rngs, d_model: int, hidden: int) -> Float[Array, "d hidden"]:
        """sqrt(alpha_up) times SUO weights, for a gate's too."""
        scale = math.sqrt(self.options.alpha_up)
        return scale * initializers.scaled_uniform_orthogonal(rngs.params(), d_model, hidden)

    def down(self, rngs: nnx.Rngs, hidden: int, d_model: int) -> Float[Array, "hidden d"]:
        """sqrt(alpha_down) times SUO weights."""
        scale = math.sqrt(self.options.alpha_down)
        return scale * initializers.scaled_uniform_orthogonal(rngs.params(), hidden, d_model)
