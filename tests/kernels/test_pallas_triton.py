"""The GPU kernel of the norm-agnostic update, compiled to machine code for Hopper with no GPU.

Values and gradients are in `test_nag_update`, with every implementation's.
"""

import jax
import jax.numpy as jnp
import pytest
from compile_targets import gpu_mesh
from jax.sharding import NamedSharding

from pallas_kernels import nag_update

NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


def both_passes(direction, branch, gain, d_direction, d_log_gain):
    """The kernel's outputs and gradients, tokens split over the mesh."""
    out, pull_back = jax.vjp(
        lambda *inputs: nag_update(*inputs, token_spec=jax.P("data")), direction, branch, gain
    )
    return out, pull_back((d_direction, d_log_gain))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("width", [3, 64, 256, 928, 1024, 1408, 2048, 3001, 4096, 8192])
def test_no_register_spills_and_nothing_is_gathered(width, dtype):
    """Chosen by itself on GPU; on four of them each has the two kernels and its own tokens."""
    mesh = gpu_mesh(4, (4, 1, 1, 1))
    split = NamedSharding(mesh, jax.P("data"))
    tokens = 4 * 1001
    wide = jax.ShapeDtypeStruct((tokens, width), dtype, sharding=split)
    narrow = jax.ShapeDtypeStruct((tokens,), jnp.float32, sharding=split)
    with jax.set_mesh(mesh):
        lowered = jax.jit(both_passes).lower(wide, wide, narrow, wide, narrow)
        compiled = lowered.compile(compiler_options=NO_SPILLS)
    text = compiled.as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 2
    assert "all-gather" not in text and "all-reduce" not in text
    # Five arrays in, of which the backward pass returns two and the forward one: nothing besides.
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * width * 4 // 8 + 4096
