"""Cross-entropy in chunks of the vocabulary against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nag_jax.models import losses
from nag_jax.models.losses import chunk_rows, cross_entropy

BATCH, LENGTH, WIDTH, VOCAB, PADDED = 2, 11, 6, 13, 16


@pytest.fixture(autouse=True, params=[4, 128])
def sample(request, monkeypatch):
    """A reference taken from fewer rows than there are, and from all."""
    monkeypatch.setattr(losses, "SAMPLE", request.param)


def example():
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(BATCH, LENGTH, WIDTH)),
        np.exp(rng.normal(size=(BATCH, LENGTH))),
        rng.normal(size=(PADDED, WIDTH)),
        rng.integers(0, VOCAB, (BATCH, LENGTH)),
    )


def expected(hidden, scale, table, targets, c):
    """(nats, most likely tokens, gradients of <c, nats>) over the true vocabulary."""
    products = hidden @ table[:VOCAB].T
    logits = scale[..., None] * products
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True)
    p, hot = np.exp(shifted) / total, np.eye(VOCAB)[targets]
    nats = np.log(total)[..., 0] - np.sum(shifted * hot, axis=-1)
    d_logits = c[..., None] * (p - hot)
    d_table = np.zeros_like(table)
    d_table[:VOCAB] = np.einsum("btv,btd->vd", d_logits * scale[..., None], hidden)
    return (
        nats,
        logits.argmax(axis=-1),
        scale[..., None] * d_logits @ table[:VOCAB],
        np.sum(d_logits * products, axis=-1),
        d_table,
    )


def run(hidden, scale, table, targets, c, chunk):
    """((nats, correct), gradients of <c, nats>)."""

    def loss(hidden, scale, table):
        nats, correct = cross_entropy(hidden, scale, table, jnp.asarray(targets), VOCAB, chunk)
        return jnp.sum(c * nats), (nats, correct)

    gradients, results = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(hidden, scale, table)
    return results, gradients


@pytest.mark.parametrize("chunk", [0, 1, 2, 3, 5, 8, 13, 15, 16, 50])
def test_equals_dense(chunk, x64):
    *inputs, targets = example()
    c = np.random.default_rng(1).normal(size=(BATCH, LENGTH))
    (nats, correct), gradients = run(*map(jnp.asarray, inputs), targets, c, chunk)
    wanted_nats, best, *wanted = expected(*inputs, targets, c)
    assert 0 < np.sum(best == targets) < best.size
    np.testing.assert_allclose(nats, wanted_nats, rtol=1e-12)
    np.testing.assert_array_equal(correct, best == targets)
    for got, want in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("dtype, far", [("float32", 1e3), ("float64", 1e5)])
@pytest.mark.parametrize("chunk", [0, 1, 4, 8])
def test_logits_far_above_the_first_ones(chunk, dtype, far, x64):
    """So far that exponentials relative to a maximum of the first chunk overflow."""
    hidden, scale, table, targets = example()
    hidden, scale = np.abs(hidden) + 0.1, scale + 1
    table[9] = far
    targets[0, :3] = 9
    arguments = [jnp.asarray(x, dtype) for x in (hidden, scale, table)]
    (nats, correct), gradients = run(*arguments, targets, jnp.ones(scale.shape, dtype), chunk)
    wanted_nats, best, *wanted = expected(hidden, scale, table, targets, np.ones(scale.shape))
    assert np.all(best == 9) and wanted_nats.max() > far
    rounding = float(jnp.finfo(dtype).eps) * 20 * far  # of logits
    np.testing.assert_allclose(nats, wanted_nats, rtol=rounding / far, atol=rounding)
    np.testing.assert_array_equal(correct, best == targets)
    for got, want in zip(gradients, wanted, strict=True):
        error = np.abs(got - want).max()
        assert error <= 20 * float(jnp.finfo(dtype).eps) * np.abs(want).max()


@pytest.mark.parametrize("chunk", [0, 3])
def test_bfloat16_beside_float32_tables(chunk):
    """What was rounded on its way in is exact; the table's gradient keeps its precision."""
    hidden, scale, table, targets = example()
    hidden, table = (np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in (hidden, table))
    c = np.ones((BATCH, LENGTH))
    arguments = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(scale), jnp.asarray(table)
    (nats, correct), gradients = run(*arguments, targets, c, chunk)
    wanted_nats, best, *wanted = expected(hidden, scale, table, targets, c)
    assert [x.dtype for x in (nats, correct)] == [jnp.float32] * 2
    assert [x.dtype for x in gradients] == [jnp.bfloat16, jnp.float32, jnp.float32]
    np.testing.assert_allclose(nats, wanted_nats, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(correct, best == targets)
    for got, want, bound in zip(gradients, wanted, (1e-2, 1e-4, 1e-2), strict=True):
        error = np.abs(np.asarray(got, np.float64) - want)
        assert error.max() <= bound * np.abs(want).max()


@pytest.mark.parametrize("chunk", [0, 4, 7])
def test_padding_never_wins_and_large_logits_stay_finite(chunk):
    """Padded rows with the largest logits by far change nothing."""
    *inputs, targets = example()
    hidden, scale, table = (jnp.asarray(x) for x in inputs)
    scale = scale * 3000
    c = jnp.ones(scale.shape)
    before = run(hidden, scale, table, targets, c, chunk)
    after = run(hidden, scale, table.at[VOCAB:].set(1e6), targets, c, chunk)
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.all(np.isfinite(got))


@pytest.mark.parametrize("chunk", [0, 1, 4, 7])
def test_of_equal_logits_the_first_is_the_most_likely(chunk):
    """In one chunk or in two; all logits equal, or two of them."""
    hidden, scale, _, _ = (jnp.asarray(x, jnp.float32) for x in example())
    hidden = jnp.abs(hidden)
    targets = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
    for rows, first in (((), 0), ((2, 3), 2), ((3, 10), 3), ((5,), 5)):
        table = jnp.zeros((PADDED, WIDTH)).at[jnp.asarray(rows, int)].set(1.0)
        _, correct = cross_entropy(hidden, scale, table, targets, VOCAB, chunk)
        np.testing.assert_array_equal(correct, targets == first)


@pytest.mark.parametrize("size", [-1e30, 1e30])
def test_huge_equal_logits_are_as_likely(size):
    hidden, scale = jnp.ones((BATCH, LENGTH, WIDTH)), jnp.ones((BATCH, LENGTH))
    table, targets = jnp.full((PADDED, WIDTH), size / WIDTH), jnp.zeros((BATCH, LENGTH), int)
    nats, correct = cross_entropy(hidden, scale, table, targets, VOCAB, 0)
    np.testing.assert_allclose(nats, np.log(VOCAB), rtol=1e-6)
    np.testing.assert_array_equal(correct, 1)


@pytest.mark.parametrize("chunk", [0, 4])
def test_a_token_that_is_not_finite_leaves_the_others_alone(chunk):
    *inputs, targets = example()
    hidden, scale, table = (jnp.asarray(x) for x in inputs)
    c = jnp.ones(scale.shape)
    (nats, correct), (d_hidden, d_scale, _) = run(hidden, scale, table, targets, c, chunk)
    broken = hidden.at[1, 4].set(jnp.nan)
    got = run(broken, scale, table, targets, c, chunk)
    (bad_nats, bad_correct), (bad_hidden, bad_scale, _) = got
    others = np.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) != LENGTH + 4
    for bad, good in ((bad_nats, nats), (bad_hidden, d_hidden), (bad_scale, d_scale)):
        np.testing.assert_allclose(np.asarray(bad)[others], np.asarray(good)[others], rtol=1e-5)
        assert np.all(np.isnan(np.asarray(bad)[~others]))
    np.testing.assert_array_equal(np.asarray(bad_correct)[others], np.asarray(correct)[others])
    assert bad_correct[1, 4] == 0


@pytest.mark.parametrize(
    "rows, most, size",
    [
        (32000, 4096, 3200),
        (50304, 4096, 3968),
        (32000, 0, 32000),
        (32000, 32000, 32000),
        (256, 4096, 256),
        (16, 5, 4),
        (16, 3, 2),
        (13, 5, 5),
        (13, 1, 1),
    ],
)
def test_chunks_divide_the_table_or_nearly(rows, most, size):
    assert chunk_rows(rows, most) == size
    for other in range(1, 300):
        length = chunk_rows(rows, other)
        assert 1 <= length <= min(rows, other) and -(-rows // length) * length < rows + length
