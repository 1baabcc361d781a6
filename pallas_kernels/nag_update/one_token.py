"""The update of one token and its gradient by hand, for compilers that cannot take the definition.

Mosaic GPU wants tokens of one axis with numbers beside them, and knows neither `log1p` nor what
JAX's derivatives of a division and a root are made of. Triton cannot trace JAX at all:
`triton_kernels` says the same in its language, and these are its equations.

With sums over the d features of a token, forward,

    f = branch - mean(branch)       share = <f, r> / <r, r>     p = f - share r
    i = rsqrt(<p, p> + floors)      floors = RELATIVE^2 <f, f> + ABSOLUTE
    k = a i sqrt(d)                 w = r + k p                 y = w / rms(w)
    q = i^2 <p, p>                  growth = a^2 q              log_gain = log1p(growth) / 2

and backward, from the cotangents c of y and s of log_gain,

    e  = s / (1 + growth)           the cotangent of log1p's argument, doubled
    dw = (c - y <y, c> / d) / rms(w)
    b  = k <dw, p>                  what the written update's length earns
    da = <dw, p> i sqrt(d) + e a q
    dp = k dw + i^2 (e a^2 (1 - q) - b) p,      where 1 - q = i^2 floors
    t  = <dp, r> / <r, r>
    df = dp - t r - RELATIVE^2 i^2 (b + e a^2 q) f
    dr = dw - share dp - t (p - share r)
    d_branch = df - mean(df)
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

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
        The new direction in `direction`'s dtype, and `growth`, in `gain`'s dtype; see above.
    """
    r, f = direction.astype(gain.dtype), branch.astype(gain.dtype)
    *_, q, written, over_rms = _recompute(r, f, gain)
    updated = (written * over_rms).astype(direction.dtype)
    return jnp.where(gain == 0, direction, updated), gain * gain * q


def backward_token(
    direction: Float[Array, "d"],
    branch: Float[Array, "d"],
    gain: Float[Array, ""],
    d_updated: Float[Array, "d"],
    d_log_gain: Float[Array, ""],
) -> tuple[Float[Array, "d"], Float[Array, "d"], Float[Array, ""]]:
    """The vector-Jacobian product of `reference.update_formula` for one token.

    Returns:
        Cotangents of direction, branch and gain, all in `gain`'s dtype.
    """
    a, width = gain, direction.shape[-1]
    r, f, c = (x.astype(a.dtype) for x in (direction, branch, d_updated))
    f, share, p, floors, inverse, k, q, written, over_rms = _recompute(r, f, a)
    inverse_sq = inverse * inverse
    updated = written * over_rms
    d_written = (c - updated * (jnp.sum(updated * c) / width)) * over_rms
    along = jnp.sum(d_written * p)
    earned = k * along
    e = d_log_gain / (1 + a * a * q)
    d_gain = along * (inverse * width**0.5) + e * a * q
    e = e * a * a
    d_p = k * d_written + (inverse_sq * (e * (inverse_sq * floors) - earned)) * p
    t = jnp.sum(d_p * r) / jnp.sum(r * r)
    d_f = d_p - t * r - (RELATIVE_FLOOR**2 * inverse_sq * (earned + e * q)) * f
    d_direction = d_written - share * d_p - t * (p - share * r)
    return d_direction, d_f - jnp.sum(d_f) / width, d_gain


def _recompute(r, f, a):
    width = r.shape[-1]
    f = f - jnp.sum(f) / width
    share = jnp.sum(f * r) / jnp.sum(r * r)
    p = f - share * r
    length_sq = jnp.sum(p * p)
    floors = RELATIVE_FLOOR**2 * jnp.sum(f * f) + ABSOLUTE_FLOOR
    inverse = jax.lax.rsqrt(length_sq + floors)
    k = a * (inverse * width**0.5)
    written = r + k * p
    over_rms = jax.lax.rsqrt(jnp.sum(written * written) / width)
    return f, share, p, floors, inverse, k, length_sq * inverse * inverse, written, over_rms
