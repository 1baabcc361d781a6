"""Norms of the last axis, with statistics in at least float32."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nag_jax.parameters import declare

# Keeps norms of all-zero rows (padding of the vocabulary) differentiable.
NORM_FLOOR = 1e-20


def root_mean_square(x: Float[Array, "*axes d"], floor: float = NORM_FLOOR) -> Array:
    """RMS over the last axis, kept as an axis of length 1, in at least float32."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + floor)


class RMSNorm(nnx.Module):
    """x / rms(x) times a learned gain, statistics in at least float32."""

    def __init__(self, width: int, axis: str, epsilon: float, gain: float = 1.0):
        self.scale = declare(jnp.full(width, gain, jnp.float32), (axis,), "scale")
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*axes d"]) -> Float[Array, "*axes d"]:
        """Normalises the last axis; keeps the dtype."""
        rms = root_mean_square(x, self.epsilon)
        return (x.astype(rms.dtype) / rms * self.scale[...].astype(rms.dtype)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean(x)) / std(x) times a learned gain, plus a learned shift."""

    def __init__(self, width: int, axis: str, epsilon: float):
        self.scale = declare(jnp.ones(width, jnp.float32), (axis,), "scale")
        # Of the gain's role, so that one rate serves all that a norm learns.
        self.shift = declare(jnp.zeros(width, jnp.float32), (axis,), "scale")
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*axes d"]) -> Float[Array, "*axes d"]:
        """Normalises the last axis; keeps the dtype."""
        centred = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = centred - jnp.mean(centred, axis=-1, keepdims=True)
        unit = centred / root_mean_square(centred, self.epsilon)
        gain, shift = (p[...].astype(unit.dtype) for p in (self.scale, self.shift))
        return (unit * gain + shift).astype(x.dtype)


# By the name that a config has for them.
NORMS = {"rms": RMSNorm, "layer": LayerNorm}
