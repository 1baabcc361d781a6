"""CCGQA against float64 NumPy, inside packed rows, in decoding, and as a part of a model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict
from numpy_ccgqa import ccgqa
from numpy_network import Network
from small_models import (
    VOCAB,
    as_float64,
    packed_batch,
    random_params,
    small_config,
    small_model,
)

from nag_jax.errors import UserError
from nag_jax.models.cache import LayerCache
from nag_jax.models.ccgqa import CompressedConvolutionalAttention
from nag_jax.models.context import Context, positions_in_document
from nag_jax.models.initialisation import FanIn
from nag_jax.models.linear import Numerics
from nag_jax.models.transformer import build_model
from nag_jax.parameters import flatten, info_of
from nag_jax.validation import validate

D_MODEL = 10
SMALL = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "query_chunk": 4}

# Kernel sizes (depthwise, grouped), key-value heads, the part of a head that is turned.
CASES = [(2, 2, 2, 1.0), (1, 4, 1, 0.5), (3, 1, 4, 1.0), (4, 3, 1, 1.0), (1, 1, 2, 0.0)]


def options_of(**keys):
    return ConfigDict(CompressedConvolutionalAttention.defaults() | SMALL | keys)


@functools.cache
def split_module(options, dtype):
    """Definition and state of the branch, by its options as a hashable tuple."""
    module = CompressedConvolutionalAttention(
        ConfigDict(dict(options)),
        D_MODEL,
        FanIn(ConfigDict()),
        Numerics(dtype),
        nnx.Rngs(params=jax.random.key(0)),
    )
    return nnx.split(module)


def branch(options, dtype="float32"):
    """(parameters as nested dicts of random values, function of them, inputs and context)."""
    definition, state = split_module(tuple(options.to_dict().items()), dtype)
    rng = np.random.default_rng(5)
    params = jax.tree.map(
        lambda leaf: np.array(leaf + 0.1 * rng.normal(size=leaf.shape), dtype),
        nnx.to_pure_dict(state),
    )
    structure = jax.tree.structure(state)

    def run(params, x, context):
        module = nnx.merge(definition, jax.tree.unflatten(structure, jax.tree.leaves(params)))
        return module(x, None, context)

    return params, run


def context_of(segment_ids, **keys):
    segment_ids = jnp.asarray(segment_ids)
    return Context(
        segment_ids=segment_ids,
        positions=positions_in_document(segment_ids),
        valid=segment_ids > 0,
        gain_warmup=jnp.ones(()),
        taps=False,
        **keys,
    )


def packed(*lengths):
    """Segment ids of one row of documents."""
    return np.repeat(1 + np.arange(len(lengths)), lengths).astype(np.int32)


def side_by_side(documents, left):
    """Documents [T_i, d] as rows of one batch with padding on one side, and its segment ids."""
    length = max(map(len, documents))
    x = np.zeros((len(documents), length, D_MODEL), np.float32)
    segment_ids = np.zeros(x.shape[:2], np.int32)
    for row, document in enumerate(documents):
        place = slice(length - len(document), None) if left else slice(len(document))
        x[row, place], segment_ids[row, place] = document, 1
    return x, segment_ids


@pytest.mark.parametrize("depthwise, grouped, kv_heads, fraction", CASES)
def test_values_and_gradients(depthwise, grouped, kv_heads, fraction, x64):
    """Against NumPy: the branch, and its gradient along a random direction of every leaf."""
    options = options_of(
        depthwise_kernel=depthwise,
        grouped_kernel=grouped,
        num_kv_heads=kv_heads,
        rope_fraction=fraction,
        temperature_base=2.0,
    )
    params, run = branch(options, "float64")
    rng = np.random.default_rng(1)
    segment_ids = np.stack([packed(1, 6, 4), packed(11)])
    x = rng.normal(size=(2, 11, D_MODEL))
    weights = rng.normal(size=x.shape)

    @functools.partial(jax.jit, static_argnums=2)
    def value_and_gradients(params, x, layer):
        def loss(params, x):
            y = run(params, x, context_of(segment_ids, layer=layer)).y
            return jnp.sum(y * weights), y

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    def by_numpy():
        rows = zip(x, segment_ids, strict=True)
        return np.stack([ccgqa(row, params, options, ids, layer=2) for row, ids in rows])

    (d_params, d_x), y = value_and_gradients(params, x, 2)
    np.testing.assert_allclose(y, by_numpy(), rtol=1e-8, atol=1e-9)

    gradients = flatten(d_params) | {"x": d_x}
    for path, leaf in (flatten(params) | {"x": x}).items():
        direction = rng.normal(size=leaf.shape)
        actual = np.sum(np.asarray(gradients[path]) * direction)
        expected = central_difference(leaf, direction, lambda: np.sum(by_numpy() * weights))
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7, err_msg=path)


def central_difference(leaf, direction, function, size=2e-6):
    """Derivative of `function` as `leaf` moves; `leaf` is changed in place and restored."""
    original = leaf.copy()
    values = []
    for sign in (1, -1):
        leaf[...] = original + sign * size * direction
        values.append(function())
    leaf[...] = original
    return (values[0] - values[1]) / (2 * size)


@pytest.mark.parametrize("kernels", [(2, 2), (3, 3), (4, 4), (2, 4)])
def test_documents_in_one_row_are_each_as_alone(kernels):
    """Also without a mask, where a row is one document with padding behind it."""
    options = options_of(depthwise_kernel=kernels[0], grouped_kernel=kernels[1])
    params, run = branch(options)

    @functools.partial(jax.jit, static_argnums=2)
    def output(x, segment_ids, masked):
        return run(params, x, context_of(segment_ids, packed=masked)).y

    lengths = (6, 1, 1, 5, 2, 3)
    x = np.random.default_rng(2).normal(size=(1, sum(lengths), D_MODEL)).astype(np.float32)
    together = output(x, packed(*lengths)[None], True)[0]

    places = [slice(end - n, end) for n, end in zip(lengths, np.cumsum(lengths), strict=True)]
    alone, segment_ids = side_by_side([x[0, place] for place in places], left=False)
    for masked in (True, False):
        y = output(alone, segment_ids, masked)
        for row, place in enumerate(places):
            np.testing.assert_allclose(together[place], y[row][segment_ids[row] == 1], atol=1e-6)


def test_no_document_moves_another_or_the_past():
    """Changing one token changes its document from there on, every later token, and nothing else.

    Exactly nothing: the delayed values, the convolutions and attention all reach back only.
    """
    options = options_of(depthwise_kernel=3, grouped_kernel=2)
    params, run = branch(options)
    context = context_of(packed(4, 5, 3)[None])
    x = np.random.default_rng(3).normal(size=(1, 12, D_MODEL)).astype(np.float32)
    output = jax.jit(lambda x: run(params, x, context).y)
    before = output(x)
    for t in range(x.shape[1]):
        changed = x.copy()
        changed[0, t] += 1
        moved = np.any(np.asarray(output(changed) != before), axis=-1)[0]
        same_document = np.asarray(context.segment_ids)[0] == context.segment_ids[0, t]
        np.testing.assert_array_equal(moved, same_document & (np.arange(12) >= t))


@pytest.mark.parametrize("kernels, kv_heads", [((2, 2), 2), ((1, 1), 2), ((4, 3), 1)])
def test_cached_steps_equal_the_whole(kernels, kv_heads):
    """Prompts padded on their left in one batch, then steps: each as the document alone."""
    options = options_of(
        depthwise_kernel=kernels[0], grouped_kernel=kernels[1], num_kv_heads=kv_heads
    )
    params, run = branch(options)
    rng = np.random.default_rng(4)
    prompts, steps = (1, 2, 3, 17), 4
    documents = [rng.normal(size=(n + steps, D_MODEL)).astype(np.float32) for n in prompts]
    x, segment_ids = side_by_side(documents, left=False)
    whole = jax.jit(lambda x: run(params, x, context_of(segment_ids, packed=False)).y)(x)

    # What is in the padding must not matter, so it is not zero.
    x, segment_ids = side_by_side(documents, left=True)
    x = np.where(segment_ids[..., None], x, 3.0).astype(np.float32)
    length, start = x.shape[1], jnp.argmax(jnp.asarray(segment_ids), axis=1)
    shapes = CompressedConvolutionalAttention.cache_shapes(
        options, D_MODEL, len(x), length, jnp.float32
    )
    arrays = {name: jnp.zeros((3, *leaf.shape), leaf.dtype) for name, leaf in shapes.items()}

    @functools.partial(jax.jit, static_argnums=3)
    def call(x, arrays, position, prefill):
        columns = position + jnp.arange(x.shape[1])
        context = dataclasses.replace(
            context_of((columns >= start[:, None]).astype(jnp.int32)),
            positions=jnp.maximum(columns - start[:, None], 0),
            cache=LayerCache(arrays, jnp.int32(1), position, start, prefill),
        )
        out = run(params, x, context)
        return out.y, out.cache.arrays

    y, arrays = call(x[:, : length - steps], arrays, jnp.int32(0), True)
    pieces = [y]
    for t in range(length - steps, length):
        y, arrays = call(x[:, t : t + 1], arrays, jnp.int32(t), False)
        pieces.append(y)
    y = np.concatenate(pieces, axis=1)
    for row, document in enumerate(documents):
        np.testing.assert_allclose(
            y[row, length - len(document) :], whole[row, : len(document)], atol=2e-6
        )
    for name, leaf in arrays.items():  # other layers' caches are as they were
        assert not np.any(leaf[0]) and not np.any(leaf[2]), name


@pytest.mark.parametrize("head_dim, length", [(58, 1), (66, 3)])
def test_heads_of_any_even_width_and_rows_shorter_than_the_kernels(head_dim, length, x64):
    options = options_of(head_dim=head_dim, depthwise_kernel=4, grouped_kernel=3)
    params, run = branch(options, "float64")
    x = np.random.default_rng(6).normal(size=(1, length, D_MODEL))
    y = jax.jit(lambda x: run(params, x, context_of(packed(length)[None])).y)(x)
    np.testing.assert_allclose(y[0], ccgqa(x[0], params, options, packed(length)), atol=1e-9)


def test_bfloat16_is_close_to_float32():
    options = options_of()
    x = np.random.default_rng(7).normal(size=(2, 9, D_MODEL)).astype(np.float32)
    context = context_of(np.stack([packed(9), packed(4, 5)]))
    params, run = branch(options)
    _, run_bfloat16 = branch(options, "bfloat16")
    y, rounded = jax.jit(lambda x: [f(params, x, context).y for f in (run, run_bfloat16)])(x)
    assert rounded.dtype == jnp.bfloat16
    assert np.std(rounded.astype(jnp.float32) - y) < 0.03 * np.std(y)


@pytest.mark.slow
def test_fused_mixing_is_that_of_the_reference():
    """Output and gradients of the branch, with the kernel interpreted."""
    x = np.random.default_rng(9).normal(size=(2, 21, D_MODEL)).astype(np.float32)
    context = context_of(np.stack([packed(9, 12), packed(21)]))
    results = []
    for mixing in ("reference", "mosaic_tpu"):
        params, run = branch(options_of(mixing=mixing, depthwise_kernel=3))

        def loss(params, x, run=run):
            return jnp.sum(jnp.sin(run(params, x, context).y))

        results.append(jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *results)


def test_initial_values():
    """Convolutions as PyTorch's, unit logits but for the initialisation's key gain."""

    class Sharp(FanIn):
        key_gain = 5.0

    options = options_of(head_dim=8, depthwise_kernel=3, grouped_kernel=2)
    module = CompressedConvolutionalAttention(
        options, D_MODEL, Sharp(ConfigDict()), Numerics(), nnx.Rngs(params=jax.random.key(1))
    )
    np.testing.assert_allclose(np.exp(module.log_temperature[...]), 5.0, rtol=1e-6)
    convolutions = module.convolutions
    for names, inputs in (("depthwise", 3), ("grouped", 2 * 8)):
        for name in (names, f"{names}_bias"):
            values = np.abs(getattr(convolutions, name)[...])
            assert values.max() <= inputs**-0.5
            assert values.max() > 0.8 * inputs**-0.5, name


def test_parameters_are_declared():
    _, state = split_module(tuple(options_of().to_dict().items()), "float32")
    records = {
        "/".join(path): info_of(variable, "/".join(path))
        for path, variable in nnx.to_flat_state(state)
    }
    roles = {path: (info.role, info.shape) for path, info in records.items()}
    assert roles == {
        "convolutions/depthwise": ("conv", (2, 6, 4)),
        "convolutions/depthwise_bias": ("bias", (6, 4)),
        "convolutions/grouped": ("conv", (2, 6, 4, 4)),
        "convolutions/grouped_bias": ("bias", (6, 4)),
        "key": ("matrix", (D_MODEL, 2, 4)),
        "log_temperature": ("scale", (2,)),
        "output": ("matrix", (4, 4, D_MODEL)),
        "query": ("matrix", (D_MODEL, 4, 4)),
        "value": ("matrix", (D_MODEL, 2, 4)),
    }


class CcgqaNetwork(Network):
    """The whole network in NumPy, with CCGQA as its attention."""

    def branch(self, name, x, w, segment_ids):
        if name == "attention":
            return ccgqa(x, w, self.options.attention, segment_ids)
        return super().branch(name, x, w, segment_ids)


def test_logits_of_a_network(x64):
    config = small_config(compute_dtype="float64", attention__kind="ccgqa")
    model = build_model(config, VOCAB)
    params = as_float64(random_params(model))
    batch = packed_batch([[5, 1, 3]], 8)
    tokens, segment_ids = batch["tokens"], batch["segment_ids"]
    logits = jax.jit(model.logits)(params, tokens, segment_ids, config.train.steps)
    expected = CcgqaNetwork(config.model, VOCAB, params).logits(tokens[0], segment_ids[0])
    np.testing.assert_allclose(logits[0], expected, rtol=1e-8, atol=1e-9)


def test_decoding_equals_the_full_forward():
    """A looped model: every prompt's and every step's logits, prompts padded on their left."""
    model = small_model(attention__kind="ccgqa", loops=2, num_blocks=3, prelude_blocks=1)
    params = random_params(model)
    rng = np.random.default_rng(8)
    prompts, steps, longest = (1, 2, 3, 17), 3, 17
    tokens = [rng.integers(0, VOCAB, n + steps) for n in prompts]
    rows = np.zeros((len(prompts), longest + steps), np.int32)
    padded = np.zeros((len(prompts), longest), np.int32)
    for row, (n, document) in enumerate(zip(prompts, tokens, strict=True)):
        rows[row, : n + steps] = document
        padded[row, longest - n :] = document[:n]
    whole = jax.jit(lambda params, rows: model.logits(params, rows))(params, rows)

    prefill, step = jax.jit(model.prefill, static_argnums=3), jax.jit(model.decode_step)
    start = longest - np.array(prompts, np.int32)
    logits, state = prefill(params, padded, start, longest + steps, 0)
    for t in range(steps + 1):
        expected = [whole[row, n + t - 1] for row, n in enumerate(prompts)]
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
        if t < steps:
            added = np.array([document[n + t] for n, document in zip(prompts, tokens, strict=True)])
            logits, state = step(params, added, state, 0)


@pytest.mark.parametrize(
    "key, value, named",
    [
        ("head_dim", 5, ["model.attention.head_dim"]),
        ("head_dim", 10, ["model.attention.head_dim=10", "model.attention.rope_fraction=0.5"]),
        ("depthwise_kernel", 0, ["model.attention.depthwise_kernel"]),
        ("grouped_kernel", 0, ["model.attention.grouped_kernel"]),
    ],
)
def test_sizes_that_cannot_work_are_refused(key, value, named):
    keys = {"attention__rope_fraction": 0.5, f"attention__{key}": value}
    config = small_config(attention__kind="ccgqa", **({"attention__head_dim": 4} | keys))
    with pytest.raises(UserError) as error:
        validate(config)
    assert all(name in str(error.value) for name in named)


@pytest.mark.slow
def test_memory_is_linear_in_length():
    options = options_of(query_chunk=16)
    params, run = branch(options)
    sizes = []
    for length in (128, 256):
        segment_ids = jnp.ones((1, length), jnp.int32)

        def loss(params, x, segment_ids=segment_ids):
            return jnp.sum(run(params, x, context_of(segment_ids)).y)

        x = jax.ShapeDtypeStruct((1, length, D_MODEL), jnp.float32)
        compiled = jax.jit(jax.grad(loss)).lower(params, x).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[1] < 2.2 * sizes[0]
