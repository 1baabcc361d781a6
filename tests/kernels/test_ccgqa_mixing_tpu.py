"""The TPU kernel of CCGQA's mixing: what it moves, and what the compiler makes of it.

Values and gradients are in `test_ccgqa_mixing`.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from compile_targets import tpu_mesh
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from kernel_traffic import kernel_calls, traffic

from pallas_kernels import ccgqa_mix
from pallas_kernels.ccgqa_mixing import Convolutions

DTYPES = [jnp.float32, jnp.bfloat16]
NUM_HEADS, NUM_KV_HEADS = 8, 2
HARMLESS = re.compile(r" (parameter|custom-call|bitcast|get-tuple-element|tuple|copy-done)\(")


def arguments(batch, length, head_dim, dtype, kernels=(2, 2), placed=lambda ndim: None):
    """Flat projections, weights, positions and heads-first cotangents, as shapes."""

    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=placed(len(sizes)))

    counts = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    flat = tuple(shape(batch, length, n * head_dim, dtype=dtype) for n in counts)
    learned = tuple(
        Convolutions(
            shape(kernels[0], n, head_dim),
            shape(n, head_dim),
            shape(kernels[1], n, head_dim, head_dim),
            shape(n, head_dim),
        )
        for n in counts[:2]
    )
    by_head = tuple(shape(batch, n, length, head_dim, dtype=dtype) for n in counts)
    positions = shape(batch, length, dtype=jnp.int32)
    return flat, (*learned, shape(NUM_KV_HEADS)), positions, by_head


def both_passes(flat, learned, positions, cotangents):
    """As in a model: projections side by side, as products make them, and heads for attention."""

    def mixed(flat, learned):
        heads = [
            x.reshape(*x.shape[:2], n, -1)
            for x, n in zip(flat, (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), strict=True)
        ]
        out = ccgqa_mix(*heads, *learned, positions, implementation="mosaic_tpu")
        return tuple(jnp.transpose(x, (0, 2, 1, 3)) for x in out)

    out, pull_back = jax.vjp(mixed, flat, learned)
    return out, pull_back(cotangents)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("length", [2048, 1999])
def test_every_array_moves_once(length, dtype):
    """At most 5 % more than each input once and each output once, in the backward pass too."""
    batch, head_dim, size = 6, 80, jnp.dtype(dtype).itemsize
    calls = kernel_calls(both_passes, *arguments(batch, length, head_dim, dtype))
    assert set(calls) == {"ccgqa_mixing_forward", "ccgqa_mixing_backward"}
    tokens, heads = batch * length, NUM_HEADS + NUM_KV_HEADS
    grouped, others = 2 * heads * head_dim**2, (3 * heads + NUM_KV_HEADS) * head_dim
    delayed = NUM_KV_HEADS * head_dim
    learned = {
        "forward": size * grouped + 4 * (others + delayed),
        "backward": (size + 4) * grouped + 4 * (2 * others + delayed),
    }
    wide = {"forward": 2 * (heads + NUM_KV_HEADS), "backward": 3 * heads + 2 * NUM_KV_HEADS}
    for name, count in wide.items():
        least = tokens * (count * head_dim * size + 4) + learned[name]
        moved = traffic(calls[f"ccgqa_mixing_{name}"])
        assert least < moved <= 1.05 * least, moved / least


@pytest.mark.absent_device
@pytest.mark.slow
@pytest.mark.parametrize(
    "topology, length, head_dim, kernels, dtype",
    [
        ("v5e:2x2", 2048, 80, (2, 2), jnp.bfloat16),
        ("v5e:2x2", 1999, 80, (2, 2), jnp.float32),
        ("v5e:2x2", 1999, 80, (3, 4), jnp.bfloat16),
        ("v5e:2x2", 1999, 128, (2, 2), jnp.bfloat16),
        # Widths of heads that are no multiple of 8, as in some of P1's models.
        ("v5e:2x2", 2048, 58, (2, 2), jnp.bfloat16),
        ("v5e:2x2", 2048, 66, (2, 2), jnp.bfloat16),
        ("v5p:2x2x1", 1999, 80, (2, 2), jnp.bfloat16),
        ("v6e:2x2", 1999, 80, (2, 2), jnp.bfloat16),
    ],
)
def test_the_compiler_takes_it_and_adds_no_copies(topology, length, head_dim, kernels, dtype):
    """No pad, slice, convert, copy or fusion of the size of the tokens, and no temporary one."""
    mesh = tpu_mesh(topology, (4, 1, 1, 1))

    def placed(ndim):  # row by row in memory, as inside a model; arguments may lie otherwise
        return Format(Layout(tuple(range(ndim))), NamedSharding(mesh, jax.P()))

    def replicated(*inputs):
        return jax.shard_map(
            both_passes, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
        )(*inputs)

    given = arguments(2, length, head_dim, dtype, kernels, placed)
    shapes = jax.eval_shape(replicated, *arguments(2, length, head_dim, dtype, kernels))
    outputs = jax.tree.map(lambda x: placed(x.ndim), shapes)
    with jax.set_mesh(mesh):
        compiled = jax.jit(replicated, out_shardings=outputs).lower(*given).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    entries = 2 * length * NUM_KV_HEADS * head_dim  # of the smallest activation
    for line in text.split("ENTRY", 1)[1].splitlines():
        made = re.match(r"\s*(?:ROOT )?%\S+ = \(?\w+\[([\d,]+)\]\S*", line)
        # "S(1)" marks prefetches into VMEM, of arrays that the compiler has room for.
        if made and "S(1)}" not in made[0] and not HARMLESS.search(line):
            assert math.prod(map(int, made[1].split(","))) < entries // 2, line[:200]
