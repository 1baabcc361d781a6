"""Which parameter each array of the state belongs to, and that the state survives a checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from optimizer_examples import config, model_infos, random_like

from nag_jax.optim import build_optimizer, muon, state_like_params
from nag_jax.parameters import flatten

INFOS = model_infos()
ABSTRACT = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), INFOS)


def names_tree(tree, prefix=""):
    return {
        k: names_tree(v, f"{prefix}{k}/") if isinstance(v, dict) else f"{prefix}{k}"
        for k, v in tree.items()
    }


@pytest.mark.parametrize(("kind", "copies"), [("adamw", 2), ("muon", 1)])
def test_every_array_of_the_state_names_its_parameter(kind, copies):
    """By the path the array has in the state, on abstract parameters."""
    transform, _ = build_optimizer(config(kind=kind), 10, INFOS)
    marked = state_like_params(transform, ABSTRACT, names_tree(INFOS), "none")
    state = jax.eval_shape(transform.init, ABSTRACT)
    assert jax.tree.structure(marked) == jax.tree.structure(state)
    names = jax.tree.leaves(marked)
    for (path, leaf), name in zip(jax.tree_util.tree_leaves_with_path(state), names, strict=True):
        if name == "none":
            assert leaf.shape == () and leaf.dtype == jnp.int32
        else:
            keys = jax.tree_util.keystr(path, simple=True, separator="/")
            assert keys.endswith(f"/{name}")
            assert leaf.shape == flatten(INFOS)[name].shape
    for path, info in flatten(INFOS).items():
        assert names.count(path) == (copies if info.role == "matrix" else 2), path


def test_the_longest_path_and_the_shape_decide():
    params = {"w": jnp.ones((2, 3)), "a": {"w": jnp.ones((2, 3))}, "count": jnp.ones(())}

    def init(params):
        factors = jax.tree.map(lambda p: jnp.ones((7, 7)), params)
        return {"copies": params, "factors": factors, "steps": optax.ScaleByScheduleState(0)}

    transform = optax.GradientTransformation(init, None)
    values = {"w": 1, "a": {"w": 2}, "count": 3}
    assert state_like_params(transform, params, values, None) == {
        "copies": values,
        "factors": {"w": None, "a": {"w": None}, "count": None},
        "steps": optax.ScaleByScheduleState(None),
    }


def test_values_may_be_partition_specs():
    """They are tuples, or trees of their own, and must still count as one value each."""
    specs = jax.tree.map(lambda i: jax.P(*i.axes), INFOS)
    transform, _ = build_optimizer(config(), 10, INFOS)
    marked = state_like_params(transform, ABSTRACT, specs, jax.P())
    matrices = marked[1].inner_states["matrix"].inner_state[0].momentum
    assert matrices["blocks"]["up"]["kernel"] == jax.P("layers", "embed", "hidden")
    pairs = jax.tree.map(lambda i: (i.role, i.size), INFOS)
    marked = state_like_params(muon(1e-3, matrices={"*": None}), ABSTRACT, pairs, ())
    assert marked.inner_states["other"].inner_state[0][1].nu["table"] == ("embedding", 512)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_orbax_restores_the_state_from_an_abstract_target(kind, tmp_path):
    transform, _ = build_optimizer(config(kind=kind), 10, INFOS)
    params = random_like(INFOS, 0)
    state, update = transform.init(params), jax.jit(transform.update)
    for step in range(2):
        _, state = update(random_like(INFOS, step), state, params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        target = jax.eval_shape(transform.init, ABSTRACT)
        restored = checkpointer.restore(tmp_path / "state", target)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    grads = random_like(INFOS, 9)
    ours, _ = update(grads, state, params)
    theirs, _ = update(grads, restored, params)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
