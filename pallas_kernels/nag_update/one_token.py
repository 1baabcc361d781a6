"""The update of one token, for compilers that cannot take the definition.

Mosaic GPU wants tokens of one axis with numbers beside them, and knows neither `log1p` nor what
JAX's derivatives of a division and a root are made of. `gradient` has the equations.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.nag_update.gradient import gradient_from_sums
from pallas_kernels.nag_update.reference import ABSOLUTE_FLOOR, RELATIVE_FLOOR


def forward_token(
    direction: Float[Array, "d"], branch: Float[Array, "d"], gain: Float[Array, ""]
) -> tuple[Float[Array, "d"], Float[Array, ""]]:
    """`reference.with_pass_through` of one token, but for the logarithm.

    Args:
        direction: Direction of the stream, norm sqrt(d), zero mean.
        branch: Output of the sub-layer.
        gain: Gain of the token, at least float32.

    Returns:
        The new direction in `direction`'s dtype, and `growth`, in `gain`'s dtype.
    """
    r, f = direction.astype(gain.dtype), branch.astype(gain.dtype)
    width = r.shape[-1]
    f = f - jnp.sum(f) / width
    p = f - (jnp.sum(f * r) / jnp.sum(r * r)) * r
    p_sq = jnp.sum(p * p)
    i = jax.lax.rsqrt(p_sq + RELATIVE_FLOOR**2 * jnp.sum(f * f) + ABSOLUTE_FLOOR)
    written = r + gain * (i * width**0.5) * p
    over_rms = jax.lax.rsqrt(jnp.sum(written * written) / width)
    updated = (written * over_rms).astype(direction.dtype)
    return jnp.where(gain == 0, direction, updated), gain * gain * (p_sq * i * i)


def backward_token(
    direction: Float[Array, "d"],
    branch: Float[Array, "d"],
    gain: Float[Array, ""],
    d_updated: Float[Array, "d"],
    d_log_gain: Float[Array, ""],
) -> tuple[Float[Array, "d"], Float[Array, "d"], Float[Array, ""]]:
    """Gradients of direction, branch and gain of one token, all in `gain`'s dtype."""
    r, f, c = (x.astype(gain.dtype) for x in (direction, branch, d_updated))
    return gradient_from_sums(r, f, gain, c, d_log_gain, _numbers, r.shape[-1])


def _numbers(*arrays: Array) -> list[Array]:
    return [jnp.sum(x) for x in arrays]
