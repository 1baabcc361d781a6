"""Chunked attention against dense float64 softmax, its isolation of documents, and its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nag_jax.models.chunked_attention import chunked_attention, groups_of_chunks

# (length, chunk): one token, one chunk, tails, more chunks than groups (scanned groups), chunk > T.
LENGTHS = [(1, 16), (7, 16), (7, 1), (64, 16), (65, 16), (65, 64), (300, 16)]


def dense(q, k, v, segment_ids):
    """softmax(q k^T / sqrt(h)) v under the causal document mask; q [B,T,K,G,h], float64."""
    length = q.shape[1]
    logits = np.einsum("btkgh,bskh->bkgts", q, k) / np.sqrt(q.shape[-1])
    visible = np.tril(np.ones((length, length), bool))
    visible = visible & (segment_ids[:, :, None] == segment_ids[:, None, :])
    logits = np.where(visible[:, None, None], logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights, np.einsum("bkgts,bskh->btkgh", weights, v)


def dense_gradients(q, k, v, segment_ids, c):
    """Gradients of <c, out> by the softmax's Jacobian."""
    p, _ = dense(q, k, v, segment_ids)
    d_p = np.einsum("btkgh,bskh->bkgts", c, v)
    d_logits = p * (d_p - np.sum(d_p * p, axis=-1, keepdims=True)) / np.sqrt(q.shape[-1])
    return (
        np.einsum("bkgts,bskh->btkgh", d_logits, k),
        np.einsum("bkgts,btkgh->bskh", d_logits, q),
        np.einsum("bkgts,btkgh->bskh", p, c),
    )


def example(length, kv_heads=2, group=3, width=6, batch=2, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, length, kv_heads, group, width))
    k, v = rng.normal(size=(2, batch, length, kv_heads, width))
    segment_ids = np.cumsum(rng.random((batch, length)) < 0.05, axis=1).astype(np.int32)
    return q, k, v, segment_ids


@functools.partial(jax.jit, static_argnums=5)
def value_and_gradients(q, k, v, segment_ids, c, chunk):
    out, pull_back = jax.vjp(lambda *x: chunked_attention(*x, segment_ids, chunk), q, k, v)
    return out, pull_back(c)


@pytest.mark.parametrize("length, chunk", LENGTHS)
def test_equals_dense(length, chunk, x64):
    """Values and gradients; the gradients' formula is itself checked below."""
    q, k, v, segment_ids = example(length)
    c = np.random.default_rng(1).normal(size=q.shape)
    arguments = map(jnp.asarray, (q, k, v, segment_ids, c))
    out, gradients = value_and_gradients(*arguments, chunk)
    np.testing.assert_allclose(out, dense(q, k, v, segment_ids)[1], rtol=1e-9, atol=1e-11)
    for got, wanted in zip(gradients, dense_gradients(q, k, v, segment_ids, c), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-8, atol=1e-10)


def test_gradient_formula_by_finite_differences():
    *inputs, segment_ids = example(9)
    rng = np.random.default_rng(1)
    c = rng.normal(size=inputs[0].shape)
    gradients = dense_gradients(*inputs, segment_ids, c)
    for which, gradient in enumerate(gradients):
        direction = rng.normal(size=gradient.shape)
        values = []
        for sign in (1, -1):
            moved = list(inputs)
            moved[which] = moved[which] + sign * 1e-5 * direction
            values.append(np.sum(c * dense(*moved, segment_ids)[1]))
        difference = (values[0] - values[1]) / 2e-5
        np.testing.assert_allclose(np.sum(gradient * direction), difference, rtol=1e-7)


@pytest.mark.parametrize("kv_heads, group", [(1, 4), (4, 1), (2, 2)])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("bfloat16", 3e-2)])
def test_head_ratios_and_dtypes(kv_heads, group, dtype, tolerance):
    """Multi-query, multi-head and between; gradients come in the inputs' dtype."""
    q, k, v, segment_ids = example(21, kv_heads, group, width=8)
    c = np.random.default_rng(1).normal(size=q.shape)
    q, k, v, c = (jnp.asarray(x, dtype) for x in (q, k, v, c))
    out, gradients = value_and_gradients(q, k, v, jnp.asarray(segment_ids), c, 8)
    exact = [np.asarray(x, np.float64) for x in (q, k, v)]
    expected = dense(*exact, segment_ids)[1]
    assert out.dtype == q.dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=tolerance)
    wanted = dense_gradients(*exact, segment_ids, np.asarray(c, np.float64))
    for got, want in zip(gradients, wanted, strict=True):
        assert got.dtype == q.dtype
        np.testing.assert_allclose(
            np.asarray(got, np.float64), want, atol=tolerance * np.abs(want).max()
        )


def test_large_logits_do_not_overflow():
    q, k, v, segment_ids = example(16)
    q = 1e4 * q
    inputs = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    out, gradients = value_and_gradients(*inputs, segment_ids, jnp.ones(q.shape), 4)
    np.testing.assert_allclose(out, dense(q, k, v, segment_ids)[1], atol=1e-3)
    assert all(np.all(np.isfinite(g)) for g in gradients)


@pytest.mark.parametrize("length, chunk", [(1, 1), (8, 1), (64, 8), (72, 8), (4096, 16)])
def test_groups_cover_every_chunk_once(length, chunk):
    groups = groups_of_chunks(length, chunk)
    covered = [first + i for first, count in groups for i in range(count)]
    assert covered == list(range(length // chunk))
    assert len(groups) <= 8


def test_memory_grows_with_the_length_not_its_square():
    """Temporary memory of value and gradients as compiled: 4 times the length, under 5 times."""

    def bytes_at(length):
        shapes = [(1, length, 2, 2, 16), (1, length, 2, 16), (1, length, 2, 16)]
        q, k, v = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        segment_ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def loss(q, k, v, segment_ids):
            return jnp.sum(chunked_attention(q, k, v, segment_ids, 64) ** 2)

        compiled = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(q, k, v, segment_ids)
        return compiled.compile().memory_analysis().temp_size_in_bytes

    short, long = bytes_at(1024), bytes_at(4096)
    assert long < 5 * short
    assert long < 4096 * 4096 * 4  # one [T, T] array of a single head
