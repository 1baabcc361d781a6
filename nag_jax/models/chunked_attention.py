"""Exact causal attention within documents, in memory linear in the row length.

Queries are processed in chunks; the backward pass recomputes each chunk's probabilities from the
saved log-normaliser, as flash attention does, so that no [T, T] array ever exists. Chunks form at
most `MAX_GROUPS` groups, each of which reads only the keys up to its own end: this skips nearly all
of the masked half while the program's size does not grow with T.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from nag_jax.models.linear import PRECISION

MAX_GROUPS = 8
MASKED = -1e30

# Names under which the backward pass's inputs are tagged, so that a remat policy can keep them: the
# block's recomputation then leaves the attention out.
SAVED_NAMES = ("attention_output", "attention_normaliser")


def chunked_attention(
    q: Float[Array, "B T K G h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    segment_ids: Int[Array, "B T"],
    chunk: int,
) -> Float[Array, "B T K G h"]:
    """softmax(q k^T / sqrt(h)) v over earlier positions of the same document.

    Args:
        q: Queries, G query heads for each of K key-value heads.
        k: Keys.
        v: Values.
        segment_ids: Document of each position within its row.
        chunk: Queries per chunk; T is padded to a multiple of it.

    Returns:
        Attention output in `q`'s dtype; softmax statistics are at least float32.
    """
    length = q.shape[1]
    chunk = min(chunk, length)
    padding = -length % chunk
    q = jnp.transpose(q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype), (0, 2, 3, 1, 4))
    k, v = (jnp.transpose(x, (0, 2, 1, 3)) for x in (k, v))
    if padding:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, padding), (0, 0)))
        k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (k, v))
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, padding)), constant_values=-1)
    out = _attend(q, k, v, segment_ids, chunk)
    return jnp.transpose(out, (0, 3, 1, 2, 4))[:, :length]


def groups_of_chunks(length: int, chunk: int) -> list[tuple[int, int]]:
    """(first chunk, number of chunks) of each group, for `length` a multiple of `chunk`."""
    chunks = length // chunk
    size = -(-chunks // MAX_GROUPS)
    return [(first, min(size, chunks - first)) for first in range(0, chunks, size)]


def _over_chunks(function, carry, per_chunk, count):
    """Applies `function(carry, slices)` to each chunk, without a loop where there is one chunk."""
    if count == 1:
        carry, out = function(carry, jax.tree.map(lambda x: x[0], per_chunk))
        return carry, jax.tree.map(lambda x: x[None], out)
    return jax.lax.scan(function, carry, per_chunk)


def _split(x: Array, axis: int, first: int, count: int, chunk: int) -> Array:
    """Chunks first..first+count of `x` along `axis`, moved to a new leading axis."""
    x = jax.lax.slice_in_dim(x, first * chunk, (first + count) * chunk, axis=axis)
    shape = (*x.shape[:axis], count, chunk, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _positions(first: int, count: int, chunk: int) -> Int[Array, "count 1 chunk"]:
    """Columns of the queries of each chunk."""
    return (first * chunk + jnp.arange(count * chunk)).reshape(count, 1, chunk)


def _join(pieces: list[Array], axis: int) -> Array:
    """Inverse of `_split` over all groups: [count, ..., chunk, ...] pieces to one array."""
    whole = jnp.moveaxis(jnp.concatenate(pieces, axis=0), 0, axis)
    shape = (*whole.shape[:axis], whole.shape[axis] * whole.shape[axis + 1])
    return whole.reshape(*shape, *whole.shape[axis + 2 :])


def chunk_logits(
    q_chunk: Float[Array, "B K G C h"],
    segments_chunk: Int[Array, "B C"],
    queries: Int[Array, "#B C"],
    k: Float[Array, "B K S h"],
    segments: Int[Array, "B S"],
) -> Float[Array, "B K G C S"]:
    """Masked logits of a chunk of queries in these columns, at least float32."""
    dtype = jnp.promote_types(q_chunk.dtype, jnp.float32)
    logits = jnp.einsum(
        "bkgch,bksh->bkgcs", q_chunk, k, precision=PRECISION, preferred_element_type=dtype
    )
    causal = queries[:, :, None] >= jnp.arange(k.shape[2])
    visible = causal & (segments_chunk[:, :, None] == segments[:, None, :])
    return jnp.where(visible[:, None, None], logits, MASKED)


def chunk_output(
    logits: Float[Array, "B K G C S"], values: Float[Array, "B K S h"]
) -> tuple[Float[Array, "B K G C h"], Float[Array, "B K G C"]]:
    """A chunk's output and the logarithm of its softmax's normaliser."""
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum(
        "bkgcs,bksh->bkgch",
        weights.astype(values.dtype),
        values,
        precision=PRECISION,
        preferred_element_type=logits.dtype,
    )
    return out / total, (peak + jnp.log(total))[..., 0]


def chunk_gradients(
    logits: Float[Array, "B K G C S"],
    q_chunk: Float[Array, "B K G C h"],
    keys: Float[Array, "B K S h"],
    values: Float[Array, "B K S h"],
    normaliser: Float[Array, "B K G C"],
    delta: Float[Array, "B K G C"],
    d_out: Float[Array, "B K G C h"],
) -> tuple[Array, Array, Array]:
    """Gradients of a chunk's queries and its parts of those of keys and values.

    `delta` is the sum over features of `d_out` times the chunk's output.
    """
    dtype = logits.dtype
    p = jnp.exp(logits - normaliser[..., None])
    d_p = jnp.einsum(
        "bkgch,bksh->bkgcs", d_out, values, precision=PRECISION, preferred_element_type=dtype
    )
    d_logits = (p * (d_p - delta[..., None])).astype(keys.dtype)

    def over_queries(a, b):
        return jnp.einsum(
            "bkgcs,bkgch->bksh", a, b, precision=PRECISION, preferred_element_type=dtype
        )

    d_q = jnp.einsum(
        "bkgcs,bksh->bkgch", d_logits, keys, precision=PRECISION, preferred_element_type=dtype
    )
    d_keys = over_queries(d_logits, q_chunk)
    return d_q, d_keys, over_queries(p.astype(values.dtype), d_out)


def _forward_pass(q, k, v, segment_ids, chunk):
    outs, normalisers = [], []
    for first, count in groups_of_chunks(q.shape[3], chunk):
        end = (first + count) * chunk
        keys, values, segments = k[:, :, :end], v[:, :, :end], segment_ids[:, :end]

        def one(carry, xs, keys=keys, values=values, segments=segments):
            q_chunk, segments_chunk, queries = xs
            logits = chunk_logits(q_chunk, segments_chunk, queries, keys, segments)
            out, normaliser = chunk_output(logits, values)
            return carry, (out.astype(q_chunk.dtype), normaliser)

        xs = (
            _split(q, 3, first, count, chunk),
            _split(segment_ids, 1, first, count, chunk),
            _positions(first, count, chunk),
        )
        _, (out, normaliser) = _over_chunks(one, None, xs, count)
        outs.append(out)
        normalisers.append(normaliser)
    return _join(outs, 3), _join(normalisers, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, segment_ids, chunk):
    return _forward_pass(q, k, v, segment_ids, chunk)[0]


def _attend_forward(q, k, v, segment_ids, chunk):
    out, normaliser = _forward_pass(q, k, v, segment_ids, chunk)
    out = checkpoint_name(out, SAVED_NAMES[0])
    normaliser = checkpoint_name(normaliser, SAVED_NAMES[1])
    return out, (q, k, v, segment_ids, out, normaliser)


def _attend_backward(chunk, residuals, d_out):
    q, k, v, segment_ids, out, normaliser = residuals
    dtype = normaliser.dtype
    delta = jnp.sum(d_out.astype(dtype) * out.astype(dtype), axis=-1)
    d_q = []
    d_k, d_v = jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype)
    for first, count in groups_of_chunks(q.shape[3], chunk):
        end = (first + count) * chunk
        keys, values, segments = k[:, :, :end], v[:, :, :end], segment_ids[:, :end]

        def one(carry, xs, keys=keys, values=values, segments=segments):
            q_chunk, segments_chunk, queries, d_out_chunk, normaliser_chunk, delta_chunk = xs
            logits = chunk_logits(q_chunk, segments_chunk, queries, keys, segments)
            d_q_chunk, d_keys, d_values = chunk_gradients(
                logits, q_chunk, keys, values, normaliser_chunk, delta_chunk, d_out_chunk
            )
            return (carry[0] + d_keys, carry[1] + d_values), d_q_chunk.astype(q_chunk.dtype)

        xs = (
            _split(q, 3, first, count, chunk),
            _split(segment_ids, 1, first, count, chunk),
            _positions(first, count, chunk),
            *(_split(x, 3, first, count, chunk) for x in (d_out, normaliser, delta)),
        )
        zeros = (jnp.zeros(keys.shape, dtype), jnp.zeros(values.shape, dtype))
        (d_keys, d_values), d_q_group = _over_chunks(one, zeros, xs, count)
        d_k = d_k.at[:, :, :end].add(d_keys)
        d_v = d_v.at[:, :, :end].add(d_values)
        d_q.append(d_q_group)
    return _join(d_q, 3), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)
