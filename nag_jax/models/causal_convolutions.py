"""The pair of causal convolutions that CCGQA applies to its latent queries and keys, as parameters.

What they compute is `pallas_kernels.ccgqa_mixing.reference.convolve`; here it continues in decoding
from the tokens that were last. Nothing here knows of attention.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nag_jax.models.linear import Numerics
from nag_jax.parameters import declare
from nag_jax.sharding import rules
from pallas_kernels.ccgqa_mixing import Convolutions
from pallas_kernels.ccgqa_mixing.reference import convolve


class HeadConvolutions(nnx.Module):
    """A depthwise causal convolution, then a grouped one with a group for each head; both biased.

    Weights and biases start as PyTorch's Conv1d does, uniform up to 1/sqrt(inputs * kernel).

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

    def weights(self, first: int, last: int) -> Convolutions:
        """Those of the heads from `first` to before `last`, in their stored dtype.

        Whole, and so are their gradients: some of all heads begin at other places on a mesh than
        the heads of queries, and these weights are small.
        """

        def some(param: nnx.Param, axis: int) -> Array:
            whole = rules.constrain(param[...], *(None,) * param.ndim)
            heads = jax.lax.slice_in_dim(whole, first, last, axis=axis)
            return rules.constrain(heads, *(None,) * param.ndim)

        return Convolutions(
            some(self.depthwise, 1),
            some(self.depthwise_bias, 0),
            some(self.grouped, 1),
            some(self.grouped_bias, 0),
        )

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
        window_heads = window.reshape(*window.shape[:2], *z.shape[2:])
        y = convolve(window_heads.astype(self.numerics.dtype), self.weights(0, z.shape[2]), None)
        return y[:, -1:], window[:, 1:]
