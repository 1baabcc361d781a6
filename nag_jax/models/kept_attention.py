"""Causal attention of those queries alone that do not skip it, to the keys of all tokens.

As `chunked_attention`, with the kept queries of each row brought to its front: the number of chunks
that run, and for each the keys it reads, follow from where the kept queries are. Neither output nor
gradient is made for the others.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from nag_jax.models.chunked_attention import (
    MAX_GROUPS,
    SAVED_NAMES,
    chunk_gradients,
    chunk_logits,
    chunk_output,
)
from nag_jax.models.rows import gather_rows


class Kept(NamedTuple):
    """Where the queries of a row are, in the order in which they run.

    Attributes:
        columns: Of the queries.
        count: How many are kept; they come first.
        documents: Of the queries.
        key_documents: Of the keys.
    """

    columns: Int[Array, "B T"]
    count: Int[Array, " B"]
    documents: Int[Array, "B T"]
    key_documents: Int[Array, "B S"]


def kept_attention(
    q: Float[Array, "B T K G h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    segment_ids: Int[Array, "B T"],
    keep: Bool[Array, "B T"],
    chunk: int,
) -> Float[Array, "B T K G h"]:
    """softmax(q k^T / sqrt(h)) v over earlier positions of the same document, of kept queries.

    Args:
        q: Queries, G query heads for each of K key-value heads.
        k: Keys.
        v: Values.
        segment_ids: Document of each position within its row.
        keep: Which queries are run.
        chunk: Queries per chunk; T is padded to a multiple of it.

    Returns:
        Attention output in `q`'s dtype, zero for queries that are not kept.
    """
    batch, length, *heads = q.shape
    chunk = min(chunk, length)
    padding = ((0, 0), (0, -length % chunk))
    kept, documents = jnp.pad(keep, padding), jnp.pad(segment_ids, padding)
    order = jnp.argsort(jnp.logical_not(kept), axis=1, stable=True).astype(jnp.int32)
    places = jnp.argsort(order, axis=1).astype(jnp.int32)
    flat = (q * jnp.asarray(heads[-1] ** -0.5, q.dtype)).reshape(batch, length, -1)
    flat = jax.vmap(gather_rows)(jnp.pad(flat, (*padding, (0, 0))), order, places)
    facts = Kept(
        columns=order,
        count=jnp.sum(kept, axis=1, dtype=jnp.int32),
        documents=jnp.take_along_axis(documents, order, axis=1),
        key_documents=segment_ids,
    )
    q = jnp.transpose(flat.reshape(batch, -1, *heads), (0, 2, 3, 1, 4))
    k, v = (jnp.transpose(x, (0, 2, 1, 3)) for x in (k, v))
    out = jnp.transpose(_attend(q, k, v, facts, chunk), (0, 3, 1, 2, 4))
    out = jax.vmap(gather_rows)(out.reshape(batch, -1, flat.shape[-1]), places, order)
    return jnp.where(keep[..., None], out[:, :length], 0).reshape(batch, length, *heads)


def _run_chunks(facts, chunk, length, function, state, written, arrays):
    """Runs `function(end, place, slices, state) -> (state, pieces)` on chunks with kept queries.

    Args:
        facts: The queries'.
        chunk: Queries of a chunk.
        length: Columns of the keys.
        function: `end` is static, and no kept query of the chunk sees a column from there on;
            `place` are documents and columns of the queries, `slices` the chunk's of `arrays`.
        state: What one chunk hands to the next.
        written: Arrays into which the pieces are written, along axis 3.
        arrays: Are cut along axis 3.

    Returns:
        The last state, and `written`.
    """
    size = -(-length // MAX_GROUPS)
    ends = [min(end, length) for end in range(size, length + size, size)]

    def one(i, carry):
        state, written = carry
        first = i * chunk

        def cut(x, axis):
            return jax.lax.dynamic_slice_in_dim(x, first, chunk, axis)

        columns = cut(facts.columns, 1)
        own = first + jnp.arange(chunk) < facts.count[:, None]
        last = jnp.max(jnp.where(own, columns, 0))
        place = (cut(facts.documents, 1), columns)
        branches = [functools.partial(function, end) for end in ends]
        state, new = jax.lax.switch(
            jnp.minimum(last // size, len(ends) - 1),
            branches,
            place,
            [cut(x, 3) for x in arrays],
            state,
        )
        written = [
            jax.lax.dynamic_update_slice_in_dim(old, x.astype(old.dtype), first, 3)
            for old, x in zip(written, new, strict=True)
        ]
        return state, written

    count = (jnp.max(facts.count) + chunk - 1) // chunk
    return jax.lax.fori_loop(0, count, one, (state, written))


def _forward_pass(q, k, v, facts, chunk):
    dtype = jnp.promote_types(q.dtype, jnp.float32)

    def run(end, place, slices, state):
        logits = chunk_logits(slices[0], *place, k[:, :, :end], facts.key_documents[:, :end])
        return state, chunk_output(logits, v[:, :, :end])

    empty = [jnp.zeros(q.shape, q.dtype), jnp.zeros(q.shape[:-1], dtype)]
    return _run_chunks(facts, chunk, k.shape[2], run, (), empty, [q])[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, facts, chunk):
    return _forward_pass(q, k, v, facts, chunk)[0]


def _attend_forward(q, k, v, facts, chunk):
    out, normaliser = map(checkpoint_name, _forward_pass(q, k, v, facts, chunk), SAVED_NAMES)
    return out, (q, k, v, facts, out, normaliser)


def _attend_backward(chunk, residuals, d_out):
    q, k, v, facts, out, normaliser = residuals
    dtype = normaliser.dtype
    delta = jnp.sum(d_out.astype(dtype) * out.astype(dtype), axis=-1)

    def run(end, place, slices, state):
        q_chunk, normaliser_chunk, delta_chunk, d_out_chunk = slices
        keys, values = k[:, :, :end], v[:, :, :end]
        logits = chunk_logits(q_chunk, *place, keys, facts.key_documents[:, :end])
        d_q, d_keys, d_values = chunk_gradients(
            logits, q_chunk, keys, values, normaliser_chunk, delta_chunk, d_out_chunk
        )
        d_k, d_v = state
        return (d_k.at[:, :, :end].add(d_keys), d_v.at[:, :, :end].add(d_values)), (d_q,)

    zeros = jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype)
    arrays, empty = [q, normaliser, delta, d_out], [jnp.zeros_like(q)]
    (d_k, d_v), (d_q,) = _run_chunks(facts, chunk, k.shape[2], run, zeros, empty, arrays)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)
