"""Initial values of weights."""

import math

import jax
import jax.numpy as jnp


def fan_in_normal(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    """Normal values of standard deviation 1/sqrt(fan_in), float32."""
    return jax.random.normal(key, shape, jnp.float32) / math.sqrt(fan_in)
