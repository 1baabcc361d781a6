"""Definition of the norm-agnostic residual update in plain JAX.

Equations are those of "Scaling Adaptive Depth with Norm-Agnostic Residual Networks"
(arXiv 2606.16112). What differs from the paper's text where a branch is degenerate, the measured
renormalisation and the pass-through at gain 0 are our inference.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# A branch whose part orthogonal to the direction is this small, relative to the branch, is taken as
# parallel: without it, rounding noise would be blown up to a full unit update.
RELATIVE_FLOOR = 1e-5
# Keeps a zero branch well defined; below any branch that float32 can hold meaningfully.
ABSOLUTE_FLOOR = 1e-20


def update_formula(
    direction: Float[Array, "*tokens d"],
    branch: Float[Array, "*tokens d"],
    gain: Float[Array, "*tokens"],
    width: int | None = None,
) -> tuple[Float[Array, "*tokens d"], Float[Array, "*tokens"]]:
    """Equations (10), (12), (14), (15) and (17) for every token.

    Args:
        direction: Direction of the stream, norm sqrt(d), zero mean over features.
        branch: Output of the sub-layer, any scale; centred here.
        gain: Gain a = alpha * m of each token.
        width: Features, where the last axis is longer and filled up with zeros; it stays so.

    Returns:
        The new direction in `direction`'s dtype, renormalised by its measured RMS, and the growth
        of the log-norm, 0.5 * log(1 + a^2 q), in at least float32. q is 1 unless the branch is
        degenerate, where it is the squared length (over d) of the update that was really written.
    """
    statistics = jnp.promote_types(direction.dtype, jnp.float32)
    r = direction.astype(statistics)
    f = branch.astype(statistics)
    a = gain.astype(statistics)[..., None]
    width = r.shape[-1] if width is None else width

    f = features_of(f - jnp.sum(f, axis=-1, keepdims=True) / width, width)
    along = jnp.sum(f * r, axis=-1, keepdims=True) / jnp.sum(r * r, axis=-1, keepdims=True)
    orthogonal = f - along * r  # (10)
    orthogonal_sq = jnp.sum(orthogonal * orthogonal, axis=-1, keepdims=True)
    branch_sq = jnp.sum(f * f, axis=-1, keepdims=True)
    # Not a quotient by the squared length: its derivative divides by the square of that, which is 0
    # in float32 for a zero branch, and the gradient would be NaN.
    inverse = jax.lax.rsqrt(orthogonal_sq + RELATIVE_FLOOR**2 * branch_sq + ABSOLUTE_FLOOR)
    written = r + a * (orthogonal * (inverse * width**0.5))  # (12), (14)
    rms = jnp.sqrt(jnp.sum(written * written, axis=-1, keepdims=True) / width)
    log_gain = 0.5 * jnp.log1p(a * a * (orthogonal_sq * inverse * inverse))  # (15)
    return (written / rms).astype(direction.dtype), log_gain[..., 0]  # (17)


def features_of(x: Float[Array, "*tokens padded"], width: int) -> Float[Array, "*tokens padded"]:
    """`x` with zeros behind its first `width` features."""
    if x.shape[-1] == width:
        return x
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) < width, x, 0.0)


def with_pass_through(
    direction: Float[Array, "*tokens d"],
    branch: Float[Array, "*tokens d"],
    gain: Float[Array, "*tokens"],
    width: int | None = None,
) -> tuple[Float[Array, "*tokens d"], Float[Array, "*tokens"]]:
    """`update_formula`, with tokens of gain 0 passed through bit for bit.

    Renormalising an untouched direction would change a third of its float32 entries, so those
    tokens are selected unchanged.
    """
    updated, log_gain = update_formula(direction, branch, gain, width)
    return jnp.where(gain[..., None] == 0, direction, updated), log_gain
