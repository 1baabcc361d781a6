"""The TPU kernel of the norm-agnostic update: what it moves, and what the compiler makes of it.

Values and gradients are in `test_nag_update`, with every implementation's.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_targets import tpu_mesh
from jax.experimental.layout import Format, Layout
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from kernel_traffic import kernel_calls, traffic

from pallas_kernels import nag_update
from pallas_kernels.nag_update.mosaic_tpu import backward, block_rows, forward, layout_of

# Every number of rows that the plan of blocks can give, and widths on both sides of each.
WIDTHS = (3, 128, 300, 640, 928, 1024, 1408, 2048, 3001, 4096, 8192)
# Of them, so many that each number of rows comes.
EACH_BLOCK = (300, 928, 1408, 3001, 8192)
HARMLESS = re.compile(r" (parameter|custom-call|bitcast|get-tuple-element|tuple|copy-done)\(")
SHAPES = [(1, 64), (7, 256), (127, 928), (4, 1000, 640), (2, 2047, 928), (4096, 1408), (3, 5, 128)]


def both_passes(direction, branch, gain, d_direction, d_log_gain):
    """The kernel's outputs and gradients."""
    out, pull_back = jax.vjp(
        lambda *inputs: nag_update(*inputs, implementation="mosaic_tpu"), direction, branch, gain
    )
    return out, pull_back((d_direction, d_log_gain))


def arguments(shape, dtype, placed=lambda ndim: None):
    """What `both_passes` takes, as shapes."""
    wide = jax.ShapeDtypeStruct(shape, dtype, sharding=placed(len(shape)))
    narrow = jax.ShapeDtypeStruct(shape[:-1], jnp.float32, sharding=placed(len(shape) - 1))
    return wide, wide, narrow, wide, narrow


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_array_moves_once(shape, dtype):
    """At most 5 % more than each input once and each output once, in the backward pass too."""
    calls = kernel_calls(both_passes, *arguments(shape, dtype))
    assert set(calls) == {"nag_update_forward", "nag_update_backward"}
    tokens, entries = math.prod(shape[:-1]), math.prod(shape)
    for name, wide, narrow in (("forward", 3, 2), ("backward", 5, 3)):
        least = wide * entries * jnp.dtype(dtype).itemsize + narrow * tokens * 4
        call = calls[f"nag_update_{name}"]
        rows = layout_of(shape, jnp.dtype(dtype).itemsize, name)
        unfilled = narrow * 4 * (rows.outer * rows.blocks * rows.rows - tokens)
        assert least <= traffic(call) == least + unfilled
        if tokens >= 64:
            assert traffic(call) <= 1.05 * least
        assert call.params["cost_estimate"].bytes_accessed == least


@pytest.mark.parametrize("widths", [WIDTHS, EACH_BLOCK], ids=["all", "some"])
def test_blocks_fill_the_memory_they_may(widths):
    passes = ("forward", "backward")
    rows = {block_rows(width, size, kind) for width in widths for size in (2, 4) for kind in passes}
    assert rows == {16, 32, 64, 128, 256, 512}
    assert block_rows(1024, 4, "forward") > block_rows(1024, 4, "backward")


@pytest.mark.slow
def test_the_interpreter_for_tpu_finds_no_race(capfd):
    """It runs the grid as a TPU does, with blocks on their way while others are computed."""
    rng = np.random.default_rng(0)
    r, f, c = jnp.asarray(rng.normal(size=(3, 700, 200)), jnp.float32)
    a, s = jnp.asarray(rng.uniform(size=(2, 700)), jnp.float32)
    strict = pltpu.InterpretParams(detect_races=True)
    for kernel, inputs in ((forward, (r, f, a)), (backward, (r, f, a, c, s))):
        for got, wanted in zip(kernel(*inputs, strict), kernel(*inputs, True), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # newer versions of JAX raise


@pytest.mark.absent_device
@pytest.mark.slow
@pytest.mark.parametrize(
    "topology, width",
    [("v5e:2x2", width) for width in WIDTHS]
    + [(topology, width) for topology in ("v5p:2x2x1", "v6e:2x2") for width in EACH_BLOCK],
)
def test_the_compiler_takes_every_block(topology, width):
    """At each width, with tokens that leave the last block part empty, in both dtypes."""
    mesh = tpu_mesh(topology, (4, 1, 1, 1))

    def placed(ndim):
        return NamedSharding(mesh, jax.P("data"))

    for dtype in (jnp.float32, jnp.bfloat16):
        tokens = 2 * block_rows(width, jnp.dtype(dtype).itemsize, "backward") + 8

        def split(*inputs):
            return jax.shard_map(
                both_passes, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"),
                check_vma=False,
            )(*inputs)  # fmt: skip

        with jax.set_mesh(mesh):
            compiled = (
                jax.jit(split).lower(*arguments((4 * tokens, width), dtype, placed)).compile()
            )
        assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 2


@pytest.mark.absent_device
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(4097, 928), (2, 2047, 928), (8, 512, 1024)], ids=str)
def test_nothing_of_full_size_surrounds_the_calls(shape, dtype):
    """No pad, slice, convert, copy or fusion of an array [tokens, d], and no temporary one.

    But for prefetches into VMEM, "S(1)", which the compiler makes of arrays that it has room for.
    """
    mesh = tpu_mesh(shape=(4, 1, 1, 1))

    def placed(ndim):  # row by row in memory, as inside a model; arguments may lie otherwise
        return Format(Layout(tuple(range(ndim))), NamedSharding(mesh, jax.P()))

    def replicated(*inputs):
        return jax.shard_map(
            both_passes, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
        )(*inputs)

    given = arguments(shape, dtype, placed)
    outputs = jax.tree.map(
        lambda x: placed(x.ndim), jax.eval_shape(replicated, *arguments(shape, dtype))
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(replicated, out_shardings=outputs).lower(*given).compile()
    entry = compiled.as_text().split("ENTRY", 1)[1]
    entries = math.prod(shape)
    for line in entry.splitlines():
        made = re.match(r"\s*(?:ROOT )?%\S+ = \(?\w+\[([\d,]+)\]\S*", line)
        if made and "S(1)}" not in made[0] and not HARMLESS.search(line):
            assert math.prod(map(int, made[1].split(","))) < entries // 8, line[:200]
    assert compiled.memory_analysis().temp_size_in_bytes < entries // 8
