"""The gradient by hand is the derivative of the definition, and its forward pass the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.nag_update.gradient import joint_sums, separate_sums, update_gradient
from pallas_kernels.nag_update.one_token import backward_token, forward_token
from pallas_kernels.nag_update.reference import update_formula, with_pass_through

GAINS = (0, 1e-6, 0.1, 1, 10, 1e6)


@pytest.mark.parametrize("width", [3, 64, 257])
def test_equals_the_definition(width, x64):
    """To float64's rounding, for usual and degenerate branches and any gain."""
    rng = np.random.default_rng(width)
    r, f, c = rng.normal(size=(3, 6, width))
    branches = (f + 0.5, -2 * r + 1e-5 * f, 0 * f + 3, 0 * f, 1e-12 * f)
    f = jnp.concatenate([jnp.asarray(branch) for branch in branches])
    r, c = (jnp.tile(jnp.asarray(x), (5, 1)) for x in (r, c))
    a, s = jnp.tile(jnp.asarray(GAINS), 5), jnp.asarray(rng.normal(size=30))

    updated, growth = jax.jit(jax.vmap(forward_token))(r, f, a)
    expected, log_gain = with_pass_through(r, f, a)
    np.testing.assert_allclose(updated, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(jnp.log1p(growth) / 2, log_gain, rtol=1e-9, atol=1e-15)
    np.testing.assert_array_equal(updated[::6], r[::6])

    wanted = jax.jit(lambda *inputs: jax.vjp(update_formula, *inputs)[1]((c, s)))(r, f, a)
    for way in (
        jax.vmap(backward_token),
        functools.partial(update_gradient, sums=separate_sums),
        functools.partial(update_gradient, sums=joint_sums),
    ):
        for x, y in zip(jax.jit(way)(r, f, a, c, s), wanted, strict=True):
            # What cancels in one of them is small beside the largest entry of its token.
            scale = jnp.abs(y.reshape(30, -1)).max(axis=-1) + 1e-12
            error = jnp.abs(x - y).reshape(30, -1).max(axis=-1)
            assert jnp.all(error <= 1e-7 * scale), error / scale


def test_features_may_be_filled_up(x64):
    """With zeros behind a token its gradients are those of the token alone."""
    rng = np.random.default_rng(0)
    r, f, c = jnp.asarray(rng.normal(size=(3, 4, 5)))
    a, s = jnp.asarray(rng.uniform(size=(2, 4)))
    padded = (jnp.pad(x, ((0, 0), (0, 3))) for x in (r, f, c))
    r8, f8, c8 = padded
    got = update_gradient(r8, f8, a, c8, s, width=5)
    for x, y in zip(got, update_gradient(r, f, a, c, s), strict=True):
        np.testing.assert_allclose(x[..., :5] if x.ndim > 1 else x, y, rtol=1e-12, atol=1e-12)


def test_sums_in_one_reduction_can_be_differentiated_twice(x64):
    """As an analysis of curvature does, through the update and its gradient."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6)))

    def loss(sums):
        return lambda x: jnp.sum(sums(x * x, x)[0] * jnp.sin(sums(x, x**3)[1]))

    for way in (jax.grad, jax.hessian):
        np.testing.assert_allclose(
            way(loss(joint_sums))(x), way(loss(separate_sums))(x), rtol=1e-12
        )
