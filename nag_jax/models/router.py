"""Routers: how likely each expert is for each token.

A router gives logits; which experts are chosen and how they are balanced is in `moe.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nag_jax.models.initializers import fan_in_normal
from nag_jax.models.linear import Numerics, contract
from nag_jax.models.norms import RMSNorm
from nag_jax.parameters import declare


class RouterOut(NamedTuple):
    """What a router says of each token.

    Attributes:
        logits: [B, T, E], at least float32.
        memo: What the next block's router reads; None where it reads nothing.
    """

    logits: Float[Array, "B T E"]
    memo: dict[str, Array] | None = None


class LinearRouter(nnx.Module):
    """Logits x W, in at least float32: P1's "linear classifier"."""

    def __init__(self, d_model: int, num_experts: int, numerics: Numerics, rngs: nnx.Rngs):
        values = fan_in_normal(rngs.params(), (d_model, num_experts), d_model)
        self.weight = declare(values, ("embed", "choices"), "router")
        self.numerics = numerics

    def __call__(self, x: Float[Array, "B T d"], memo: dict[str, Array]) -> RouterOut:
        """Reads the token alone."""
        del memo
        dtype = self.numerics.statistics_dtype
        return RouterOut(contract("router", x, self.weight, self.numerics, dtype=dtype))


class ZayaRouter(nnx.Module):
    """The router of Zyphra's public ZAYA1 code, an MLP with averaging over depth.

    With s the state of the previous block's router, zero in the first block,

        r = x W_down + b_down + scale * s,      logits = W_3 gelu(W_2 gelu(W_1 n(r) + b_1) + b_2)

    n the RMS norm with gains, * elementwise, and r the state handed on. All in at least float32.
    """

    def __init__(
        self, d_model: int, num_experts: int, width: int, numerics: Numerics, rngs: nnx.Rngs
    ):
        def weight(inputs: int, outputs: int, axes: tuple[str, str]) -> nnx.Param:
            return declare(fan_in_normal(rngs.params(), (inputs, outputs), inputs), axes, "router")

        def bias() -> nnx.Param:
            return declare(jnp.zeros(width), ("router_width",), "router")

        inner = ("router_width", "router_width")
        self.down = weight(d_model, width, ("embed", "router_width"))
        self.down_bias = bias()
        self.depth_scale = declare(jnp.ones(width), ("router_width",), "scale")
        self.norm = RMSNorm(width, "router_width", 1e-6)
        self.first, self.first_bias = weight(width, width, inner), bias()
        self.second, self.second_bias = weight(width, width, inner), bias()
        self.last = weight(width, num_experts, ("router_width", "choices"))
        self.numerics = numerics

    def __call__(self, x: Float[Array, "B T d"], memo: dict[str, Array]) -> RouterOut:
        """Reads the token and what the router of the block before made of it."""
        dtype = self.numerics.statistics_dtype

        def product(y: Array, w: nnx.Param) -> Array:
            return contract("router", y, w, self.numerics, dtype=dtype)

        state = product(x, self.down) + self.down_bias[...].astype(dtype)
        state = state + self.depth_scale[...].astype(dtype) * memo["state"]
        y = self.norm(state)
        for w, bias in ((self.first, self.first_bias), (self.second, self.second_bias)):
            y = jax.nn.gelu(product(y, w) + bias[...].astype(dtype), approximate=False)
        return RouterOut(product(y, self.last), {"state": state})
