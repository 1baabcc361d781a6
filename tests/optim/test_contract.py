"""What every optimizer keeps to: stable trees and dtypes, one compilation, finite updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_examples import config, model_infos, random_like

from nag_jax.optim import build_optimizer, muon
from nag_jax.parameters import flatten

INFOS = model_infos()
MATRICES = {
    path: (info.rows, info.columns) if info.role == "matrix" else None
    for path, info in flatten(INFOS).items()
}
OPTIMIZERS = {
    "muon": lambda: muon(1e-3, matrices=MATRICES),
    "muon, schedule": lambda: muon(optax.linear_schedule(1e-3, 1e-4, 5), matrices=MATRICES),
    "muon, numpy rate": lambda: muon(np.float32(1e-3), matrices=MATRICES),
    "run, adamw": lambda: build_optimizer(config(kind="adamw"), 10, INFOS)[0],
    "run, muon": lambda: build_optimizer(config(), 10, INFOS)[0],
    "run, muon in bfloat16": lambda: build_optimizer(
        config(scaling="keller", newton_schulz_dtype="bfloat16"), 10, INFOS
    )[0],
}
pytestmark = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def signature(tree):
    types = [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]
    return jax.tree.structure(tree), types


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_tree_shapes_and_dtypes_are_stable_and_compile_once(make, dtype):
    transform = make()
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
            assert np.isfinite(update).all() and np.any(update), path
    assert len(traces) == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_zero_gradients_give_finite_updates(make, dtype):
    transform = make()
    params = random_like(INFOS, 3, dtype=dtype)
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = transform.init(params)
    for _ in range(2):
        updates, state = jax.jit(transform.update)(zeros, state, params)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((updates, state)))


def test_state_is_made_without_arrays(make):
    transform = make()
    params = random_like(INFOS, 4)
    abstract = jax.eval_shape(transform.init, params)
    assert signature(abstract) == signature(transform.init(params))


def test_optax_tree_map_params_works(make):
    transform = make()
    state = transform.init(random_like(INFOS, 5))
    marked = optax.tree_map_params(
        transform, lambda _: "parameter", state, transform_non_params=lambda _: "other"
    )
    assert jax.tree.structure(marked) == jax.tree.structure(state)
    for mark, leaf in zip(jax.tree.leaves(marked), jax.tree.leaves(state), strict=True):
        assert mark == "parameter" or (leaf.shape == () and leaf.dtype == jnp.int32)
