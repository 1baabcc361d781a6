"""Definition of the mixing of CCGQA in plain JAX.

The computation is that of Zyphra's public ZAYA1 code, read there and not in P1 (arXiv 2606.16112),
which uses it; that the key temperature is an exponential of a parameter is our inference.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Products of float32 are float32: the default rounds them to bfloat16 on TPU and TF32 on GPU.
PRECISION = jax.lax.Precision.HIGHEST
# Keeps the normalisation of an all-zero head differentiable; far below any head's mean square.
HEAD_NORM_FLOOR = 1e-12


class Convolutions(NamedTuple):
    """Weights of a depthwise causal convolution and of a grouped one, for N heads.

    Attributes:
        depthwise: Weight of each feature, by tokens back.
        depthwise_bias: Added to the first convolution's outputs.
        grouped: Weights among the features of a head, by tokens back.
        grouped_bias: Added to the second convolution's outputs.
    """

    depthwise: Float[Array, "ld N h"]
    depthwise_bias: Float[Array, "N h"]
    grouped: Float[Array, "lg N h h"]
    grouped_bias: Float[Array, "N h"]


def earlier(
    x: Float[Array, "*axes B T w"], steps: int, positions: Int[Array, "B T"] | None
) -> Float[Array, "*axes B T w"]:
    """What stood `steps` tokens earlier in the same document, zeros where nothing did.

    Args:
        x: Features by token.
        steps: How far back to look; may be beyond T.
        positions: Position of each token in its document; None where every row is one document
            that starts at its first column.
    """
    if steps == 0:
        return x
    length = x.shape[-2]
    padding = [(0, 0)] * (x.ndim - 2) + [(min(steps, length), 0), (0, 0)]
    shifted = jnp.pad(x[..., : max(length - steps, 0), :], padding)
    if positions is None:
        return shifted
    return jnp.where((positions >= steps)[..., None], shifted, 0)


def joint_bias(weights: Convolutions) -> Float[Array, "N h"]:
    """What both biases add to an output.

    The first one reaches every output through every tap, at a document's start too.
    """
    return weights.grouped_bias + jnp.einsum(
        "nh,lnhg->ng", weights.depthwise_bias, weights.grouped, precision=PRECISION
    )


def convolve(
    z: Float[Array, "B T N h"], weights: Convolutions, positions: Int[Array, "B T"] | None
) -> Float[Array, "B T N h"]:
    """A depthwise causal convolution, then a grouped one with a group for each head; both biased.

    With zeros before a document's start, `lag` counting tokens back and * elementwise,

        c_t = depthwise_bias + sum_lag depthwise[lag] * z_(t-lag)
        y_t = grouped_bias + sum_lag c_(t-lag) @ grouped[lag],

    and c before the start is `depthwise_bias`, not zero: this is one padding with
    (depthwise_kernel - 1) + (grouped_kernel - 1) zeros in front of both.

    Args:
        z: Heads, in the dtype of the computation.
        weights: In their stored dtype.
        positions: As in `earlier`.

    Returns:
        The convolved heads in `z`'s dtype.
    """
    # Heads lead, because XLA's CPU backend is slow at products with a batch axis elsewhere.
    z = jnp.transpose(z, (2, 0, 1, 3))
    taps = weights.depthwise.astype(z.dtype)[:, :, None, None]
    c = sum(tap * earlier(z, lag, positions) for lag, tap in enumerate(taps))
    lags = [earlier(c, lag, positions) for lag in range(len(weights.grouped))]
    stacked = jnp.concatenate(lags, axis=-1)
    y = jnp.matmul(
        stacked.reshape(len(z), -1, stacked.shape[-1]),
        jnp.concatenate(list(weights.grouped), axis=1).astype(z.dtype),
        precision=PRECISION,
    )
    y = jnp.transpose(y.reshape(z.shape), (1, 2, 0, 3))
    return y + joint_bias(weights).astype(z.dtype)


def mix_heads(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    convolved_q: Float[Array, "B T H h"],
    convolved_k: Float[Array, "B T K h"],
    log_temperature: Float[Array, "K"],
) -> tuple[Float[Array, "B T H h"], Float[Array, "B T K h"]]:
    """Adds the means over heads to the convolutions' outputs and normalises; see `mix`."""
    mean_q = (q.reshape(*k.shape[:3], -1, k.shape[-1]) + k[:, :, :, None]) / 2
    q = _normalised(convolved_q + mean_q.reshape(q.shape))
    k = _normalised(convolved_k + jnp.mean(mean_q, axis=3))
    return q, k * jnp.exp(log_temperature.astype(k.dtype))[:, None]


def choose_delayed(
    v: Float[Array, "B T K h"], previous: Float[Array, "B T Kh"]
) -> Float[Array, "B T K h"]:
    """The first half of all columns as they are, the second half the previous token's."""
    flat = v.reshape(*v.shape[:2], -1)
    # A choice by column, because halves would be split over devices in other places.
    return jnp.where(delayed_columns(*v.shape[2:]).reshape(-1), previous, flat).reshape(v.shape)


def delayed_columns(kv_heads: int, head_dim: int) -> Array:
    """Which columns of the values are the previous token's: bool [K, h]."""
    columns = jnp.arange(kv_heads * head_dim)
    return (columns >= kv_heads * head_dim // 2).reshape(kv_heads, head_dim)


def mix(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    query: Convolutions,
    key: Convolutions,
    log_temperature: Float[Array, "K"],
    positions: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B T H h"], Float[Array, "B T K h"], Float[Array, "B T K h"]]:
    """Queries, keys and values of CCGQA from their projections, G = H/K.

    With query head n reading key-value head j = n // G,

        mean_q[n] = (q0[n] + k0[j]) / 2,      mean_k[j] = mean of mean_q over the heads of j
        [q; k]    = convolve([q0; k0]) + [mean_q; mean_k]
        q[n]      = sqrt(h) q[n] / |q[n]|,    k[j] = exp(log_temperature[j]) sqrt(h) k[j] / |k[j]|
        v         = [first half of v0's columns; second half of those of the previous token].

    Convolutions and the shift see one document only.

    Args:
        q: Projected queries q0, in the dtype of the computation.
        k: Projected keys k0.
        v: Projected values v0.
        query: The convolutions of queries, in their stored dtype.
        key: The convolutions of keys.
        log_temperature: Of each key-value head.
        positions: As in `earlier`.

    Returns:
        Queries, keys and values before rotary positions, in the dtype of `v`.
    """
    convolved_q, convolved_k = convolve(q, query, positions), convolve(k, key, positions)
    q, k = mix_heads(q, k, convolved_q, convolved_k, log_temperature)
    previous = earlier(v.reshape(*v.shape[:2], -1), 1, positions)
    return q.astype(v.dtype), k.astype(v.dtype), choose_delayed(v, previous)


def _normalised(x: Float[Array, "*axes h"]) -> Float[Array, "*axes h"]:
    """Heads of norm sqrt(h), in at least float32."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + HEAD_NORM_FLOOR)
