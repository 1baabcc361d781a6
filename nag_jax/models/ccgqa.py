"""Compressed convolutional grouped-query attention (CCGQA).

Queries and keys live in latents narrower than the stream, where two causal convolutions mix
neighbouring tokens; values come from the current and the previous token. What is between the
projections and attention, `pallas_kernels.ccgqa_mixing` defines and fuses where it can.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from ml_collections import ConfigDict

from nag_jax.errors import UserError
from nag_jax.models.attention import SoftmaxAttention
from nag_jax.models.cache import LayerCache
from nag_jax.models.causal_convolutions import HeadConvolutions
from nag_jax.models.context import BranchOut, Context
from nag_jax.models.linear import Numerics
from nag_jax.parameters import declare
from nag_jax.sharding import rules
from pallas_kernels.ccgqa_mixing import ccgqa_mix, choose
from pallas_kernels.ccgqa_mixing.dispatch import KERNELS
from pallas_kernels.ccgqa_mixing.reference import choose_delayed, mix_heads
from pallas_kernels.platform import platform_in_use


class CompressedConvolutionalAttention(SoftmaxAttention):
    """CCGQA with H query heads and K key-value heads of width h, G = H/K.

    Projections are mixed as `pallas_kernels.ccgqa_mixing.reference.mix` says, with

        q0 = x W_q,   k0 = x W_k,   v = [x W_v1; (x of the previous token) W_v2], each K h / 2 wide,

    then rotary positions and softmax attention with scale 1/sqrt(h). Queries are compressed to H h
    features and keys and values to K h each: the two choose their own by their numbers of heads.

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
            "mixing": "auto",  # its implementation, see pallas_kernels.ccgqa_mixing
        }

    @staticmethod
    def rate_multipliers() -> dict[str, float]:
        """Learning rates of the convolutions, as multiples of the matrices'."""
        return {"conv": 1.0, "bias": 1.0}

    @staticmethod
    def implementations(config: ConfigDict) -> list[tuple[str, str, str]]:
        """(operation, implementation, reason) of training, for the header of a run.

        Raises:
            UserError: The implementation asked for cannot serve here, or under
                `model.strict_kernels` no fused one does on a platform that has one.
        """
        options, platform = config.model.attention, platform_in_use()
        try:
            name, reason = choose(
                options.mixing,
                platform,
                num_heads=options.num_heads,
                num_kv_heads=options.num_kv_heads,
                head_dim=options.head_dim,
                kernels=(options.depthwise_kernel, options.grouped_kernel),
                dtype=config.model.compute_dtype,
            )
        except ValueError as error:
            raise UserError(f"model.attention.mixing: {error}") from error
        fusible = platform in KERNELS.values()
        if config.model.strict_kernels and fusible and name == "reference":
            raise UserError(f"model.strict_kernels is set and no fused mixing serves: {reason}")
        return [*SoftmaxAttention.implementations(config), ("CCGQA mixing", name, reason)]

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
        self.mixing = options.mixing

    def __call__(
        self, x: Float[Array, "B T d"], keep: Bool[Array, "B T"] | None, context: Context
    ) -> BranchOut:
        """Attends to earlier tokens of the same document."""
        q, k, v = self.projections(x)
        cache = context.cache
        if cache is not None and not cache.prefill:
            q, k, v, cache = self._step(q, k, v, cache)
        else:
            positions = _positions_to_mask(context)
            if cache is not None:
                cache = self._remembered(q, k, v, positions, cache)
            q, k, v = self._mixed(q, k, v, positions)
        return self.attend(q, k, v, keep, context, cache)

    def _mixed(
        self,
        q: Float[Array, "B T H h"],
        k: Float[Array, "B T K h"],
        v: Float[Array, "B T K h"],
        positions: Int[Array, "B T"] | None,
    ) -> tuple[Float[Array, "B T H h"], Float[Array, "B T K h"], Float[Array, "B T K h"]]:
        """Queries, keys and values of whole rows."""
        mesh = jax.sharding.get_abstract_mesh()
        rows = heads = None
        if not mesh.empty:
            rows = next(iter(rules.rows_spec(len(q), mesh)), None)
            # Where tensor devices do not divide them, each has all heads: a group stays together.
            heads = rules.use_spec(("kv_heads",), (self.num_kv_heads,), mesh)[0]
        with jax.named_scope("attention/mixing"):
            return ccgqa_mix(
                q,
                k,
                v,
                self.convolutions.weights(0, self.num_heads),
                self.convolutions.weights(self.num_heads, self.num_heads + self.num_kv_heads),
                self.log_temperature[...],
                positions,
                implementation=self.mixing,
                rows=rows,
                heads=heads,
            )

    def _remembered(
        self,
        q: Float[Array, "B T H h"],
        k: Float[Array, "B T K h"],
        v: Float[Array, "B T K h"],
        positions: Int[Array, "B T"] | None,
        cache: LayerCache,
    ) -> LayerCache:
        """The cache with what the mixing of the token after these needs of them."""
        z = jnp.concatenate([q, k], axis=2)
        cache = cache.replace("columns", self.convolutions.last_columns(z, positions))
        return cache.replace("delayed", _delayed(v))

    def _step(
        self,
        q: Float[Array, "B 1 H h"],
        k: Float[Array, "B 1 K h"],
        v: Float[Array, "B 1 K h"],
        cache: LayerCache,
    ) -> tuple[
        Float[Array, "B 1 H h"], Float[Array, "B 1 K h"], Float[Array, "B 1 K h"], LayerCache
    ]:
        """Queries, keys and values of one token, and the cache for the next."""
        z = jnp.concatenate([q, k], axis=2)
        convolved, columns = self.convolutions.step(z, cache.read("columns"))
        convolved_q, convolved_k = jnp.split(convolved, [self.num_heads], axis=2)
        q, k = mix_heads(q, k, convolved_q, convolved_k, self.log_temperature[...])
        previous = cache.read("delayed")[:, None].astype(v.dtype)
        previous = jnp.pad(previous, ((0, 0), (0, 0), (previous.shape[-1], 0)))
        cache = cache.replace("columns", columns).replace("delayed", _delayed(v))
        return q.astype(v.dtype), k.astype(v.dtype), choose_delayed(v, previous), cache


def _delayed(v: Float[Array, "B T K h"]) -> Float[Array, "B half"]:
    """The last token's columns that the next one's values take."""
    flat = v[:, -1].reshape(len(v), -1)
    return flat[:, flat.shape[-1] // 2 :]


def _positions_to_mask(context: Context) -> Array | None:
    """Positions, where documents must be told apart by them."""
    return context.positions if context.packed else None
