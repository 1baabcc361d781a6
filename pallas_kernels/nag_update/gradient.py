"""Gradient of the norm-agnostic residual update, written out by hand.

Automatic differentiation of `reference.update_formula` keeps and rereads intermediate arrays; here
all that a token needs are sums over its features, in three rounds, and one last pass that writes.
XLA for CPU makes a loop of each (one temporary array, where differentiation left three); kernels do
it on a block in fast memory.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.nag_update.reference import ABSOLUTE_FLOOR, RELATIVE_FLOOR, features_of


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
    sums: Callable[..., list[Array]] = separate_sums,
    width: int | None = None,
) -> tuple[Float[Array, "*tokens d"], Float[Array, "*tokens d"], Float[Array, "*tokens"]]:
    """Vector-Jacobian product of `reference.update_formula`, for every token; our derivation.

    With f the centred branch, o = f - along r its orthogonal part, i the inverse length and
    s = sqrt(d) a i, the written state is w = r + s o, and the output w / rms(w). Every gradient is
    a combination of r, f, o and the cotangent c, with coefficients from these sums.

    Args:
        direction: As `reference.update_formula` takes it.
        branch: Likewise.
        gain: Likewise.
        d_updated: Cotangent of the new direction.
        d_log_gain: Cotangent of the growth of the log-norm.
        sums: How sums over features are taken: `separate_sums` or `joint_sums`.
        width: As there.

    Returns:
        Gradients of direction, branch and gain in their dtypes.
    """
    statistics = jnp.promote_types(direction.dtype, jnp.float32)
    r, f, c = (x.astype(statistics) for x in (direction, branch, d_updated))
    a, d_log_gain = (x.astype(statistics)[..., None] for x in (gain, d_log_gain))
    width = r.shape[-1] if width is None else width

    f = features_of(f - jnp.sum(f, axis=-1, keepdims=True) / width, width)
    # A direction's mean is 0 but for rounding; its sum makes that rounding right, too.
    f_r, r_sq, r_sum, c_sum, c_r = sums(f * r, r * r, r, c, c * r)
    along = f_r / r_sq
    o = f - along * r
    o_sq, o_r, f_sq, c_o = sums(o * o, o * r, f * f, c * o)

    floors = RELATIVE_FLOOR**2 * f_sq + ABSOLUTE_FLOOR
    i = jax.lax.rsqrt(o_sq + floors)
    s = a * i * width**0.5
    o_sum = -along * r_sum
    w_r = r_sq + s * o_r
    w_o = o_r + s * o_sq
    w_sq = w_r + s * w_o
    rms = jnp.sqrt(w_sq / width)
    c_w = (c_r + s * c_o) / w_sq

    # log_gain = log(1 + a^2 q) / 2 with q = i^2 |o|^2, 1 but for the floors.
    q = o_sq * i * i
    d_square = d_log_gain / (2 * (1 + a * a * q))
    d_s = (c_o - c_w * w_o) / rms
    d_a = i * width**0.5 * d_s + 2 * a * q * d_square
    # i moves with |o|^2 and the floor. Kept relative to i, as i^2 may be beyond float32.
    d_log_i = s * d_s + 2 * a * a * q * d_square
    d_o_scale = i * (2 * a * a * d_square * (floors * i * i) - s * d_s)
    d_f_scale = -(RELATIVE_FLOOR**2) * i * d_log_i

    d_w = (c - c_w * (r + s * o)) / rms
    d_o = s * d_w + d_o_scale * (i * o)
    d_o_r = s * (c_r - c_w * w_r) / rms + d_o_scale * (i * o_r)
    d_o_sum = s * (c_sum - c_w * (r_sum + s * o_sum)) / rms + d_o_scale * (i * o_sum)
    d_along = -d_o_r / r_sq
    d_direction = d_w - along * d_o + d_along * (f - 2 * along * r)
    d_mean = (d_o_sum + d_along * r_sum) / width
    d_branch = d_o + d_f_scale * (i * f) + d_along * r - d_mean
    return (
        d_direction.astype(direction.dtype),
        d_branch.astype(branch.dtype),
        d_a[..., 0].astype(gain.dtype),
    )
