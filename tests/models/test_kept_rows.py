"""Rows that are run and rows that are not: values, gradients, and which of the branches runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nag_jax.models import kept_rows
from nag_jax.models.blocks import remat_policy
from nag_jax.models.kept_rows import capacities
from nag_jax.models.linear import Numerics, contract

BATCH, LENGTH, D, WIDTH = 3, 7, 5, 8  # 21 rows, of which no eighth is a whole number
ROWS = BATCH * LENGTH


def function(dtype, w, rows):
    """A multilayer perceptron as the layers use it."""
    numerics = Numerics(dtype)
    hidden = jax.nn.gelu(contract("up", rows, w["up"], numerics))
    return contract("down", hidden, w["down"], numerics)


def example(dtype="float32", rows=(BATCH, LENGTH)):
    rng = np.random.default_rng(0)
    weights = {"up": rng.normal(size=(D, WIDTH)), "down": rng.normal(size=(WIDTH, D))}
    x, c = rng.normal(size=(2, *rows, D))
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), (weights, x, c))


def keep_of(count, rows=(BATCH, LENGTH)):
    """Which rows are kept, at random places."""
    places = np.random.default_rng(count).permutation(np.prod(rows)) < count
    return jnp.asarray(places.reshape(rows))


@functools.partial(jax.jit, static_argnums=(0, 1))
def value_and_gradients(dtype, gathers, weights, x, c, keep):
    """Of <c, y> over kept rows alone."""

    def run(weights, x):
        y = function(dtype, weights, x)
        if gathers:
            y = kept_rows._on_device(functools.partial(function, dtype), weights, x, keep)
        return jnp.where(keep[..., None], y, 0)

    y, pull_back = jax.vjp(run, weights, x)
    return y, pull_back(c)


def test_capacities():
    assert capacities(21) == [0, 6, 11, 14, 16, 19, 21]
    assert capacities(1) == [0, 1]
    assert capacities(16) == [0, 4, 8, 10, 12, 14, 16]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("bfloat16", 2e-2)])
def test_every_number_of_kept_rows(dtype, tolerance):
    """Values and gradients are those of all rows, masked: every rung, none and all."""
    with jax.enable_x64(dtype == "float64"):
        weights, x, c = example(dtype)
        for count in range(ROWS + 1) if dtype == "float64" else (0, 5, 12, 21):
            keep = keep_of(count)
            got = value_and_gradients(dtype, True, weights, x, c, keep)
            wanted = value_and_gradients(dtype, False, weights, x, c, keep)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
                assert a.dtype == b.dtype == dtype
                a, b = (np.asarray(leaf, np.float64) for leaf in (a, b))
                np.testing.assert_allclose(a, b, atol=tolerance * max(np.abs(b).max(), 1))
            assert not np.any(np.asarray(got[1][1])[~np.asarray(keep)])  # no gradient for others


@pytest.mark.parametrize("kept", [False, True])
def test_one_row(kept):
    weights, x, c = example(rows=(1, 1))
    keep = jnp.full((1, 1), kept)
    y, (d_weights, d_x) = value_and_gradients("float32", True, weights, x, c, keep)
    wanted, (d_wanted, _) = value_and_gradients("float32", False, weights, x, c, keep)
    np.testing.assert_allclose(y, wanted, rtol=1e-5)
    np.testing.assert_allclose(d_weights["up"], d_wanted["up"], rtol=1e-5, atol=1e-6)
    assert bool(np.any(d_x)) == kept


def test_what_runs_follows_the_number_of_kept_rows():
    """Told by the branch that runs, forward and backward: the smallest that holds the rows."""
    ran = []

    def watched(w, rows):
        jax.debug.callback(lambda _: ran.append(rows.shape[0]), rows[0, 0])
        return rows @ w["up"] @ w["down"]

    weights, x, _ = example()

    @jax.jit
    def loss(weights, x, keep):
        y = kept_rows._on_device(watched, weights, x, keep)
        return jnp.sum(jnp.where(keep[..., None], y, 0) ** 2)

    for count in (0, 1, 6, 7, 13, 16, 20, 21):
        ran.clear()
        jax.block_until_ready(loss(weights, x, keep_of(count)))
        jax.effects_barrier()
        smallest = min(n for n in capacities(ROWS) if n >= count)
        assert ran == [smallest] * (smallest > 0)


def products(jaxpr):
    """How many matrix products there are in a program and in those inside it."""
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name == "dot_general"
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += products(inner)
    return found


@pytest.mark.parametrize("policy", ["dots_saveable", "dots_with_no_batch_dims_saveable"])
def test_products_are_not_run_again(policy):
    """Remat policies keep the forward pass's products: two in each branch, four in the backward."""
    weights, x, c = example()
    keep = keep_of(9)

    def run(weights, x):
        y = kept_rows._on_device(functools.partial(function, "float32"), weights, x, keep)
        return jnp.where(keep[..., None], y, 0)

    def count(run):
        def gradients(weights, x, c):
            y, pull_back = jax.vjp(run, weights, x)
            return y, pull_back(c)

        # As compiled: what no output needs is gone.
        made = jax.make_jaxpr(gradients)(weights, x, c).jaxpr
        kept, _ = jax.interpreters.partial_eval.dce_jaxpr(made, [True] * len(made.outvars))
        return products(kept)

    branches = len(capacities(ROWS)) - 1
    again = count(jax.checkpoint(run, policy=remat_policy("nothing_saveable")))
    saved = count(jax.checkpoint(run, policy=remat_policy(policy)))
    assert saved == count(run) == 6 * branches
    assert again == saved + branches
