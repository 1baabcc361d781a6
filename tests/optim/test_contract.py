"""What every optimizer keeps to: stable trees and dtypes, one compilation, finite updates."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_examples import config, model_infos, random_like

from nag_jax.optim import (
    build_optimizer,
    kl_shampoo,
    muon,
    shampoo,
    sign_descent,
    soap,
    spectral_descent,
)
from nag_jax.parameters import flatten

INFOS = model_infos()
MATRICES = {
    path: (info.rows, info.columns) if info.role == "matrix" else None
    for path, info in flatten(INFOS).items()
}
KINDS = {
    "muon": muon,
    "soap": partial(soap, refresh_every=2),
    "soap, staggered": partial(soap, refresh_every=2, stagger=True),
    "soap, blocks": partial(soap, refresh_every=2, block_size=7),
    "soap, one side": partial(soap, refresh_every=2, max_side=16),
    "shampoo": partial(shampoo, refresh_every=2),
    "shampoo, staggered": partial(shampoo, refresh_every=2, stagger=True, grafting="none"),
    "kl_shampoo": partial(kl_shampoo, refresh_every=2),
    "kl_shampoo, one side": partial(kl_shampoo, refresh_every=2, max_side=16),
    "sign": lambda rate, matrices: sign_descent(rate, momentum=0.9),
    "spectral": spectral_descent,
}
RATES = {
    "a number": 1e-3,
    "NumPy": np.float32(1e-3),
    "JAX": jnp.float32(1e-3),
    "a schedule": optax.linear_schedule(1e-3, 1e-4, 5),
}
OPTIMIZERS = (
    {name: partial(make, 1e-3, matrices=MATRICES) for name, make in KINDS.items()}
    | {
        f"muon, {name}": partial(muon, rate, matrices=MATRICES)
        for name, rate in RATES.items()
        if name != "a number"
    }
    | {
        f"run, {kind}": lambda kind=kind: build_optimizer(config(kind=kind), 10, INFOS)[0]
        for kind in ("adamw", "muon")
    }
    | {
        "run, muon in bfloat16": lambda: build_optimizer(
            config(scaling="keller", newton_schulz_dtype="bfloat16"), 10, INFOS
        )[0],
        "run, soap, a matrix a head": lambda: build_optimizer(
            config(kind="soap", split_heads=True), 10, INFOS
        )[0],
    }
)
# What has parts of its own is checked in the default suite, the rest beside it.
FEW = ("soap", "shampoo", "kl_shampoo", "run, muon")
pytestmark = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW)) for name in OPTIMIZERS],
)


@cache
def made(name):
    """A transform and its update, compiled once for all tests of float32."""
    transform = OPTIMIZERS[name]()
    return transform, jax.jit(transform.update)


def signature(tree):
    types = [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]
    return jax.tree.structure(tree), types


def test_state_can_be_donated_as_init_returns_it(name):
    """No two arrays of it are one: a buffer cannot be given away twice."""
    transform, _ = made(name)
    leaves = jax.tree.leaves(transform.init(random_like(INFOS, 6)))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_tree_shapes_and_dtypes_are_stable_and_compile_once(name, dtype):
    transform, _ = made(name)
    params = random_like(INFOS, 0, dtype=dtype)
    state = transform.init(params)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    state_signature, params_signature = signature(state), signature(params)
    traces = []

    @jax.jit
    def step(params, state, grads):
        traces.append(None)
        updates, state = transform.update(grads, state, params)
        assert signature(updates) == params_signature
        return optax.apply_updates(params, updates), state, updates

    for i in range(3):
        params, state, updates = step(params, state, random_like(INFOS, i, dtype=dtype))
        assert signature(params) == params_signature
        assert signature(state) == state_signature
        for path, update in flatten(updates).items():
            assert np.isfinite(update).all() and (i == 0 or np.any(update)), path
    assert len(traces) == 1


def test_zero_gradients_give_finite_updates(name):
    transform, update = made(name)
    params = random_like(INFOS, 3)
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = transform.init(params)
    for _ in range(30):
        updates, state = update(zeros, state, params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((updates, state)))


def test_state_is_made_without_arrays(name):
    transform, _ = made(name)
    params = random_like(INFOS, 4)
    abstract = jax.eval_shape(transform.init, params)
    assert signature(abstract) == signature(transform.init(params))


def test_optax_tree_map_params_works(name):
    transform, _ = made(name)
    state = transform.init(random_like(INFOS, 5))
    marked = optax.tree_map_params(
        transform, lambda _: "parameter", state, transform_non_params=lambda _: "other"
    )
    assert jax.tree.structure(marked) == jax.tree.structure(state)
    for mark, leaf in zip(jax.tree.leaves(marked), jax.tree.leaves(state), strict=True):
        assert mark == "parameter" or (leaf.shape == () and leaf.dtype == jnp.int32)


def test_a_tiny_gradient_of_rank_one(name):
    transform, update = made(name)
    params = random_like(INFOS, 6)
    tiny = jax.tree.map(lambda p: jnp.full(p.shape, 1e-20), params)
    state = transform.init(params)
    for _ in range(5):
        updates, state = update(tiny, state, params)
        for path, leaf in flatten(updates).items():
            assert np.isfinite(leaf).all() and np.abs(leaf).max() < 1, path
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_one_gradient_that_is_not_finite(name):
    """It is as if it had been zero; nothing of it stays."""
    if "run" in name:
        pytest.skip("training skips the whole step, since the global norm is not finite either")
    transform, update = made(name)
    params = random_like(INFOS, 7)
    state = transform.init(params)
    for i in range(5):
        gradients = random_like(INFOS, 8 + i)
        if i in (0, 2):
            gradients = jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(np.nan), gradients)
        updates, state = update(gradients, state, params)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((updates, state)))
