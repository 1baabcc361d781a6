"""Initialisers against their definitions: Gram matrices, Haar's distribution, moments."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from nag_jax.kinds import REGISTRY, kind_class, kind_defaults
from nag_jax.models import initializers

ATOL = 2e-6  # of Gram matrices from a float32 QR


def assert_identity(gram, scale=1.0):
    np.testing.assert_allclose(gram, scale * np.eye(len(gram)), atol=ATOL * max(scale, 1))


def assert_projector(product, scale, rank):
    """`product` is `scale` times an orthogonal projector of that rank."""
    projector = product / scale
    np.testing.assert_allclose(projector, projector.T, atol=ATOL)
    np.testing.assert_allclose(projector @ projector, projector, atol=ATOL)
    np.testing.assert_allclose(np.trace(projector), rank, rtol=1e-5)


# --- pure functions ---


@pytest.mark.parametrize(("inputs", "outputs"), [(6, 6), (12, 5), (5, 12), (1, 4), (4, 1)])
def test_semi_orthogonal_gram_matrices(inputs, outputs):
    w = np.asarray(initializers.semi_orthogonal(jax.random.key(0), inputs, outputs))
    assert w.shape == (inputs, outputs) and w.dtype == np.float32
    if outputs <= inputs:
        assert_identity(w.T @ w)
    if outputs >= inputs:
        assert_identity(w @ w.T)


@pytest.mark.parametrize(("inputs", "outputs", "factor"), [(8, 32, 4), (32, 8, 1), (8, 8, 1)])
def test_suo_gram_matrices(inputs, outputs, factor):
    """W W^T = (outputs/inputs) I where it widens, W^T W = I where it narrows."""
    w = np.asarray(initializers.scaled_uniform_orthogonal(jax.random.key(1), inputs, outputs))
    assert_identity(w @ w.T if outputs >= inputs else w.T @ w, factor)


@pytest.mark.parametrize(("inputs", "outputs"), [(3, 3), (4, 2), (2, 4)])
def test_the_distribution_is_haars(inputs, outputs):
    """Moments that a QR decomposition without its signs gets wrong, and invariance to rotation."""
    keys = jax.random.split(jax.random.key(2), 20_000)
    draw = functools.partial(initializers.semi_orthogonal, inputs=inputs, outputs=outputs)
    w = np.asarray(jax.vmap(draw)(keys), np.float64)
    large, small = max(inputs, outputs), min(inputs, outputs)
    np.testing.assert_allclose(w.mean(axis=0), 0, atol=0.02)
    second = np.einsum("nij,nkl->ijkl", w, w) / len(w)
    expected = np.einsum("ik,jl->ijkl", np.eye(inputs), np.eye(outputs)) / large
    np.testing.assert_allclose(second, expected, atol=0.02)
    np.testing.assert_allclose((w**4).mean(axis=0), 3 / (large * (large + 2)), atol=0.01)
    traces = np.trace(w[:, :small, :small], axis1=1, axis2=2)
    np.testing.assert_allclose(np.mean(traces**2), small / large, rtol=0.05)


@pytest.mark.parametrize(
    ("draw", "variance"),
    [
        (lambda key, shape: initializers.fan_in_normal(key, shape, 300), 1 / 300),
        (lambda key, shape: initializers.gaussian(key, shape, 0.02), 0.02**2),
        (lambda key, shape: initializers.xavier(key, shape, 300, 500), 2 / 800),
        (lambda key, shape: initializers.kaiming(key, shape, 300), 2 / 300),
    ],
    ids=["fan_in_normal", "gaussian", "xavier", "kaiming"],
)
def test_moments_of_normal_initialisers(draw, variance):
    w = draw(jax.random.key(3), (300, 500))
    assert w.dtype == jnp.float32
    standard = np.asarray(w, np.float64) / math.sqrt(variance)
    np.testing.assert_allclose(standard.mean(), 0, atol=0.01)
    np.testing.assert_allclose(np.mean(standard**2), 1, atol=0.015)
    np.testing.assert_allclose(np.mean(standard**3), 0, atol=0.04)
    np.testing.assert_allclose(np.mean(standard**4), 3, atol=0.1)


# --- kinds ---

SHAPES = {  # d_model, heads, key-value heads, head width
    "mha": (24, 4, 4, 6),
    "mha_narrow": (24, 2, 2, 6),
    "mha_wide": (24, 4, 4, 8),
    "gqa": (24, 4, 2, 6),
    "mqa": (24, 4, 1, 6),
    "mqa_of_a_head_wider_than_the_stream": (6, 2, 1, 8),
}
ALPHAS = {"alpha_qk": 5.0, "alpha_vo": 3.0, "alpha_up": 0.5, "alpha_down": 2.0}


def kind(name, **options):
    defaults = {
        key.rpartition(".")[2]: value
        for key, value in kind_defaults("model.initialisation", name).items()
    }
    return kind_class("model.initialisation", name)(ConfigDict(defaults | options))


@pytest.fixture(scope="module", params=SHAPES)
def attention(request):
    """(sizes, float64 weights) of an orthogonal attention."""
    sizes = SHAPES[request.param]
    weights = kind("orthogonal", **ALPHAS).attention(nnx.Rngs(params=4), *sizes)
    leaves = {name: np.asarray(leaf) for name, leaf in vars(weights).items()}
    assert all(leaf.dtype == np.float32 for leaf in leaves.values())
    return sizes, {name: leaf.astype(np.float64) for name, leaf in leaves.items()}


def test_query_and_key_are_scaled_semi_orthogonal(attention):
    """W^T W = alpha_qk I for each head, or W W^T where the head is wider than the stream."""
    (d, heads, kv_heads, h), w = attention
    assert w["query"].shape == (d, heads, h) and w["key"].shape == (d, kv_heads, h)
    for j in range(kv_heads):
        key = w["key"][:, j]
        assert_identity(key.T @ key if h <= d else key @ key.T, ALPHAS["alpha_qk"])
    for n in range(heads):
        np.testing.assert_array_equal(w["query"][:, n], w["key"][:, n * kv_heads // heads])


def test_heads_of_keys_are_independent(attention):
    (d, _, kv_heads, h), w = attention
    for j in range(kv_heads):
        for i in range(j):
            cross = w["key"][:, i].T @ w["key"][:, j] / ALPHAS["alpha_qk"]
            # The mean square of an entry of U^T V is 1/d for independent Haar matrices.
            assert 0.3 / d < np.mean(cross**2) < 3 / d


def test_value_is_semi_orthogonal_over_all_heads_and_output_its_transpose(attention):
    """The output of a group's query heads together; where there are several they differ."""
    (d, heads, kv_heads, h), w = attention
    value = w["value"].reshape(d, kv_heads * h)
    gram = value.T @ value if kv_heads * h <= d else value @ value.T
    assert_identity(gram, ALPHAS["alpha_vo"])
    output = w["output"].reshape(kv_heads, heads // kv_heads, h, d)
    expected = np.transpose(w["value"], (1, 2, 0))
    np.testing.assert_allclose(output.sum(axis=1), expected, atol=ATOL)
    for group in output:
        for a, b in itertools.combinations(group, 2):
            assert np.linalg.norm(a - b) > 0.1 * np.linalg.norm(a)


def test_attention_to_oneself_is_a_partial_isometry_of_stated_rank(attention):
    """alpha_vo times a projector of rank min(K h, d): the identity where that is d."""
    (d, heads, kv_heads, h), w = attention
    value = np.repeat(w["value"], heads // kv_heads, axis=1)
    product = np.einsum("dnh,nhe->de", value, w["output"])
    assert_projector(product, ALPHAS["alpha_vo"], min(kv_heads * h, d))
    if kv_heads * h >= d:
        assert_identity(product, ALPHAS["alpha_vo"])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_halves_of_the_value_columns_give_orthogonal_projectors(kv_heads):
    """CCGQA's two value streams, of the present and the previous token: rank K h/2 each."""
    d, heads, h = 24, 4, 6
    weights = kind("orthogonal").attention(nnx.Rngs(params=5), d, heads, kv_heads, h)
    columns = np.asarray(weights.value, np.float64).reshape(d, kv_heads * h)
    output = np.asarray(weights.output, np.float64)
    rows = output.reshape(kv_heads, heads // kv_heads, h, d).sum(axis=1).reshape(kv_heads * h, d)
    half = kv_heads * h // 2
    present = columns[:, :half] @ rows[:half]
    previous = columns[:, half:] @ rows[half:]
    assert_projector(present, 1, half)
    assert_projector(previous, 1, half)
    np.testing.assert_allclose(present @ previous, 0, atol=ATOL)


@pytest.mark.parametrize(("d", "hidden"), [(8, 32), (8, 21), (8, 5)])
def test_orthogonal_feedforward_is_scaled_suo(d, hidden):
    init = kind("orthogonal", **ALPHAS)
    up = np.asarray(init.up(nnx.Rngs(params=6), d, hidden), np.float64)
    down = np.asarray(init.down(nnx.Rngs(params=7), hidden, d), np.float64)
    for w, scale in ((up, ALPHAS["alpha_up"]), (down, ALPHAS["alpha_down"])):
        inputs, outputs = w.shape
        if outputs >= inputs:
            assert_identity(w @ w.T, scale * outputs / inputs)
        else:
            assert_identity(w.T @ w, scale)


def test_key_gain_carries_alpha_qk_and_is_1_for_other_kinds():
    assert kind("orthogonal", alpha_qk=5.0).key_gain == 5.0
    for name in set(REGISTRY["model.initialisation"]) - {"orthogonal"}:
        assert kind(name).key_gain == 1.0


STDS = {
    "fan_in": lambda inputs, outputs: inputs**-0.5,
    "gaussian": lambda inputs, outputs: 0.02,
    "xavier": lambda inputs, outputs: (2 / (inputs + outputs)) ** 0.5,
    "kaiming": lambda inputs, outputs: (2 / inputs) ** 0.5,
}


@pytest.mark.parametrize("name", STDS)
def test_sizes_of_the_controls(name):
    """A projection's heads count together; no two weights are the same."""
    d, heads, kv_heads, h, hidden = 96, 6, 2, 24, 200
    init, rngs = kind(name), nnx.Rngs(params=8)
    weights = vars(init.attention(rngs, d, heads, kv_heads, h))
    weights |= {"up": init.up(rngs, d, hidden), "down": init.down(rngs, hidden, d)}
    inputs = {"output": heads * h, "down": hidden}
    outputs = {"query": heads * h, "key": kv_heads * h, "value": kv_heads * h, "up": hidden}
    for leaf, w in weights.items():
        expected = STDS[name](inputs.get(leaf, d), outputs.get(leaf, d))
        np.testing.assert_allclose(np.std(w), expected, rtol=0.03, err_msg=leaf)
        np.testing.assert_allclose(np.mean(w), 0, atol=0.06 * expected, err_msg=leaf)
    samples = np.stack([np.ravel(w)[:4000] for w in weights.values()])
    assert np.all(np.abs(np.corrcoef(samples) - np.eye(len(samples))) < 0.1)


@pytest.mark.parametrize("name", REGISTRY["model.initialisation"])
def test_feedforward_weights_can_be_made_under_vmap(name):
    """As stacks of layers and of experts need."""
    init, keys = kind(name), jax.random.split(jax.random.key(9), 3)
    for make in (init.up, init.down):
        stacked = jax.vmap(lambda key, make=make: make(nnx.Rngs(params=key), 8, 20))(keys)
        for key, w in zip(keys, stacked, strict=True):
            np.testing.assert_allclose(w, make(nnx.Rngs(params=key), 8, 20), atol=1e-5)
