"""Stacks, blocks, refreshes in turn and failures: what SOAP, Shampoo and KL-Shampoo share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nag_jax.optim import scale_by_kl_shampoo, scale_by_shampoo, scale_by_soap
from nag_jax.optim.matrices import blocks_of, from_blocks, to_blocks
from nag_jax.optim.preconditioned import preconditioned
from nag_jax.optim.roles import MatrixAxes

MATRIX = MatrixAxes((0,), (1,))


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "axes", "largest", "batch", "sides"),
    [
        ((6, 4), MATRIX, 0, (), (6, 4)),
        ((6, 4), MATRIX, 6, (), (6, 4)),
        ((6, 4), MATRIX, 4, (2, 1), (3, 4)),
        ((7, 10), MATRIX, 4, (2, 3), (4, 4)),
        ((5, 7, 3, 2), MatrixAxes((1,), (2, 3)), 4, (5, 2, 2), (4, 3)),
        ((2, 3, 4, 5), MatrixAxes((3,), (0,)), 4, (3, 4, 2, 1), (3, 2)),
    ],
)
def test_blocks_there_and_back(shape, axes, largest, batch, sides):
    leaf = normal(0, *shape)
    blocks = blocks_of(shape, axes, largest)
    assert (blocks.batch, (blocks.rows, blocks.columns)) == (batch, sides)
    stack = to_blocks(leaf, blocks)
    assert stack.shape == (*batch, *sides)
    np.testing.assert_array_equal(from_blocks(stack, blocks), leaf)


def test_a_block_is_a_corner_of_the_matrix():
    leaf = normal(1, 7, 10)
    stack = to_blocks(leaf, blocks_of(leaf.shape, MATRIX, 4))
    np.testing.assert_array_equal(stack[1, 0, :3], leaf[4:, :4])
    np.testing.assert_array_equal(stack[1, 0, 3:], np.zeros((1, 4)))


@pytest.mark.parametrize("make", [scale_by_soap, scale_by_shampoo, scale_by_kl_shampoo])
def test_blocks_are_matrices_of_their_own(make):
    transform = make(block_size=4, refresh_every=2)
    whole = make(block_size=0, refresh_every=2)
    gradients = [{"w": normal(step, 8, 4)} for step in range(6)]
    halves = [{"top": g["w"][:4], "bottom": g["w"][4:]} for g in gradients]
    state, parts = transform.init(gradients[0]), whole.init(halves[0])
    for gradient, half in zip(gradients, halves, strict=True):
        direction, state = jax.jit(transform.update)(gradient, state)
        expected, parts = jax.jit(whole.update)(half, parts)
        expected = np.concatenate([expected["top"], expected["bottom"]])
        np.testing.assert_allclose(direction["w"], expected, rtol=1e-4, atol=1e-4)


class Counting(NamedTuple):
    """A rule whose arrays count refreshes, and fail to where the gradient says so."""

    names: tuple = ("count",)
    first_refresh: int = 1

    def init(self, blocks, dtype):
        return {"count": jnp.zeros((*blocks.batch, 1, 1), dtype)}

    def update(self, gradient, arrays, step, refresh):
        def function(count, own):
            return (jnp.where(own[:1, :1] > 99, jnp.nan, count + 1),)

        old = (arrays["count"],)
        (new,) = refresh(function, (*old, gradient), old)
        return gradient, {"count": new}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("every", [1, 3, 4, 10])
def test_each_matrix_is_refreshed_once_in_so_many_steps(first, stagger, every):
    transform = preconditioned(
        Counting(first_refresh=first), every, stagger, 0, {"*": "stacked_matrix"}
    )
    gradient = {"a": jnp.ones((7, 2, 2)), "b": jnp.ones((2, 2)), "c": jnp.ones((2, 3, 2, 2))}
    state = transform.init(gradient)
    update = jax.jit(transform.update)
    counts = []
    for _ in range(3 * every + 1):
        _, state = update(gradient, state)
        counts.append(np.concatenate([np.ravel(x) for x in state.arrays["count"].values()]))
    counts = np.asarray(counts)
    np.testing.assert_array_equal(counts[0], np.full(14, 1 - first))
    refreshed = np.diff(counts, axis=0)
    for window in range(len(refreshed) - every + 1):
        np.testing.assert_array_equal(refreshed[window : window + every].sum(axis=0), np.ones(14))
    together = refreshed.sum(axis=1)
    if stagger:
        assert together.max() <= 7 // every + 6 // every + 3
    else:
        assert set(together) <= {0, 14}


def test_a_refresh_that_fails_is_counted_and_leaves_what_was():
    transform = preconditioned(Counting(), 1, False, 0, {"*": "stacked_matrix"})
    good = {"a": jnp.ones((3, 2, 2))}
    bad = {"a": good["a"].at[1].set(100.0)}
    state = transform.init(good)
    for gradient in (good, good, bad):
        _, state = transform.update(gradient, state)
    np.testing.assert_array_equal(np.ravel(state.arrays["count"]["a"]), [2, 1, 2])
    assert (int(state.failed), int(state.rejected)) == (1, 0)


@pytest.mark.parametrize("make", [scale_by_soap, scale_by_shampoo, scale_by_kl_shampoo])
def test_a_gradient_that_is_not_finite_counts_as_zero_for_its_matrix(make):
    transform = make(refresh_every=2, matrices={"*": "stacked_matrix"})
    state = zeroed = transform.init({"a": normal(0, 3, 4, 4)})
    update = jax.jit(transform.update)
    for step in range(5):
        gradient = normal(step, 3, 4, 4)
        bad, zero = gradient.copy(), gradient.copy()
        if step == 3:
            bad[1, 2, 2] = np.inf
            zero[1] = 0
        found, state = update({"a": bad}, state)
        expected, zeroed = update({"a": zero}, zeroed)
        np.testing.assert_array_equal(found["a"], expected["a"])
    assert int(state.rejected) == 1


def test_a_failed_basis_is_counted():
    """Factors overflow, so their refreshes fail; the basis stays and directions stay finite."""
    transform = scale_by_soap(refresh_every=1)
    gradient = {"w": normal(0, 4, 4)}
    state = transform.init(gradient)
    _, state = transform.update(gradient, state)
    basis = state.arrays["left_basis"]["w"]
    _, state = transform.update({"w": 1e30 * gradient["w"]}, state)
    assert int(state.failed) == 1
    np.testing.assert_array_equal(state.arrays["left_basis"]["w"], basis)
