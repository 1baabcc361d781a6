"""Causal softmax attention: what its kinds share, and grouped-query attention.

Documents of a row never see each other. In training all positions attend at once; in decoding the
keys and values of earlier tokens come from the cache.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from ml_collections import ConfigDict

from nag_jax.models.attention_kernels import attend, choose
from nag_jax.models.cache import LayerCache
from nag_jax.models.chunked_attention import MASKED
from nag_jax.models.context import BranchOut, Context
from nag_jax.models.kept_rows import on_kept_rows
from nag_jax.models.linear import PRECISION, Numerics, contract
from nag_jax.models.norms import RMSNorm
from nag_jax.parameters import declare
from nag_jax.sharding import rules
from pallas_kernels.platform import platform_in_use

# Columns of the cache that one product reads on CPU: the keys and values of a few rows fit in its
# second-level cache.
CACHE_COLUMNS = 512

# In the cache: which tokens were executed, where the others are no keys.
EXECUTED = "executed"
NO_DOCUMENT = -1


def rotate(
    x: Float[Array, "B T N h"],
    positions: Int[Array, "B T"],
    theta: float,
    fraction: float = 1.0,
) -> Float[Array, "B T N h"]:
    """Rotary position embedding over the two halves of a head's first part, angles in float32.

    Args:
        x: Queries or keys.
        positions: Position of each token in its document.
        theta: Base of the frequencies theta^(-2i/r), r the rotated width.
        fraction: Part of each head that is turned; r = fraction * h is even.

    Returns:
        The heads in `x`'s dtype, the part past r as it was.
    """
    half = rotated_width(x.shape[-1], fraction) // 2
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = theta ** (-jnp.arange(half, dtype=dtype) / half)
    angles = positions[:, :, None, None].astype(dtype) * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = x[..., :half].astype(dtype), x[..., half : 2 * half].astype(dtype)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(y.astype(x.dtype) for y in turned), x[..., 2 * half :]], axis=-1)


def rotated_width(head_dim: int, fraction: float) -> int:
    """How much of a head rotary positions turn."""
    return round(head_dim * fraction)


def head_projection(values: Float[Array, "d N h"], axis: str) -> nnx.Param:
    """A weight from the stream to heads; `axis` is "heads" or "kv_heads"."""
    axes = ("embed", axis, "head_dim")
    return declare(values, axes, "matrix", rows=("embed",), columns=(axis, "head_dim"))


class SoftmaxAttention(nnx.Module):
    """Rotary positions, depth temperature, attention and output projection, for queries and keys.

    The logits are tau_l q.k/sqrt(h) with tau_l = temperature_base^(temperature_sign l), l the
    1-based number of the block (P2's depth-aware temperature; that it multiplies the logits is our
    reading).
    """

    @staticmethod
    def shared_defaults() -> dict[str, Any]:
        """Keys of `model.attention` that all kinds made of this class have."""
        return {
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 64,
            "rope_theta": 10000.0,
            "rope_fraction": 1.0,
            "temperature_base": 1.0,
            "temperature_sign": -1,
            "query_chunk": 128,
            "implementation": "auto",
        }

    @staticmethod
    def implementations(config: ConfigDict) -> list[tuple[str, str, str]]:
        """(operation, implementation, reason) of training, for the header of a run.

        Raises:
            UserError: The implementation asked for cannot serve here, or under
                `model.strict_kernels` no fused one can.
        """
        options = config.model.attention
        choice = choose(
            options.implementation,
            platform_in_use(),
            head_dim=options.head_dim,
            dtype=config.model.compute_dtype,
            packed=True,
            strict=config.model.strict_kernels,
        )
        return [choice.row]

    @staticmethod
    def context_flops(options: ConfigDict, length: int) -> float:
        """Forward FLOPs of one token in logits and values, averaged over causal positions."""
        return 4.0 * options.num_heads * options.head_dim * (length + 1) / 2

    @staticmethod
    def cache_shapes(
        options: ConfigDict, d_model: int, batch: int, length: int, dtype: Any
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Keys and values of one layer, [B, K, S, h]."""
        del d_model
        shape = (batch, options.num_kv_heads, length, options.head_dim)
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name in ("key", "value")}

    def __init__(
        self,
        options: ConfigDict,
        d_model: int,
        initialisation: Any,
        numerics: Numerics,
        rngs: nnx.Rngs,
    ):
        """Keeps the options and makes the four projections."""
        self.num_heads, self.num_kv_heads = options.num_heads, options.num_kv_heads
        self.head_dim = options.head_dim
        self.rope_theta, self.rope_fraction = options.rope_theta, options.rope_fraction
        self.temperature_base = options.temperature_base
        self.temperature_sign = options.temperature_sign
        self.query_chunk, self.implementation = options.query_chunk, options.implementation
        self.numerics = numerics
        weights = initialisation.attention(
            rngs, d_model, self.num_heads, self.num_kv_heads, self.head_dim
        )
        self.query = head_projection(weights.query, "heads")
        self.key = head_projection(weights.key, "kv_heads")
        self.value = head_projection(weights.value, "kv_heads")
        self.output = declare(
            weights.output,
            ("heads", "head_dim", "embed"),
            "matrix",
            rows=("heads", "head_dim"),
            columns=("embed",),
        )

    def projections(
        self, x: Float[Array, "B T d"], keep: Bool[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T H h"], Float[Array, "B T K h"], Float[Array, "B T K h"]]:
        """x times the weights of query, key and value, on a mesh split by heads.

        With `keep` queries are made for these tokens alone.
        """

        def heads(site: str, axis: str, keep: Array | None = None) -> Array:
            y = on_kept_rows(
                lambda w, rows: contract(f"attention/{site}", rows, w[site], self.numerics),
                {site: getattr(self, site)},
                x.astype(self.numerics.dtype),
                keep,
                ("embed",),
                (axis, "head_dim"),
            )
            return rules.constrain(y, "batch", None, axis, None)

        return heads("query", "heads", keep), heads("key", "kv_heads"), heads("value", "kv_heads")

    def attend(
        self,
        q: Float[Array, "B T H h"],
        k: Float[Array, "B T K h"],
        v: Float[Array, "B T K h"],
        keep: Bool[Array, "B T"] | None,
        context: Context,
        cache: LayerCache | None,
    ) -> BranchOut:
        """Attention over earlier tokens of the same document, from projections to output.

        Args:
            q: Queries, before positions and temperature.
            k: Keys, before positions.
            v: Values.
            keep: Tokens whose output is wanted; None for all.
            context: Facts of the batch.
            cache: The layer's cache in decoding; keys and values are added to it.

        Returns:
            The branch's output with the cache after these tokens.
        """
        q = rotate(q, context.positions, self.rope_theta, self.rope_fraction)
        k = rotate(k, context.positions, self.rope_theta, self.rope_fraction)
        if self.temperature_base != 1.0:
            dtype = jnp.promote_types(q.dtype, jnp.float32)
            exponent = self.temperature_sign * jnp.asarray(context.layer, dtype)
            q = q * (self.temperature_base**exponent).astype(q.dtype)
        grouped = q.reshape(
            *q.shape[:2], self.num_kv_heads, self.num_heads // self.num_kv_heads, self.head_dim
        )
        if cache is not None:
            columns = {"key": k, "value": v}
            for name, x in columns.items():
                cache = cache.append(name, jnp.transpose(x, (0, 2, 1, 3)), 2)
        hides = keep is not None and context.only_executed_keys
        if hides and cache is not None:
            cache = cache.append(EXECUTED, keep, 1)
        if cache is None or cache.prefill:
            documents = context.segment_ids
            out = attend(
                grouped,
                k,
                v,
                jnp.where(keep, documents, NO_DOCUMENT) if hides else documents,
                implementation=self.implementation,
                chunk=self.query_chunk,
                packed=context.packed or hides,
                keep=keep,
            )
        elif keep is None:
            out = attend_to_cache(grouped, cache)
        else:
            out = jax.lax.cond(
                jnp.any(keep),
                lambda q: attend_to_cache(q, cache),
                jnp.zeros_like,
                grouped,
            )
        y = on_kept_rows(
            lambda w, rows: contract(
                "attention/output", rows, w["output"], self.numerics, inputs=2
            ),
            {"output": self.output},
            out.reshape(q.shape).astype(self.numerics.dtype),
            keep,
            ("heads", "head_dim"),
            ("embed",),
        )
        return BranchOut(y, cache=cache)


def attend_to_cache(q: Float[Array, "B 1 K G h"], cache: LayerCache) -> Float[Array, "B 1 K G h"]:
    """Attention of one token a row over the cached keys and values up to its own column.

    On CPU the columns are read in pieces, as far as there are any: XLA copies what it slices out of
    the stacked cache, and small copies stay close to the processor.
    """
    length = cache.arrays["key"].shape[3]
    count = min(CACHE_COLUMNS, length) if platform_in_use() == "cpu" else length
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    scaled = q[:, 0] * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)

    def add(piece, carry):
        peak, total, out = carry
        first = jnp.minimum(piece * count, length - count)
        keys, values = (cache.read_columns(name, first, count, 2) for name in ("key", "value"))
        columns = first + jnp.arange(count)
        logits = jnp.einsum(
            "bkgh,bksh->bkgs", scaled, keys, precision=PRECISION, preferred_element_type=dtype
        )
        # The last piece ends with the cache, and may begin with columns that were read before.
        visible = cache.visible(columns) & (columns >= piece * count)
        if EXECUTED in cache.arrays:
            visible &= cache.read_columns(EXECUTED, first, count, 1)
        logits = jnp.where(visible[:, None, None], logits, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(logits, axis=-1))
        weights = jnp.exp(logits - new_peak[..., None])
        shrink = jnp.exp(peak - new_peak)
        product = jnp.einsum(
            "bkgs,bksh->bkgh",
            weights.astype(values.dtype),
            values,
            precision=PRECISION,
            preferred_element_type=dtype,
        )
        total = total * shrink + jnp.sum(weights, axis=-1)
        return new_peak, total, out * shrink[..., None] + product

    zeros = jnp.zeros(scaled.shape, dtype)
    carry = (zeros[..., 0] + MASKED, zeros[..., 0], zeros)
    pieces = 1 if count == length else cache.position // count + 1
    _, total, out = jax.lax.fori_loop(0, pieces, add, carry)
    return (out / total[..., None])[:, None].astype(q.dtype)


class GroupedQueryAttention(SoftmaxAttention):
    """Plain projections: multi-head if `num_kv_heads` is `num_heads`, multi-query if it is 1.

    With `qk_norm` each head of queries and keys is normalised by its RMS with learned gains; the
    key's starts at the initialisation's `key_gain`.
    """

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Keys of `model.attention` for this kind."""
        return SoftmaxAttention.shared_defaults() | {"qk_norm": False}

    def __init__(
        self,
        options: ConfigDict,
        d_model: int,
        initialisation: Any,
        numerics: Numerics,
        rngs: nnx.Rngs,
    ):
        super().__init__(options, d_model, initialisation, numerics, rngs)
        self.qk_norm = options.qk_norm
        if self.qk_norm:
            self.query_norm = RMSNorm(self.head_dim, "head_dim", 1e-6)
            self.key_norm = RMSNorm(self.head_dim, "head_dim", 1e-6, initialisation.key_gain)

    def __call__(
        self, x: Float[Array, "B T d"], keep: Bool[Array, "B T"] | None, context: Context
    ) -> BranchOut:
        """Attends to earlier tokens of the same document."""
        q, k, v = self.projections(x, keep)
        if self.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        return self.attend(q, k, v, keep, context, context.cache)
