"""The fused attention kernels, forward and backward, compiled for TPU and GPU at real sizes.

No device is needed, but the compiler is: without libtpu or the CUDA plugin these tests skip. What
they cannot show is that the compiled kernels compute the right numbers.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from compile_targets import gpu_mesh, tpu_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nag_jax.models.attention_kernels import attend
from nag_jax.models.chunked_attention import SAVED_NAMES
from pallas_kernels.platform import platform_in_use

pytestmark = pytest.mark.absent_device

ROWS = P(("data", "fsdp"))


def compile_gradients(mesh, width, packed, length=2048, batch=4, names=SAVED_NAMES):
    """Value and gradients of rematerialised attention; 8 query heads and 2 key-value heads."""
    sharding = NamedSharding(mesh, ROWS)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def block(q, k, v, segment_ids):
        q, k, v = q * 2, k * 2, v * 2  # something to compute again
        out = attend(q, k, v, segment_ids, implementation="auto", chunk=128, packed=packed)
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    kept = jax.checkpoint_policies.save_only_these_names(*names)
    gradients = jax.value_and_grad(jax.checkpoint(block, policy=kept), (0, 1, 2))
    with jax.set_mesh(mesh):
        lowered = jax.jit(gradients).lower(
            array(batch, length, 2, 4, width),
            array(batch, length, 2, width),
            array(batch, length, 2, width),
            array(batch, length, dtype=jnp.int32),
        )
        return lowered.compile()


def calls(compiled, target):
    """Names of the custom calls whose target starts like this, sorted."""
    return sorted(re.findall(rf'custom_call_target="({target}\w*)"', compiled.as_text()))


@pytest.mark.parametrize("width", [58, 66, 88])
def test_splash_compiles_for_tpu(width):
    """One forward kernel, two backward kernels, and rows that stay on their chip."""
    mesh = tpu_mesh()
    with jax.set_mesh(mesh):
        assert platform_in_use() == "tpu"
    compiled = compile_gradients(mesh, width, packed=True)
    assert len(calls(compiled, "tpu_custom_call")) == 3
    assert "all-gather" not in compiled.as_text()


def test_without_the_names_kernels_run_forward_twice():
    """What the other tests count would show a kernel that is recomputed."""
    again = compile_gradients(tpu_mesh(), 58, packed=True, names=())
    assert len(calls(again, "tpu_custom_call")) == 4


def test_splash_memory_grows_with_the_length():
    peaks = []
    for length in (2048, 8192):
        compiled = compile_gradients(tpu_mesh(), 58, packed=True, length=length)
        peaks.append(compiled.memory_analysis().peak_memory_in_bytes)
    assert peaks[1] < 4.5 * peaks[0]


@pytest.mark.parametrize("width", [58, 66, 88])
def test_cudnn_compiles_for_gpu(width):
    mesh = gpu_mesh()
    with jax.set_mesh(mesh):
        assert platform_in_use() == "gpu"
    try:
        compiled = compile_gradients(mesh, width, packed=False)
    except RuntimeError as error:
        if "cuDNN" not in str(error):
            raise
        pytest.skip("cuDNN is not installed")
    names = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert calls(compiled, r"__cudnn\$fmha") == names
    assert "all-gather" not in compiled.as_text()
