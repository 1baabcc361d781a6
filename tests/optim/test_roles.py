"""Which leaves are matrices, and which errors name the culprit."""

import dataclasses

import jax.numpy as jnp
import optax
import pytest
from optimizer_examples import model_infos, random_like

from nag_jax.errors import UserError
from nag_jax.optim.roles import MatrixAxes, check_paths, find_matrices, matrix_shape, role_tree

PARAMS = {
    "blocks": {"q": jnp.ones((3, 8, 2, 4)), "norm": jnp.ones((3, 8))},
    "dense": jnp.ones((8, 5)),
    "bias": jnp.ones(5),
}


def test_leaves_of_two_axes_are_matrices_by_default():
    assert find_matrices(PARAMS) == {
        "blocks/norm": MatrixAxes((0,), (1,)),
        "dense": MatrixAxes((0,), (1,)),
    }


def test_the_first_matching_pattern_decides():
    found = find_matrices(PARAMS, {"*/q": ((-3,), (-2, -1)), "blocks/*": None})
    assert found == {
        "blocks/q": MatrixAxes((1,), (2, 3)),
        "dense": MatrixAxes((0,), (1,)),
    }
    assert matrix_shape((3, 8, 2, 4), found["blocks/q"]) == (8, 8)


def test_a_tree_of_axes_is_read_like_patterns():
    tree = {
        "blocks": {"q": MatrixAxes((1,), (2, 3)), "norm": None},
        "dense": MatrixAxes((1,), (0,)),
        "bias": None,
    }
    assert find_matrices(PARAMS, tree) == {
        "blocks/q": MatrixAxes((1,), (2, 3)),
        "dense": MatrixAxes((1,), (0,)),
    }


def test_masked_leaves_are_matched_but_not_returned():
    masked = {**PARAMS, "dense": optax.MaskedNode()}
    found = find_matrices(masked, {"dense": ((1,), (0,)), "blocks/*": None})
    assert found == {}


@pytest.mark.parametrize(
    "axes", [((0,), (0,)), ((0,), (2,)), ((), (0, 1)), ((0, -2), (1,)), ((-3,), (1,))]
)
def test_axes_that_do_not_fit_are_refused_by_path(axes):
    with pytest.raises(UserError, match=r"dense of shape \(8, 5\)"):
        find_matrices(PARAMS, {"dense": axes})


def test_an_unknown_role_is_refused_by_path():
    infos = model_infos()
    infos["blocks"]["up"]["kernel"] = dataclasses.replace(
        infos["blocks"]["up"]["kernel"], role="matrx"
    )
    with pytest.raises(UserError, match=r"blocks/up/kernel has the unknown role 'matrx'.*matrix"):
        role_tree(infos)


def test_metadata_and_parameters_must_name_the_same_paths():
    infos = model_infos()
    params = random_like(infos, 0)
    check_paths(infos, params)
    del params["blocks"]["gate"]["alpha"]
    with pytest.raises(UserError, match="describes blocks/gate/alpha, but no parameter"):
        check_paths(infos, params)
    params = random_like(infos, 0)
    params["extra"] = params["table"]
    with pytest.raises(UserError, match="parameter extra has no metadata"):
        check_paths(infos, params)
