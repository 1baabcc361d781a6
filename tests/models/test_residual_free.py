"""The residual-free recipe in whole layers: what isometries keep, what depth does to tokens."""

import importlib.util
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_models import packed_batch, quick_compilation, random_params, small_config, small_model

from nag_jax.kinds import kind_class
from nag_jax.models.context import Context
from nag_jax.models.linear import Numerics
from nag_jax.models.norms import LayerNorm
from nag_jax.parameters import flatten

BLOCKS = 48
ORTHOGONAL = {"connection__kind": "residual_free", "initialisation__kind": "orthogonal"}


def started(**keys):
    """(model, flat initial parameters)."""
    model = small_model(**keys)
    with quick_compilation():
        params = jax.jit(model.init)(jax.random.key(0))
    return model, params


def norms(x):
    return np.linalg.norm(np.asarray(x, np.float64), axis=-1)


@pytest.fixture(scope="module")
def deep():
    """Flat initial parameters of 48 blocks, 64 wide: as many heads' features as the stream has."""
    _, params = started(
        **ORTHOGONAL,
        num_blocks=BLOCKS,
        d_model=64,
        attention__num_heads=4,
        attention__num_kv_heads=4,
        attention__head_dim=16,
        feedforward__kind="mlp",
        feedforward__hidden=256,
    )
    return {path: np.asarray(leaf) for path, leaf in flatten(params).items()}


def test_value_and_output_keep_norms_through_48_layers(deep):
    """Tokens that attend to themselves alone come out as they went in."""
    value = deep["stage_0/blocks/attention/branch/value"].reshape(BLOCKS, 64, 64)
    output = deep["stage_0/blocks/attention/branch/output"].reshape(BLOCKS, 64, 64)
    x = np.random.default_rng(0).normal(size=(10, 64)).astype(np.float32)
    y = x
    for v, o in zip(value, output, strict=True):
        y = y @ v @ o
    np.testing.assert_allclose(y, x, atol=1e-4)


def test_feedforward_matrices_keep_norms_through_48_layers_in_expectation(deep):
    """Without GELU: each layer keeps the mean square of an orthonormal basis; a chain wanders."""
    up = deep["stage_0/blocks/feedforward/branch/up"]
    down = deep["stage_0/blocks/feedforward/branch/down"]
    basis = np.eye(64)
    one_layer = [np.mean(norms(basis @ u @ w) ** 2) for u, w in zip(up, down, strict=True)]
    np.testing.assert_allclose(np.mean(one_layer), 1, atol=0.01)
    for u, w in zip(up, down, strict=True):
        basis = basis @ u @ w
    assert 1 / 4 < np.mean(norms(basis) ** 2) < 4


def attention_of(x, **keys):
    """An attention at its start, applied to x [1, T, d] of T one-token documents."""
    options = small_config(**ORTHOGONAL, **keys).model
    initialisation = kind_class("model.initialisation", options.initialisation.kind)(
        options.initialisation
    )
    length = x.shape[1]
    context = Context(
        segment_ids=jnp.arange(1, length + 1)[None],
        positions=jnp.zeros((1, length), jnp.int32),
        valid=jnp.ones((1, length), bool),
        gain_warmup=jnp.ones(()),
        taps=False,
    )

    @jax.jit
    def run(key, x):
        kind = kind_class("model.attention", options.attention.kind)
        attention = kind(
            options.attention, options.d_model, initialisation, Numerics(), nnx.Rngs(params=key)
        )
        return attention(x, None, context).y

    with quick_compilation():
        return np.asarray(run(jax.random.key(0), x))


@pytest.mark.parametrize("kind", ["gqa", "ccgqa"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_of_one_token_is_the_stated_projector(kind, kv_heads):
    """Through the layer itself: rank K h, or K h/2 in CCGQA, whose other half sees no token."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(1, 12, 24)).astype(np.float32)
    y = attention_of(
        x,
        d_model=24,
        attention__kind=kind,
        attention__num_heads=4,
        attention__num_kv_heads=kv_heads,
        attention__head_dim=6,
        attention__query_chunk=12,
        initialisation__alpha_vo=2.0,
    )
    rank = 6 * kv_heads // (2 if kind == "ccgqa" else 1)
    if rank == 24:
        np.testing.assert_allclose(y, 2 * x, atol=1e-4)
    # A projector: y/2 is orthogonal to x - y/2, and the outputs span `rank` directions.
    half = y[0] / 2
    np.testing.assert_allclose(half @ (x[0] - half).T, 0, atol=1e-3)
    assert np.linalg.matrix_rank(half, tol=1e-3) == min(rank, 12)


def test_a_token_has_the_same_logit_on_itself_with_and_without_qk_norm():
    """alpha_qk sqrt(h), carried by the key's gain where normalisation takes it from the weights."""
    _, params = started(
        **ORTHOGONAL, num_blocks=1, d_model=64, attention__head_dim=16, attention__qk_norm=True
    )
    branch = {
        name: np.asarray(leaf, np.float64)[0]
        for name, leaf in flatten(params["stage_0"]["blocks"]["attention"]["branch"]).items()
    }
    np.testing.assert_array_equal(branch["key_norm/scale"], 8.0)
    x = np.random.default_rng(2).normal(size=(2000, 64))
    q, k = x @ branch["query"][:, 0], x @ branch["key"][:, 0]
    plain = np.sum(q * k, axis=-1) / 4
    np.testing.assert_allclose(plain.mean(), 8 * 4, rtol=0.05)


# --- LayerNorm ---


def test_layer_norm_is_the_definition():
    norm = LayerNorm(10, "embed", 0.1)
    rng = np.random.default_rng(3)
    norm.scale[...], norm.shift[...] = rng.normal(size=(2, 10))
    x = rng.normal(2, 3, (4, 5, 10)).astype(np.float32)
    unit = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.1)
    expected = unit * np.asarray(norm.scale[...]) + np.asarray(norm.shift[...])
    np.testing.assert_allclose(norm(x), expected, rtol=1e-5, atol=1e-5)
    assert norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("connection", ["prenorm", "residual_free"])
def test_layer_norm_serves_branches_and_the_end(connection):
    """A constant added to every embedding is invisible to it, and to no other norm."""
    batch = packed_batch([[9]], 8)

    def change(norm):
        model = small_model(
            num_blocks=1,
            connection__kind=connection,
            connection__head="free",
            connection__norm=norm,
        )
        logits, params = jax.jit(model.logits), random_params(model)
        before = logits(params, batch["tokens"])
        # A new array: the program may still read the old one.
        params["table"]["rows"] = params["table"]["rows"] + np.float32(0.5)
        return np.abs(logits(params, batch["tokens"]) - before).max()

    assert change("layer") < 1e-4
    assert change("rms") > 1e-2


# --- tokens in depth ---


@pytest.fixture(scope="module")
def benchmark():
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "residual_free_init.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


@pytest.mark.slow
def test_tokens_collapse_by_initialisation_as_measured(benchmark):
    """At blocks 6 and 12: diversity, and weight on oneself (docs/residual_free.md)."""

    def at(start):
        values, weights = benchmark.measure(benchmark.STARTS[start], 12, seeds=1)
        return values[0, [5, 11]], weights[0, [5, 11]]

    diversity, weight = at("orthogonal, alpha_qk 8")
    np.testing.assert_allclose(np.log(diversity / [0.48, 0.40]), 0, atol=math.log(1.5))
    np.testing.assert_allclose(weight, 0.82, atol=0.06)
    collapsed, uniform = at("Gaussian")
    assert 2.3e-2 / 3 < collapsed[0] < 2.3e-2 * 3
    assert collapsed[1] < 1e-2
    np.testing.assert_allclose(uniform, np.mean(1 / np.arange(129, 257)), rtol=0.1)
