"""Chunked cross-entropy against float64 NumPy, at any chunk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nag_jax.models.losses import chunked_cross_entropy

BATCH, LENGTH, WIDTH, VOCAB, PADDED = 2, 11, 6, 13, 16


def example():
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(BATCH, LENGTH, WIDTH)),
        rng.normal(size=(BATCH, LENGTH)),
        rng.normal(size=(PADDED, WIDTH)),
        rng.integers(0, VOCAB, (BATCH, LENGTH)),
    )


def expected(hidden, log_scale, table, targets, c):
    """(nats, most likely tokens, gradients of <c, nats>) over the true vocabulary."""
    cosine = hidden @ table[:VOCAB].T
    logits = np.exp(log_scale)[..., None] * cosine
    exponentials = np.exp(logits)
    p = exponentials / exponentials.sum(axis=-1, keepdims=True)
    hot = np.eye(VOCAB)[targets]
    nats = -np.log(np.sum(p * hot, axis=-1))
    d_logits = c[..., None] * (p - hot)
    d_table = np.zeros_like(table)
    d_table[:VOCAB] = np.einsum("btv,btd->vd", d_logits * np.exp(log_scale)[..., None], hidden)
    return (
        nats,
        logits.argmax(axis=-1),
        np.exp(log_scale)[..., None] * d_logits @ table[:VOCAB],
        np.sum(d_logits * logits, axis=-1),
        d_table,
    )


@pytest.mark.parametrize("chunk", [0, 1, 3, 4, 11, 50])
def test_equals_dense(chunk, x64):
    hidden, log_scale, table, targets = example()
    c = np.random.default_rng(1).normal(size=(BATCH, LENGTH))

    def loss(hidden, log_scale, table):
        def logits_of(hidden, log_scale):
            return jnp.exp(log_scale)[..., None] * (hidden @ table.T)

        nats, correct = chunked_cross_entropy(
            logits_of, hidden, log_scale, jnp.asarray(targets), VOCAB, chunk
        )
        return jnp.sum(c * nats), (nats, correct)

    arguments = map(jnp.asarray, (hidden, log_scale, table))
    gradients, (nats, correct) = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arguments)
    wanted_nats, best, *wanted = expected(hidden, log_scale, table, targets, c)
    np.testing.assert_allclose(nats, wanted_nats, rtol=1e-12)
    np.testing.assert_array_equal(correct, best == targets)
    for got, want in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-13)


def test_padding_never_wins_and_large_logits_stay_finite():
    """Padded rows with the largest logits by far change nothing."""
    hidden, log_scale, table, targets = (jnp.asarray(x) for x in example())
    log_scale = log_scale + 8.0

    def run(table):
        def logits_of(hidden, log_scale):
            return jnp.exp(log_scale)[..., None] * (hidden @ table.T)

        return chunked_cross_entropy(logits_of, hidden, log_scale, targets, VOCAB, 4)

    nats, correct = run(table)
    huge = run(table.at[VOCAB:].set(1e6))
    np.testing.assert_array_equal(nats, huge[0])
    np.testing.assert_array_equal(correct, huge[1])
    assert np.all(np.isfinite(nats))
    assert nats.dtype == jnp.float32
