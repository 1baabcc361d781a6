"""Gradient of the norm-agnostic residual update, written out by hand; our derivation.

Automatic differentiation of `reference.update_formula` keeps and rereads intermediate arrays, and
consists in part of what compilers for GPU kernels do not know. By hand all that a token needs are
sums over its features, in three rounds, and one last pass that writes. XLA for CPU makes a loop of
each, with one temporary array where differentiation left three; kernels do it in fast memory.

With sums over the d features of a token, forward,

    f = branch - mean(branch)       share = <f, r> / <r, r>     p = f - share r
    i = rsqrt(<p, p> + floors)      floors = RELATIVE^2 <f, f> + ABSOLUTE
    k = a i sqrt(d)                 w = r + k p                 y = w / rms(w)
    q = i^2 <p, p>                  growth = a^2 q              log_gain = log1p(growth) / 2

and backward, from the cotangents c of y and s of log_gain,

    e  = s / (1 + growth)           the cotangent of log1p's argument, doubled
    dw = (c - w <w, c> / <w, w>) / rms(w)
    b  = k <dw, p>                  what the written update's length earns
    da = <dw, p> i sqrt(d) + e a q
    dp = k dw + i^2 (e a^2 (1 - q) - b) p,      where 1 - q = i^2 floors
    t  = <dp, r> / <r, r>
    df = dp - t r - RELATIVE^2 i^2 (b + e a^2 q) f
    dr = dw - share dp - t (p - share r)
    d_branch = df - mean(df)

Every inner product of a gradient follows from those of r, f, p and c alone.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.nag_update.reference import ABSOLUTE_FLOOR, RELATIVE_FLOOR, features_of

Sums = Callable[..., list[Array]]


def separate_sums(*arrays: Array) -> list[Array]:
    """Sums over the last axis, which stays with length 1."""
    return [jnp.sum(x, axis=-1, keepdims=True) for x in arrays]


@jax.custom_jvp
def joint_sums(*arrays: Array) -> list[Array]:
    """`separate_sums` as one reduction, which compilers cannot take apart into several loops."""
    zeros = [jnp.zeros((), x.dtype) for x in arrays]
    added = jax.lax.reduce(
        list(arrays),
        zeros,
        lambda x, y: [p + q for p, q in zip(x, y, strict=True)],
        (arrays[0].ndim - 1,),
    )
    return [x[..., None] for x in added]


@joint_sums.defjvp
def _joint_sums_jvp(primals, tangents):  # JAX differentiates reductions of one array alone
    return joint_sums(*primals), separate_sums(*tangents)


def update_gradient(
    direction: Float[Array, "*tokens d"],
    branch: Float[Array, "*tokens d"],
    gain: Float[Array, "*tokens"],
    d_updated: Float[Array, "*tokens d"],
    d_log_gain: Float[Array, "*tokens"],
    *,
    sums: Sums = separate_sums,
    width: int | None = None,
) -> tuple[Float[Array, "*tokens d"], Float[Array, "*tokens d"], Float[Array, "*tokens"]]:
    """Vector-Jacobian product of `reference.update_formula`, for every token.

    Args:
        direction: As `reference.update_formula` takes it.
        branch: Likewise.
        gain: Likewise.
        d_updated: Cotangent of the new direction.
        d_log_gain: Cotangent of the growth of the log-norm.
        sums: How sums over features are taken: `separate_sums` or `joint_sums`.
        width: Features, as `reference.update_formula` takes it.

    Returns:
        Gradients of direction, branch and gain in their dtypes.
    """
    statistics = jnp.promote_types(direction.dtype, jnp.float32)
    r, f, c = (x.astype(statistics) for x in (direction, branch, d_updated))
    a, s = (x.astype(statistics)[..., None] for x in (gain, d_log_gain))
    dr, df, da = gradient_from_sums(r, f, a, c, s, sums, width or r.shape[-1])
    return dr.astype(direction.dtype), df.astype(branch.dtype), da[..., 0].astype(gain.dtype)


def gradient_from_sums(
    r: Array, f: Array, a: Array, c: Array, s: Array, sums: Sums, width: int
) -> tuple[Array, Array, Array]:
    """The gradients of direction, branch and gain; names are those of the module's equations.

    Args:
        r: Direction, entries of one token or of many, in the dtype of statistics.
        f: Branch.
        a: Gain, in the form of the sums.
        c: Cotangent of the new direction.
        s: Cotangent of the growth of the log-norm, in the form of the sums.
        sums: Sums of arrays over the features, in a form that goes together with the arrays.
        width: Features, where the last axis is longer and filled up with zeros.
    """
    f = features_of(f - sums(f)[0] / width, width)
    # A direction's mean is 0 but for rounding; its sum makes that rounding right, too.
    f_r, r_sq, r_sum, c_sum, c_r = sums(f * r, r * r, r, c, c * r)
    share = f_r / r_sq
    p = f - share * r
    p_sq, p_r, f_sq, c_p = sums(p * p, p * r, f * f, c * p)

    floors = RELATIVE_FLOOR**2 * f_sq + ABSOLUTE_FLOOR
    i = jax.lax.rsqrt(p_sq + floors)
    k = a * (i * width**0.5)
    p_sum = -share * r_sum
    w_r = r_sq + k * p_r
    w_p = p_r + k * p_sq
    w_sq = w_r + k * w_p
    over_rms = jax.lax.rsqrt(w_sq / width)
    c_w = (c_r + k * c_p) / w_sq

    q = p_sq * i * i
    e = s / (1 + a * a * q)
    dw_p = (c_p - c_w * w_p) * over_rms
    da = dw_p * (i * width**0.5) + e * a * q
    e = e * a * a
    b = k * dw_p
    # Multiplied by i once here and once below: with i^2 a huge gain would be beyond float32.
    along_p = i * (e * (i * i * floors) - b)
    along_f = -(RELATIVE_FLOOR**2) * i * (b + e * q)

    dw = (c - c_w * (r + k * p)) * over_rms
    dp = k * dw + along_p * (i * p)
    dp_r = k * (c_r - c_w * w_r) * over_rms + along_p * (i * p_r)
    dp_sum = k * (c_sum - c_w * (r_sum + k * p_sum)) * over_rms + along_p * (i * p_sum)
    t = dp_r / r_sq
    dr = dw - share * dp - t * (p - share * r)
    df = dp - t * r + along_f * (i * f) - (dp_sum - t * r_sum) / width
    return dr, df, da
