"""CCGQA's mixing: the kernel for TPU, interpreted, against the definition in float64."""

import functools
import os
import secrets

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ccgqa_mix
from pallas_kernels.ccgqa_mixing import Convolutions, choose, mosaic_tpu
from pallas_kernels.ccgqa_mixing.dispatch import IMPLEMENTATIONS
from pallas_kernels.ccgqa_mixing.reference import mix

# Largest error over the largest value of an array.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
SIZES = {
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 80,
    "kernels": (2, 2),
    "dtype": "bfloat16",
}
# (B, T, H, K, h, kernels): odd lengths, tails of a block, one and several blocks.
QUICK = [
    ((2, 37, 4, 2, 4, (2, 2)), "float32", True),
]
SLOW = [
    ((2, 37, 4, 2, 4, (2, 2)), "float32", False),
    ((1, 300, 2, 1, 80, (3, 4)), "bfloat16", True),
    ((2, 517, 4, 2, 80, (2, 2)), "float32", True),
    ((1, 1040, 4, 2, 80, (2, 2)), "bfloat16", True),
    ((1, 513, 2, 2, 128, (3, 4)), "bfloat16", True),
    ((1, 8, 2, 1, 4, (4, 4)), "float32", True),
    ((1, 256, 2, 1, 4, (1, 1)), "float32", True),
    ((1, 257, 3, 1, 20, (5, 5)), "float32", True),
]


def example(case, dtype, rng):
    """Arguments without positions, cotangents, and positions of packed documents."""
    batch, length, num_heads, num_kv_heads, head_dim, (depthwise, grouped) = case

    def normal(*shape, dtype="float32"):
        return jnp.asarray(rng.normal(size=shape), dtype)

    def convolutions(heads):
        return Convolutions(
            normal(depthwise, heads, head_dim),
            normal(heads, head_dim),
            normal(grouped, heads, head_dim, head_dim) * head_dim**-0.5,
            normal(heads, head_dim),
        )

    wide, narrow = ((batch, length, heads, head_dim) for heads in (num_heads, num_kv_heads))
    arguments = (
        *(normal(*shape, dtype=dtype) for shape in (wide, narrow, narrow)),
        convolutions(num_heads),
        convolutions(num_kv_heads),
        normal(num_kv_heads),
    )
    cotangents = tuple(normal(*shape, dtype=dtype) for shape in (wide, narrow, narrow))
    starts = rng.uniform(size=(batch, length)) < 0.2
    columns = np.arange(length)
    last = np.maximum.accumulate(np.where(starts, columns, 0), axis=1)
    return arguments, cotangents, jnp.asarray(columns - last, jnp.int32)


@functools.partial(jax.jit, static_argnames="implementation")
def both_passes(arguments, positions, cotangents, implementation="mosaic_tpu"):
    """(outputs, gradients of all arguments but positions)."""
    out, pull_back = jax.vjp(
        lambda *given: ccgqa_mix(*given, positions, implementation=implementation), *arguments
    )
    return out, pull_back(cotangents)


@jax.jit
def definition(arguments, positions, cotangents):
    out, pull_back = jax.vjp(lambda *given: mix(*given, positions), *arguments)
    return out, pull_back(cotangents)


def as_float64(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), tree)


@pytest.mark.parametrize(
    "case, dtype, packed",
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_values_and_gradients(case, dtype, packed, x64):
    seed = int(os.environ.get("CCGQA_MIXING_SEED") or secrets.randbits(32))
    print(f"CCGQA_MIXING_SEED={seed}")
    arguments, cotangents, positions = example(case, dtype, np.random.default_rng(seed))
    positions = positions if packed else None
    got = both_passes(arguments, positions, cotangents)
    expected = definition(as_float64(arguments), positions, as_float64(cotangents))
    assert [x.dtype for x in got[0]] == [dtype] * 3
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        error = np.abs(np.asarray(x, np.float64) - y).max() / np.abs(y).max()
        assert error <= TOLERANCE[dtype], (jax.tree_util.keystr(path), error)


def test_what_is_not_finite_stays_within_reach():
    """A token moves those up to 2 after it, and gradients of those up to 2 before it.

    Beside blocks' ends as well, and in another document not at all.
    """
    case = (1, 530, 2, 1, 4, (2, 2))
    arguments, cotangents, _ = example(case, "float32", np.random.default_rng(0))
    columns = np.arange(530)
    positions = jnp.asarray(np.where(columns < 400, columns, columns - 400)[None], jnp.int32)
    for place in (0, 255, 256, 399, 529):
        q, k, v, *learned = arguments
        q, k, v = (x.at[0, place].set(np.nan) for x in (q, k, v))
        (out, (d_q, d_k, d_v, *_)) = both_passes((q, k, v, *learned), positions, cotangents)
        document = (columns < 400) == (place < 400)
        after, before = columns - place, place - columns
        for x in out[:2]:
            broken = ~np.all(np.isfinite(x[0]), axis=(1, 2))
            np.testing.assert_array_equal(broken, document & (after >= 0) & (after <= 2))
        for x in (d_q, d_k):
            broken = ~np.all(np.isfinite(x[0]), axis=(1, 2))
            assert not np.any(broken & ~(document & (np.abs(before) <= 2))), place
            assert broken[place]
        assert np.all(np.isfinite(d_v))


@pytest.mark.parametrize("length", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_rows_of_a_few_tokens_are_left_to_the_reference(length):
    arguments, cotangents, positions = example(
        (2, length, 2, 1, 4, (2, 2)), "float32", np.random.default_rng(1)
    )
    got = both_passes(arguments, positions, cotangents)
    jax.tree.map(np.testing.assert_array_equal, got, definition(arguments, positions, cotangents))


def test_choices():
    for platform in ("cpu", "gpu"):
        assert choose("auto", platform, **SIZES)[0] == "reference"
    assert choose("auto", "tpu", **SIZES) == ("mosaic_tpu", "fused, forward and backward")
    assert choose("mosaic_tpu", "cpu", **SIZES)[1] == "asked for; interpreted on CPU, slow"
    assert IMPLEMENTATIONS == ("reference", "mosaic_tpu")
    with pytest.raises(ValueError, match="allowed: auto, reference, mosaic_tpu"):
        choose("triton", "tpu", **SIZES)


@pytest.mark.parametrize(
    "sizes, named",
    [
        ({"dtype": "float64"}, "float64"),
        ({"kernels": (6, 6)}, "8 tokens back"),
        ({"num_heads": 64, "num_kv_heads": 8}, "64 and 8 heads of 80"),
    ],
)
def test_what_the_kernel_refuses(sizes, named):
    name, reason = choose("auto", "tpu", **SIZES | sizes)
    assert name == "reference" and named in reason
    with pytest.raises(ValueError, match=named):
        choose("mosaic_tpu", "tpu", **SIZES | sizes)


def test_shapes_that_do_not_go_together_are_refused():
    (q, k, v, query, key, log_temperature), _, positions = example(
        (1, 16, 4, 2, 4, (2, 2)), "float32", np.random.default_rng(2)
    )
    for given in (
        (q[:, :, :3], k, v, query, key),
        (q, k, v[:, 1:], query, key),
        (q, k, v.astype(jnp.bfloat16), query, key),
        (q, k, v, key, query),
    ):
        with pytest.raises(ValueError, match="ccgqa_mix takes"):
            ccgqa_mix(*given, log_temperature, positions)
    for given in ((log_temperature[:1], positions), (log_temperature, positions[0])):
        with pytest.raises(ValueError, match="ccgqa_mix takes log-temperatures"):
            ccgqa_mix(q, k, v, query, key, *given)


def test_blocks_are_whole_tiles():
    assert mosaic_tpu.block_tokens(2048, jnp.bfloat16) == 512
    assert mosaic_tpu.block_tokens(2048, jnp.float32) == 256
    assert mosaic_tpu.block_tokens(37, jnp.bfloat16) == 48
