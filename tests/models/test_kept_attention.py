"""Attention of kept queries alone, against chunked attention of all of them, masked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_chunked_attention import dense, example

from nag_jax.models import kept_attention as kept_lib
from nag_jax.models.chunked_attention import chunked_attention
from nag_jax.models.kept_attention import kept_attention

# (length, chunk): one token, tails; whole chunks, a chunk longer than the row, more than groups.
LENGTHS = [(1, 4), (21, 4)]
MORE = [pytest.param(*of, marks=pytest.mark.slow) for of in ((16, 4), (7, 16), (75, 4))]
SHARES = {"none": 0.0, "some": 0.6, "all": 1.0}


def keep_of(shape, share):
    """Kept queries at random; with "some", none in the last row's first half."""
    keep = np.random.default_rng(3).random(shape) < share
    if share == SHARES["some"]:
        keep[-1, : shape[1] // 2] = False
    return keep


@functools.partial(jax.jit, static_argnums=(0, 7))
def value_and_gradients(gathers, q, k, v, segment_ids, keep, c, chunk):
    """Of <c, out> over kept queries."""

    def run(q, k, v):
        if gathers:
            return kept_attention(q, k, v, segment_ids, keep, chunk)
        out = chunked_attention(q, k, v, segment_ids, chunk)
        return jnp.where(keep[..., None, None, None], out, 0)

    out, pull_back = jax.vjp(run, q, k, v)
    return out, pull_back(c)


@pytest.mark.parametrize(("length", "chunk"), LENGTHS + MORE)
def test_equals_masked_attention(length, chunk, x64):
    """Values and gradients; packed documents and rows that keep more than others."""
    *inputs, segment_ids = map(jnp.asarray, example(length))
    c = jnp.asarray(np.random.default_rng(1).normal(size=inputs[0].shape))
    for share in SHARES.values():
        keep = keep_of(segment_ids.shape, share)
        got, wanted = (
            value_and_gradients(gathers, *inputs, segment_ids, keep, c, chunk)
            for gathers in (True, False)
        )
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
        assert not np.any(np.asarray(got[0])[~keep])
        assert not np.any(np.asarray(got[1][0])[~keep])
        np.testing.assert_allclose(
            np.asarray(got[0])[keep],
            dense(*map(np.asarray, inputs), np.asarray(segment_ids))[1][keep],
            rtol=1e-9,
            atol=1e-11,
        )


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [pytest.param("float32", 2e-5, marks=pytest.mark.slow), ("bfloat16", 3e-2)],
)
def test_dtypes(dtype, tolerance):
    """Gradients come in the inputs' dtype."""
    q, k, v, segment_ids = example(21, kv_heads=1, group=4, width=8)
    c = np.random.default_rng(1).normal(size=q.shape)
    inputs = [jnp.asarray(x, dtype) for x in (q, k, v)]
    keep = keep_of(segment_ids.shape, SHARES["some"])
    arguments = (*inputs, jnp.asarray(segment_ids), keep, jnp.asarray(c, dtype), 8)
    got, wanted = (value_and_gradients(gathers, *arguments) for gathers in (True, False))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype == dtype
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max())


def test_what_runs_follows_the_kept_queries(monkeypatch):
    """Chunks of kept queries alone run, each with the keys up to its last one."""
    ran = []
    chunk_logits = kept_lib.chunk_logits

    def watched(q_chunk, segments, queries, k, key_segments):
        jax.debug.callback(lambda _: ran.append(k.shape[2]), queries[0, 0])
        return chunk_logits(q_chunk, segments, queries, k, key_segments)

    monkeypatch.setattr(kept_lib, "chunk_logits", watched)
    q, k, v, segment_ids = (jnp.asarray(x) for x in example(32, batch=1))

    @jax.jit
    def run(keep):
        return kept_attention(q, k, v, segment_ids, keep, 4)

    for columns, keys in (((), []), ((5, 6), [8]), ((0, 1, 2, 3, 30), [4, 32]), ((31,), [32])):
        ran.clear()
        jax.block_until_ready(run(jnp.zeros((1, 32), bool).at[0, np.array(columns, int)].set(True)))
        jax.effects_barrier()
        assert sorted(ran) == keys
