"""The gradient by hand is the derivative of the definition, and its forward pass the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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

    got = jax.jit(jax.vmap(backward_token))(r, f, a, c, s)
    wanted = jax.jit(lambda *inputs: jax.vjp(update_formula, *inputs)[1]((c, s)))(r, f, a)
    for x, y in zip(got, wanted, strict=True):
        # What cancels in one of them is small beside the largest entry of its token.
        scale = jnp.abs(y.reshape(30, -1)).max(axis=-1) + 1e-12
        error = jnp.abs(x - y).reshape(30, -1).max(axis=-1)
        assert jnp.all(error <= 1e-7 * scale), error / scale
