"""Grouped-query attention with rotary positions, isolated by document."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from ml_collections import ConfigDict

from nag_jax.models.chunked_attention import chunked_attention
from nag_jax.models.context import BranchOut, Context
from nag_jax.models.initializers import fan_in_normal
from nag_jax.models.linear import Numerics, contract
from nag_jax.models.norms import RMSNorm
from nag_jax.parameters import declare


def rotate(
    x: Float[Array, "B T N h"], positions: Int[Array, "B T"], theta: float
) -> Float[Array, "B T N h"]:
    """Rotary position embedding over the two halves of each head, angles in float32.

    Args:
        x: Queries or keys; h is even.
        positions: Position of each token in its document.
        theta: Base of the frequencies theta^(-2i/h).

    Returns:
        The rotated heads in `x`'s dtype.
    """
    half = x.shape[-1] // 2
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = theta ** (-jnp.arange(half, dtype=dtype) / half)
    angles = positions[:, :, None, None].astype(dtype) * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = x[..., :half].astype(dtype), x[..., half:].astype(dtype)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


class GroupedQueryAttention(nnx.Module):
    """Causal softmax attention: multi-head if `num_kv_heads` is `num_heads`, multi-query if 1."""

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Keys of `model.attention` for this kind."""
        return {
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 64,
            "rope_theta": 10000.0,
            "qk_norm": False,
            "query_chunk": 128,
        }

    @staticmethod
    def implementations() -> list[tuple[str, str, str]]:
        """(operation, implementation, reason), for the header of a run."""
        return [("attention", "chunked", "memory linear in the row length, isolates documents")]

    @staticmethod
    def context_flops(options: ConfigDict, length: int) -> float:
        """Forward FLOPs of one token in logits and values, averaged over causal positions."""
        return 4.0 * options.num_heads * options.head_dim * (length + 1) / 2

    def __init__(self, options: ConfigDict, d_model: int, numerics: Numerics, rngs: nnx.Rngs):
        self.num_heads, self.num_kv_heads = options.num_heads, options.num_kv_heads
        self.head_dim = options.head_dim
        self.rope_theta, self.query_chunk = options.rope_theta, options.query_chunk
        self.numerics = numerics

        def projection(heads: int, axis: str) -> nnx.Param:
            values = fan_in_normal(rngs.params(), (d_model, heads, self.head_dim), d_model)
            return declare(
                values,
                ("embed", axis, "head_dim"),
                "matrix",
                rows=("embed",),
                columns=(axis, "head_dim"),
            )

        self.query = projection(self.num_heads, "heads")
        self.key = projection(self.num_kv_heads, "kv_heads")
        self.value = projection(self.num_kv_heads, "kv_heads")
        inner = self.num_heads * self.head_dim
        values = fan_in_normal(rngs.params(), (self.num_heads, self.head_dim, d_model), inner)
        self.output = declare(
            values,
            ("heads", "head_dim", "embed"),
            "matrix",
            rows=("heads", "head_dim"),
            columns=("embed",),
        )
        self.qk_norm = options.qk_norm
        if self.qk_norm:
            self.query_norm = RMSNorm(self.head_dim, "head_dim", 1e-6)
            self.key_norm = RMSNorm(self.head_dim, "head_dim", 1e-6)

    def __call__(
        self, x: Float[Array, "B T d"], keep: Bool[Array, "B T"] | None, context: Context
    ) -> BranchOut:
        """Attends to earlier tokens of the same document."""

        def project(site: str, w: nnx.Param) -> Array:
            return contract(f"attention/{site}", x, w[...], self.numerics)

        q, k = project("query", self.query), project("key", self.key)
        v = project("value", self.value)
        if self.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q = rotate(q, context.positions, self.rope_theta)
        k = rotate(k, context.positions, self.rope_theta)
        grouped = (*q.shape[:2], self.num_kv_heads, self.num_heads // self.num_kv_heads)
        out = chunked_attention(
            q.reshape(*grouped, self.head_dim), k, v, context.segment_ids, self.query_chunk
        )
        y = contract(
            "attention/output",
            out.reshape(q.shape),
            self.output[...],
            self.numerics,
            inputs=2,
        )
        return BranchOut(y)
