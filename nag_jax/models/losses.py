"""Cross-entropy over a vocabulary without holding every logit at once.

The table's rows are taken in chunks. Forward, each token sums exponentials relative to a reference
that is known before the products are, so that XLA for TPU reduces a chunk's logits as its matrix
units make them and writes none. Backward, probabilities are made again from the kept normaliser and
rounded cotangents alone are written; automatic differentiation would reduce all chunks again.

The reference is the largest of the first few logits, of each device's where the vocabulary is
split. A logit may exceed it by 66 before float32 comes near its end; then all is done again
relative to the true maximum.

Chunks are of the vocabulary and not of tokens: the gradient of a chunk's rows is done with the
chunk, where with chunks of tokens the whole table's is read, added to and written for each of them,
and sent to the other devices each time.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nag_jax.models.linear import inner_products
from nag_jax.sharding import rules

# Chunks are multiples of this, unless they were asked for finer: lanes of a TPU, tiles of a GPU.
ALIGNMENT = 128
# Rows whose largest logit is the first reference.
SAMPLE = 128


def cross_entropy(
    hidden: Float[Array, "B T d"],
    scale: Float[Array, "B T"],
    matrix: Float[Array, "V d"],
    targets: Int[Array, "B T"],
    vocab_size: int,
    chunk: int,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Negative log-likelihood of each target, and whether it was the most likely token.

    Logits are `scale` times the inner products of hidden states and rows. On a mesh each device
    takes its own rows of the batch and its own part of the vocabulary; the matrix is gathered, in
    the dtype of `hidden`, and its gradient sent where it is stored, chunk by chunk.

    Args:
        hidden: Final hidden states.
        scale: Inverse temperatures, at least float32; the results have this dtype.
        matrix: Rows of the vocabulary in their stored precision, which their gradient has, too.
        targets: Target tokens, below `vocab_size`.
        vocab_size: True vocabulary; rows from there on are padding and get no probability.
        chunk: Most rows of the vocabulary taken at a time; 0 for all.

    Returns:
        (nats, correct), both [B, T]; of equal logits the first is the most likely.
    """
    return _cross_entropy(
        hidden, scale, matrix, targets, _Sizes(vocab_size, chunk), _split(hidden, matrix)
    )


def chunk_rows(rows: int, most: int) -> int:
    """Rows of a chunk of at most `most` (0: all).

    A divisor of `rows` where there is one of at least half of `most`, so that nothing is padded.
    """
    if most == 0 or most >= rows:
        return rows
    unit = math.gcd(most, ALIGNMENT)
    whole = [size for size in range(unit, most + 1, unit) if rows % size == 0]
    if whole and whole[-1] >= most / 2:
        return whole[-1]
    return -(-rows // (-(-rows // most) * unit)) * unit


class _Sizes(NamedTuple):
    vocab_size: int
    chunk: int


class _Split(NamedTuple):
    """Whether there is a mesh, and its axes that split the batch's rows, vocabulary and width."""

    mesh: bool = False
    rows: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    width: tuple[str, ...] = ()


def _split(hidden: Array, matrix: Array) -> _Split:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or not rules.in_use(mesh):
        return _Split()
    rows = rules.mesh_axes(rules.rows_spec(hidden.shape[0], mesh), 0, mesh)
    stored = rules.stored_spec(("vocabulary", "embed"), matrix.shape, mesh)
    vocabulary, width = (rules.mesh_axes(stored, axis, mesh) for axis in (0, 1))
    # Devices with the same rows of the batch have the same gradient: nothing to be summed.
    return _Split(True, rows, vocabulary, width if rows else ())


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _cross_entropy(hidden, scale, matrix, targets, sizes, split):
    return _forward(hidden, scale, matrix, targets, sizes, split)[0]


def _forward(hidden, scale, matrix, targets, sizes, split):
    run = functools.partial(_statistics, sizes=sizes, split=split)
    tokens, wide, table = _specs(split)
    nats, correct, *kept = _on_each_device(
        run, split, (wide, tokens, table, tokens), (tokens,) * 5
    )(hidden, scale, matrix, targets)
    return (nats, correct), (hidden, scale, matrix, targets, *kept)


def _backward(sizes, split, residuals, cotangents):
    run = functools.partial(_gradients, sizes=sizes, split=split)
    tokens, wide, table = _specs(split)
    d_nats, _ = cotangents
    gradients = _on_each_device(
        run, split, (wide, tokens, table, *(tokens,) * 5), (wide, tokens, table)
    )(*residuals, d_nats)
    return *gradients, None


_cross_entropy.defvjp(_forward, _backward)


def _specs(split):
    """How numbers of tokens, hidden states and the matrix are split."""
    rows = split.rows or None
    return (
        jax.P(rows, None),
        jax.P(rows, None, None),
        jax.P(split.vocabulary or None, split.width or None),
    )


def _on_each_device(run, split, in_specs, out_specs):
    if not split.mesh:
        return run
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False)


class _Chunks:
    """The chunks of a device's rows of the vocabulary."""

    def __init__(self, matrix, dtype, sizes, split):
        self.rows, self.sizes, self.split = matrix.shape[0], sizes, split
        self.length = chunk_rows(self.rows, sizes.chunk)
        self.number = -(-self.rows // self.length)
        # Cast before a chunk is sent anywhere.
        self.matrix = jnp.pad(
            matrix.astype(dtype), ((0, self.number * self.length - self.rows), (0, 0))
        )
        self.first = jax.lax.axis_index(split.vocabulary) * self.rows if split.vocabulary else 0

    def part(self, start, length):
        """(rows whole along the width, their tokens, which of them are in the vocabulary)."""
        rows = jax.lax.dynamic_slice_in_dim(self.matrix, start, length)
        if self.split.width:
            rows = jax.lax.all_gather(rows, self.split.width, axis=1, tiled=True)
        row = start + jnp.arange(length)
        tokens = self.first + row
        return rows, tokens, (row < self.rows) & (tokens < self.sizes.vocab_size)

    def summed(self, d_rows):
        """The sum of gradients of a chunk over the devices, as the matrix is stored."""
        width, rows = self.split.width, self.split.rows
        if width:
            d_rows = jax.lax.psum_scatter(d_rows, width, scatter_dimension=1, tiled=True)
        others = tuple(axis for axis in rows if axis not in width)
        return jax.lax.psum(d_rows, others) if others else d_rows

    def scan(self, body, carry):
        """Scans `body(carry, part)` over the chunks; stacked outputs are rows of the matrix."""

        def one(carry, start):
            return body(carry, self.part(start, self.length))

        if self.number == 1:
            carry, rows = one(carry, 0)
        else:
            carry, rows = jax.lax.scan(one, carry, jnp.arange(self.number) * self.length)
        if rows is not None:
            rows = rows.reshape(-1, rows.shape[-1])[: self.rows]
        return carry, rows


class _Found(NamedTuple):
    """What is known of each token after some chunks, all [N].

    Attributes:
        before: The largest logit of the tokens before the target.
        after: The largest logit of those after it.
        total: Sum of exp(logit - reference).
        weighted: Sum of exp(logit - reference) times the inner product.
        chosen: The target's inner product, or 0.
    """

    before: Array
    after: Array
    total: Array
    weighted: Array
    chosen: Array


def _logits(x, scale, rows, true):
    """(inner products, logits), the latter as low as can be for what is not in the vocabulary.

    Selected, so that forward and backward a logit is rounded before anything is subtracted from it:
    compilers would else do both in one step, and half a unit of a large logit is much of its
    exponential.
    """
    products = inner_products("nd,vd->nv", x, rows, scale.dtype)
    return products, jnp.where(true, products * scale, jnp.finfo(scale.dtype).min)


def _statistics(hidden, scale, matrix, targets, sizes, split):
    """(nats, correct, reference, log of the sum relative to it, d nats/d scale), as `scale`."""
    chunks = _Chunks(matrix, hidden.dtype, sizes, split)
    x, a, t = _flat(hidden), scale.reshape(-1, 1), targets.reshape(-1, 1)
    lowest = jnp.finfo(scale.dtype).min

    def find(reference):
        def body(found, part):
            rows, tokens, true = part
            products, logits = _logits(x, a, rows, true)
            weights = jnp.exp(logits - reference[:, None])
            known = jax.lax.stop_gradient(logits)
            before, after = (jnp.where(side, known, lowest) for side in (tokens < t, tokens > t))
            return _Found(
                jnp.maximum(found.before, jnp.max(before, axis=-1)),
                jnp.maximum(found.after, jnp.max(after, axis=-1)),
                found.total + jnp.sum(weights, axis=-1),
                found.weighted + jnp.sum(weights * products, axis=-1),
                found.chosen + jnp.sum(jnp.where(true & (tokens == t), products, 0), axis=-1),
            ), None

        zeros = jnp.zeros_like(reference)
        found, _ = chunks.scan(body, _Found(zeros + lowest, zeros + lowest, zeros, zeros, zeros))
        if over := split.vocabulary:
            peaks = jax.lax.stop_gradient((found.before, found.after))
            found = _Found(*jax.lax.pmax(peaks, over), *jax.lax.psum(found[2:], over))
        return found

    rows, _, true = chunks.part(0, min(SAMPLE, chunks.rows))
    reference = jax.lax.stop_gradient(jnp.max(_logits(x, a, rows, true)[1], axis=-1))
    if split.vocabulary:
        reference = jax.lax.pmax(reference, split.vocabulary)
    found = find(reference)
    peak = jnp.maximum(found.before, found.after)
    peak = jax.lax.stop_gradient(jnp.maximum(peak, found.chosen * a[:, 0]))
    if chunks.rows > SAMPLE:  # else it is the maximum
        # Far enough from overflow for sums weighted with inner products. Below 1 is a sum whose
        # reference was rounded otherwise, by so much if logits are huge. A NaN is left as it is.
        limit = float(jnp.finfo(scale.dtype).max) ** 0.75
        again = jnp.any((found.total > limit) | (found.total < 1 / limit))
        if everywhere := split.rows + split.vocabulary:  # what follows sends, if it is done at all
            again = jax.lax.pmax(again.astype(jnp.int32), everywhere) > 0
        found, reference = jax.lax.cond(
            again,
            lambda: (find(peak), peak),
            lambda: (found, reference),
        )

    logit, log_total = found.chosen * a[:, 0], jnp.log(found.total)
    correct = (logit > found.before) & (logit >= found.after)
    results = (
        (reference - logit) + log_total,
        correct.astype(scale.dtype),
        reference,
        log_total,
        found.weighted / found.total - found.chosen,
    )
    return tuple(x.reshape(scale.shape) for x in results)


def _gradients(hidden, scale, matrix, targets, reference, log_total, slope, d_nats, sizes, split):
    """Of hidden states, scales and matrix: d_logit_v = d_nats (p_v - [v = target])."""
    chunks = _Chunks(matrix, hidden.dtype, sizes, split)
    x, t = _flat(hidden), targets.reshape(-1, 1)
    a, reference, log_total, factor = (
        y.reshape(-1, 1) for y in (scale, reference, log_total, d_nats * scale)
    )

    def body(d_hidden, part):
        rows, tokens, true = part
        _, logits = _logits(x, a, rows, true)
        difference = jnp.exp((logits - reference) - log_total) - (tokens == t)
        # Rounded before the products: a wider operand would cost a TPU three passes of its matrix
        # units, and keep a GPU off them.
        d_products = jnp.where(true, difference * factor, 0).astype(hidden.dtype)
        d_hidden += inner_products("nv,vd->nd", d_products, rows, scale.dtype)
        d_rows = inner_products("nv,nd->vd", d_products, x, scale.dtype)
        return d_hidden, chunks.summed(d_rows.astype(matrix.dtype))

    d_hidden, d_matrix = chunks.scan(body, jnp.zeros(x.shape, scale.dtype))
    if split.vocabulary:
        d_hidden = jax.lax.psum(d_hidden, split.vocabulary)
    return d_hidden.astype(hidden.dtype).reshape(hidden.shape), d_nats * slope, d_matrix


def _flat(x):
    return x.reshape(-1, x.shape[-1])
