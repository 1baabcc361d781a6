"""Compressed convolutional grouped-query attention (CCGQA).

Queries and keys live in latents narrower than the stream, where two causal convolutions mix
neighbouring tokens; values come from the current and the previous token. The computation is that of
Zyphra's public ZAYA1 code, read there and not in P1 (arXiv 2606.16112), which uses it; that the key
temperature is an exponential of a parameter is our inference.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float
from ml_collections import ConfigDict

from nag_jax.models.attention import SoftmaxAttention
from nag_jax.models.cache import LayerCache
from nag_jax.models.causal_convolutions import HeadConvolutions, earlier
from nag_jax.models.context import BranchOut, Context
from nag_jax.models.linear import Numerics
from nag_jax.models.norms import root_mean_square
from nag_jax.parameters import declare

# Keeps the normalisation of an all-zero head differentiable; far below any head's mean square.
HEAD_NORM_FLOOR = 1e-12


class CompressedConvolutionalAttention(SoftmaxAttention):
    """CCGQA with H query heads and K key-value heads of width h, G = H/K.

    With q0 = x W_q and k0 = x W_k, query head n reading key-value head j = n // G,

        mean_q[n] = (q0[n] + k0[j]) / 2,      mean_k[j] = mean of mean_q over the heads of j
        [q; k]    = convolutions([q0; k0]) + [mean_q; mean_k]
        q[n]      = sqrt(h) q[n] / |q[n]|,    k[j] = exp(log_temperature[j]) sqrt(h) k[j] / |k[j]|
        v         = [x W_v1; (x of the previous token) W_v2],   each K h / 2 wide

    then rotary positions and softmax attention with scale 1/sqrt(h). Convolutions, means and the
    shift see one document only. Queries are compressed to H h features and keys and values to K h
    each: the two choose their own by their numbers of heads.

    `value` holds W_v1 and W_v2 as the two halves of its K h columns. The delayed half delays the
    product with W_v2 rather than x, which is the same and narrower. At K = 1 the halves lie inside
    the one head, at K = 2 they are its two heads.
    """

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Keys of `model.attention` for this kind; the latents' widths are heads times head_dim."""
        return SoftmaxAttention.shared_defaults() | {
            "head_dim": 32,
            "depthwise_kernel": 2,
            "grouped_kernel": 2,
        }

    @staticmethod
    def rate_multipliers() -> dict[str, float]:
        """Learning rates of the convolutions, as multiples of the matrices'."""
        return {"conv": 1.0, "bias": 1.0}

    @staticmethod
    def cache_shapes(
        options: ConfigDict, d_model: int, batch: int, length: int, dtype: Any
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Keys and values of one layer, the convolutions' last inputs, the last delayed values."""
        columns = options.depthwise_kernel + options.grouped_kernel - 2
        heads = options.num_heads + options.num_kv_heads
        delayed = options.num_kv_heads * options.head_dim // 2
        return SoftmaxAttention.cache_shapes(options, d_model, batch, length, dtype) | {
            "columns": jax.ShapeDtypeStruct((batch, columns, heads * options.head_dim), dtype),
            "delayed": jax.ShapeDtypeStruct((batch, delayed), dtype),
        }

    def __init__(
        self,
        options: ConfigDict,
        d_model: int,
        initialisation: Any,
        numerics: Numerics,
        rngs: nnx.Rngs,
    ):
        super().__init__(options, d_model, initialisation, numerics, rngs)
        self.convolutions = HeadConvolutions(
            options.num_heads + options.num_kv_heads,
            options.head_dim,
            options.depthwise_kernel,
            options.grouped_kernel,
            numerics,
            rngs,
        )
        log_gain = jnp.log(jnp.full(options.num_kv_heads, initialisation.key_gain, jnp.float32))
        self.log_temperature = declare(log_gain, ("kv_heads",), "scale")

    def __call__(
        self, x: Float[Array, "B T d"], keep: Bool[Array, "B T"] | None, context: Context
    ) -> BranchOut:
        """Attends to earlier tokens of the same document."""
        q, k, v = self.projections(x)
        convolved_q, convolved_k, cache = self._convolved(q, k, context, context.cache)
        v, cache = self._two_streams(v, context, cache)

        by_group = q.reshape(*k.shape[:3], -1, self.head_dim)
        mean_q = (by_group + k[:, :, :, None]) / 2
        q = _normalised(convolved_q + mean_q.reshape(q.shape))
        k = _normalised(convolved_k + jnp.mean(mean_q, axis=3))
        k = k * jnp.exp(self.log_temperature[...].astype(k.dtype))[:, None]
        return self.attend(q.astype(v.dtype), k.astype(v.dtype), v, keep, context, cache)

    def _convolved(
        self,
        q: Float[Array, "B T H h"],
        k: Float[Array, "B T K h"],
        context: Context,
        cache: LayerCache | None,
    ) -> tuple[Float[Array, "B T H h"], Float[Array, "B T K h"], LayerCache | None]:
        """The convolutions of [q0; k0], and the cache with its last columns."""
        positions = _positions_to_mask(context)
        if cache is not None:
            z = jnp.concatenate([q, k], axis=2)
            if not cache.prefill:
                convolved, columns = self.convolutions.step(z, cache.read("columns"))
                q, k = jnp.split(convolved, [self.num_heads], axis=2)
                return q, k, cache.replace("columns", columns)
            cache = cache.replace("columns", self.convolutions.last_columns(z, positions))
        # Apart, because heads side by side would be split over devices in other places.
        q = self.convolutions(q, positions)
        return q, self.convolutions(k, positions, first=self.num_heads), cache

    def _two_streams(
        self, v: Float[Array, "B T K h"], context: Context, cache: LayerCache | None
    ) -> tuple[Float[Array, "B T K h"], LayerCache | None]:
        """Values whose second half is the previous token's, and the cache with the last token's."""
        flat = v.reshape(*v.shape[:2], -1)
        half = flat.shape[-1] // 2
        if cache is not None and not cache.prefill:
            previous = cache.read("delayed")[:, None].astype(v.dtype)
            previous = jnp.pad(previous, ((0, 0), (0, 0), (half, 0)))
        else:
            previous = earlier(flat, 1, _positions_to_mask(context))
        if cache is not None:
            cache = cache.replace("delayed", flat[:, -1, half:])
        # A choice by column, because halves would be split over devices in other places.
        return jnp.where(jnp.arange(2 * half) < half, flat, previous).reshape(v.shape), cache


def _positions_to_mask(context: Context) -> Array | None:
    """Positions, where documents must be told apart by them."""
    return context.positions if context.packed else None


def _normalised(x: Float[Array, "*axes h"]) -> Float[Array, "*axes h"]:
    """Heads of norm sqrt(h), in at least float32."""
    rms = root_mean_square(x, HEAD_NORM_FLOOR)
    return x.astype(rms.dtype) / rms
