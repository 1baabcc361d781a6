"""Gates: how strongly a sub-layer writes, read from the stream before the branch runs."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from nag_jax.models.linear import Numerics, contract
from nag_jax.parameters import declare

# The power g^beta has an infinite gradient at g = 0; the gate sum is held above this (P1's gates in
# public reimplementations turned to NaN without it).
GATE_FLOOR = 1e-6


@dataclasses.dataclass(frozen=True)
class Gate:
    """What a gate says of each token.

    Attributes:
        m: Modulator in [0, 1], [B, T], at least float32.
        floored: 1 where the gate sum sits on its floor, [B, T], same dtype.
        keep: Which tokens the branch executes, [B, T] bool, or None for all.
        total: What m is a power of, [B, T], and None where that is m itself.
        beta: That power, a scalar; None for 1.
    """

    m: Float[Array, "B T"]
    floored: Float[Array, "B T"]
    keep: Bool[Array, "B T"] | None = None
    total: Float[Array, "B T"] | None = None
    beta: Float[Array, ""] | float | None = None


class NormModulator(nnx.Module):
    """The norm modulator m = (sum_i softmax(p)_i sigmoid(R.w_i + b_i))^beta, equation (13) of P1.

    Weights start at standard deviation scale/sqrt(d), so that pre-activations of a direction of
    norm sqrt(d) have standard deviation `scale`; p and b start at 0 (m near 1/2), beta at
    `beta_init` through a softplus. P1 gives C and that beta is positive; the other values are
    public code's.
    """

    def __init__(
        self,
        d_model: int,
        directions: int,
        weight_scale: float,
        beta_init: float,
        beta_trainable: bool,
        numerics: Numerics,
        rngs: nnx.Rngs,
    ):
        weight = jax.random.normal(rngs.params(), (d_model, directions)) * (
            weight_scale / math.sqrt(d_model)
        )
        self.weight = declare(weight, ("embed", "directions"), "gate")
        self.bias = declare(jnp.zeros(directions), ("directions",), "gate")
        self.mixture_logits = declare(jnp.zeros(directions), ("directions",), "gate")
        self.beta_init = beta_init
        self.beta_trainable = beta_trainable
        if beta_trainable:
            raw = jnp.asarray(math.log(math.expm1(beta_init)), jnp.float32)
            self.beta_raw = declare(raw, (), "gate")
        self.numerics = numerics

    def __call__(self, direction: Float[Array, "B T d"]) -> Gate:
        """Reads the gate of every token, in at least float32."""
        dtype = self.numerics.statistics_dtype
        z = contract("gate/directions", direction, self.weight, self.numerics, dtype=dtype)
        mixture = jax.nn.softmax(self.mixture_logits[...].astype(dtype))
        total = jax.nn.sigmoid(z + self.bias[...].astype(dtype)) @ mixture
        clamped = jnp.maximum(total, GATE_FLOOR)
        beta = self.beta_init
        if self.beta_trainable:
            beta = jax.nn.softplus(self.beta_raw[...].astype(dtype))
        floored = (total <= GATE_FLOOR).astype(dtype)
        return Gate(m=clamped**beta, floored=floored, total=clamped, beta=beta)


class RouterGate(nnx.Module):
    """The gate of a mixture of depths on a pre-norm stream, g = sigmoid(x.w + b), (40) of P1.

    P1 has the formula, not where w and b start: w at standard deviation 1/sqrt(d) and b at 0, as
    one direction of the norm modulator, are our inference. x is the norm that the branch reads.
    """

    def __init__(self, d_model: int, numerics: Numerics, rngs: nnx.Rngs):
        weight = jax.random.normal(rngs.params(), (d_model,)) / math.sqrt(d_model)
        self.weight = declare(weight, ("embed",), "gate")
        self.bias = declare(jnp.zeros(()), (), "gate")
        self.numerics = numerics

    def __call__(self, x: Float[Array, "B T d"]) -> Gate:
        """Reads the gate of every token, in at least float32."""
        dtype = self.numerics.statistics_dtype
        z = contract("gate/router", x, self.weight, self.numerics, dtype=dtype)
        total = jax.nn.sigmoid(z + self.bias[...].astype(dtype))
        return Gate(m=jnp.maximum(total, GATE_FLOOR), floored=(total <= GATE_FLOOR).astype(dtype))
