"""How the parameters of a whole model start."""

import jax
import numpy as np
import pytest
from small_models import VOCAB, quick_compilation, small_model

from nag_jax.parameters import flatten


@pytest.fixture(scope="module")
def started():
    """(model, flat parameters) of a norm-agnostic model of five blocks."""
    model = small_model(
        num_blocks=5, connection__embedding_std=0.5, connection__encode_gain_init=3.0
    )
    return model, start(model)


def start(model):
    """Flat initial parameters."""
    with quick_compilation():
        params = jax.jit(model.init)(jax.random.key(7))
    return {path: np.asarray(leaf) for path, leaf in flatten(params).items()}


def test_alpha_counts_sublayers(started):
    """Attention of block j is l = 2j + 1, its feed-forward 2j + 2; alpha starts at 1/sqrt(l)."""
    for offset, name in enumerate(("attention", "feedforward")):
        alpha = started[1][f"stage_0/blocks/{name}/connection/alpha"]
        np.testing.assert_allclose(alpha, [(2 * j + offset + 1) ** -0.5 for j in range(5)], 1e-6)


def test_every_leaf_is_as_recorded(started):
    model, leaves = started
    infos = flatten(model.infos)
    assert infos.keys() == leaves.keys()
    for path, leaf in leaves.items():
        assert leaf.shape == infos[path].shape, path
        assert leaf.dtype == np.float32 == infos[path].dtype, path


def test_matrices_start_at_one_over_the_root_of_their_fan_in(started):
    """Never at 0, output projections included: the update would amplify their noise."""
    model, leaves = started
    for path, info in flatten(model.infos).items():
        if info.role == "matrix":
            fan_in = np.prod([info.shape[axis] for axis in info.rows])
            np.testing.assert_allclose(np.std(leaves[path]), fan_in**-0.5, rtol=0.1, err_msg=path)


def test_layers_start_differently(started):
    for path, leaf in started[1].items():
        if path.startswith("stage_0") and leaf.size > 500:
            correlation = np.corrcoef(leaf.reshape(5, -1))
            assert np.all(np.abs(correlation - np.eye(5)) < 0.5), path


def test_table_starts_centred_and_its_padding_at_zero(started):
    rows = started[1]["table/rows"]
    assert rows.shape == (16, 16)
    np.testing.assert_allclose(rows.mean(axis=1), 0, atol=1e-6)
    np.testing.assert_array_equal(rows[VOCAB:], 0)
    np.testing.assert_allclose(np.std(rows[:VOCAB]), 0.5, rtol=0.15)
    np.testing.assert_allclose(started[1]["ends/log_encode_gain"], np.log(3), rtol=1e-6)


def test_padding_of_the_vocabulary_changes_no_start(started):
    """Every true row and every other leaf is the same to the bit."""
    model = small_model(
        num_blocks=5,
        vocab_multiple=1,
        connection__embedding_std=0.5,
        connection__encode_gain_init=3.0,
    )
    for path, leaf in start(model).items():
        np.testing.assert_array_equal(leaf, started[1][path][: len(leaf)] if leaf.ndim else leaf)
