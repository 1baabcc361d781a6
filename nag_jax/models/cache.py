"""What decoding keeps of the tokens before: the cache of one layer, as a branch sees it.

All layers' arrays are stacked and ride in the carry of the scan over blocks, where a layer writes
its own columns in place. Every row's prompt is padded on its left, so that all rows write the same
column; `start` says where each row's document begins.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from nag_jax.models.context import BranchOut, Context, positions_in_document

INPUTS = "inputs"


@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's part of the cache.

    Attributes:
        arrays: Stacked arrays of this sub-layer, each [layers, B, ...]; one entry for each time a
            layer runs, iterations of a loop included.
        layer: This layer's index in them.
        position: As in `Decoding`, and so are the two that follow.
        start: First column of each row's document, [B].
        prefill: Whether whole prompts run.
    """

    arrays: dict[str, Array]
    layer: Int[Array, ""]
    position: Int[Array, ""]
    start: Int[Array, " B"]
    prefill: bool

    def read(self, name: str) -> Array:
        """This layer's array, [B, ...]."""
        return jax.lax.dynamic_index_in_dim(self.arrays[name], self.layer, keepdims=False)

    def read_columns(self, name: str, first: Array, count: int, axis: int) -> Array:
        """`count` columns of this layer's array from `first` on, along `axis` of [B, ...]."""
        stacked = self.arrays[name]
        corner, sizes = [self.layer, *[0] * (stacked.ndim - 1)], [1, *stacked.shape[1:]]
        corner[1 + axis], sizes[1 + axis] = first, count
        return jax.lax.dynamic_slice(stacked, corner, sizes)[0]

    def replace(self, name: str, value: Array) -> "LayerCache":
        """The cache with this layer's whole array replaced by `value` [B, ...]."""
        return self._written(name, value, 0, 0)

    def append(self, name: str, columns: Array, axis: int) -> "LayerCache":
        """The cache with `columns` written from `position` on along `axis` of [B, ...]."""
        return self._written(name, columns, axis, self.position)

    def _written(self, name: str, value: Array, axis: int, at: Any) -> "LayerCache":
        stacked = self.arrays[name]
        corner = [self.layer, *[0] * value.ndim]
        if axis:
            corner[1 + axis] = at
        stacked = jax.lax.dynamic_update_slice(stacked, value[None].astype(stacked.dtype), corner)
        return dataclasses.replace(self, arrays=self.arrays | {name: stacked})

    def visible(self, columns: Int[Array, " C"]) -> Bool[Array, "B C"]:
        """Which of these columns belong to a row's document, up to `position`."""
        return (columns >= self.start[:, None]) & (columns <= self.position)


def cache_shapes(
    branch: type, options: Any, d_model: int, batch: int, length: int, dtype: Any, mixes: bool
) -> dict[str, jax.ShapeDtypeStruct]:
    """One layer's cache arrays for a kind of branch, without the stack axis.

    Args:
        branch: The branch's class; its own static `cache_shapes` counts where it has one.
        options: Its options.
        d_model: Width of the stream.
        batch: Rows.
        length: Columns.
        dtype: Dtype of activations.
        mixes: Whether branches of this sub-layer read earlier tokens: then a class that keeps no
            cache of its own has its inputs kept, and is run on them again for every token.
    """
    if hasattr(branch, "cache_shapes"):
        return branch.cache_shapes(options, d_model, batch, length, dtype)
    return {INPUTS: jax.ShapeDtypeStruct((batch, length, d_model), dtype)} if mixes else {}


def run_cached(branch: Any, x: Array, keep: Array | None, context: Context) -> BranchOut:
    """Runs a branch in decoding, whether or not it keeps a cache of its own."""
    cache = context.cache
    if not cache.arrays:
        return dataclasses.replace(branch(x, keep, context), cache=cache)
    if hasattr(type(branch), "cache_shapes"):
        out = branch(x, keep, context)
        if out.cache is None:
            raise ValueError(
                f"{type(branch).__name__} has cache_shapes, but its output holds no cache: it must "
                "return BranchOut(y, cache=...) with the updated context.cache"
            )
        return out
    cache = cache.append(INPUTS, x, 1)
    plain = dataclasses.replace(context, cache=None)
    if cache.prefill:
        return dataclasses.replace(branch(x, keep, plain), cache=cache)
    columns = jnp.arange(cache.arrays[INPUTS].shape[2])
    segments = (columns >= cache.start[:, None]).astype(jnp.int32)
    plain = dataclasses.replace(
        plain, segment_ids=segments, positions=positions_in_document(segments)
    )
    out = branch(cache.read(INPUTS), None, plain)
    parts = {
        name: jax.lax.dynamic_slice_in_dim(value, cache.position, 1, axis=1)
        for name, value in (("y", out.y), ("weight", out.weight))
        if value is not None
    }
    return BranchOut(**parts, cache=cache)
