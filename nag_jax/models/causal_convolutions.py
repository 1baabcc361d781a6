"""Causal convolutions over time that stay inside a document, and the shift they are made of.

`HeadConvolutions` is the pair that CCGQA applies to its latent queries and keys: a depthwise
convolution, then one that mixes the features of each head. Nothing here knows of attention.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nag_jax.models.linear import PRECISION, Numerics, contract_by_head
from nag_jax.parameters import declare
from nag_jax.sharding import rules


def earlier(
    x: Float[Array, "*axes B T w"], steps: int, positions: Int[Array, "B T"] | None
) -> Float[Array, "*axes B T w"]:
    """What stood `steps` tokens earlier in the same document, zeros where nothing did.

    Args:
        x: Features by token.
        steps: How far back to look; may be beyond T.
        positions: Position of each token in its document; None where every row is one document
            that starts at its first column.
    """
    if steps == 0:
        return x
    length = x.shape[-2]
    padding = [(0, 0)] * (x.ndim - 2) + [(min(steps, length), 0), (0, 0)]
    shifted = jnp.pad(x[..., : max(length - steps, 0), :], padding)
    if positions is None:
        return shifted
    return jnp.where((positions >= steps)[..., None], shifted, 0)


class HeadConvolutions(nnx.Module):
    """A depthwise causal convolution, then a grouped one with a group for each head; both biased.

    With zeros before a document's start, `lag` counting tokens back and * elementwise,

        c_t = depthwise_bias + sum_lag depthwise[lag] * z_(t-lag)
        y_t = grouped_bias + sum_lag c_(t-lag) @ grouped[lag],

    and c before the start is `depthwise_bias`, not zero: this is one padding with
    (depthwise_kernel - 1) + (grouped_kernel - 1) zeros in front of both. Weights and biases start
    as PyTorch's Conv1d does, uniform up to 1/sqrt(inputs * kernel).

    Attributes:
        num_columns: Inputs before the newest that an output depends on.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        depthwise_kernel: int,
        grouped_kernel: int,
        numerics: Numerics,
        rngs: nnx.Rngs,
    ):
        self.num_columns = depthwise_kernel + grouped_kernel - 2
        self.numerics = numerics

        def uniform(shape: tuple[int, ...], inputs: int) -> Array:
            bound = 1 / math.sqrt(inputs)
            return jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)

        heads, axes = (num_heads, head_dim), ("heads", "head_dim")
        inputs = depthwise_kernel
        self.depthwise = declare(
            uniform((depthwise_kernel, *heads), inputs), ("lags", *axes), "conv"
        )
        self.depthwise_bias = declare(uniform(heads, inputs), axes, "bias")
        inputs = head_dim * grouped_kernel
        self.grouped = declare(
            uniform((grouped_kernel, *heads, head_dim), inputs), ("lags", *axes, "head_dim"), "conv"
        )
        self.grouped_bias = declare(uniform(heads, inputs), axes, "bias")

    def __call__(
        self, z: Float[Array, "B T N h"], positions: Int[Array, "B T"] | None, first: int = 0
    ) -> Float[Array, "B T N h"]:
        """Convolves every document of every row.

        Args:
            z: Heads, all or some of them.
            positions: As in `earlier`.
            first: Which head the first one of `z` is.
        """
        dtype, last = self.numerics.dtype, first + z.shape[2]

        # Whole, and so are their gradients: some of all heads begin at other places on a mesh than
        # the heads of queries, and these weights are small.
        def weight(param: nnx.Param, axis: int) -> Array:
            whole = rules.constrain(param[...], *(None,) * param.ndim)
            some = jax.lax.slice_in_dim(whole, first, last, axis=axis)
            return rules.constrain(some, *(None,) * param.ndim)

        depthwise, grouped = weight(self.depthwise, 1), weight(self.grouped, 1)
        # Heads lead, because XLA's CPU backend is slow at products with a batch axis elsewhere.
        z = jnp.transpose(z.astype(dtype), (2, 0, 1, 3))
        weights = depthwise.astype(dtype)[:, :, None, None]
        c = sum(w * earlier(z, lag, positions) for lag, w in enumerate(weights))
        lags = [earlier(c, lag, positions) for lag in range(len(grouped))]
        y = contract_by_head(
            "attention/convolution",
            jnp.concatenate(lags, axis=-1),
            jnp.concatenate(list(grouped), axis=1),
            self.numerics,
        )
        # The first bias reaches every output, at a document's start too, so it is a constant.
        bias = weight(self.grouped_bias, 0) + jnp.einsum(
            "nh,lnhg->ng", weight(self.depthwise_bias, 0), grouped, precision=PRECISION
        )
        return jnp.transpose(y, (1, 2, 0, 3)) + bias.astype(dtype)

    def last_columns(
        self, z: Float[Array, "B T N h"], positions: Int[Array, "B T"] | None
    ) -> Float[Array, "B c Nh"]:
        """The inputs that outputs after `z` will need, oldest first, for rows ending together.

        Columns before the start of the document that holds a row's last token are zeros.
        """
        batch, length = z.shape[:2]
        flat = z.reshape(batch, length, -1)
        padded = jnp.pad(flat, ((0, 0), (self.num_columns, 0), (0, 0)))[:, length:]
        if positions is None:
            return padded
        steps = jnp.arange(self.num_columns)[::-1]
        return jnp.where((positions[:, -1:] >= steps)[..., None], padded, 0)

    def step(
        self, z: Float[Array, "B 1 N h"], columns: Float[Array, "B c Nh"]
    ) -> tuple[Float[Array, "B 1 N h"], Float[Array, "B c Nh"]]:
        """Convolves one token given the columns before it; returns also the columns after it."""
        window = jnp.concatenate([columns.astype(z.dtype), z.reshape(*z.shape[:2], -1)], axis=1)
        y = self(window.reshape(*window.shape[:2], *z.shape[2:]), None)
        return y[:, -1:], window[:, 1:]
