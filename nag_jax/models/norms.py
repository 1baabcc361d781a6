"""Root-mean-square norms, with statistics in at least float32."""

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

    def __init__(self, width: int, axis: str, epsilon: float):
        self.scale = declare(jnp.ones(width), (axis,), "scale")
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*axes d"]) -> Float[Array, "*axes d"]:
        """Normalises the last axis; keeps the dtype."""
        rms = root_mean_square(x, self.epsilon)
        return (x.astype(rms.dtype) / rms * self.scale[...].astype(rms.dtype)).astype(x.dtype)
