"""The GPU kernels of the norm-agnostic update, compiled to machine code for Hopper with no GPU.

Values and gradients are in `test_nag_update`, with every implementation's; Triton's interpreter
wants a process of its own, which is started here.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from compile_targets import gpu_mesh
from jax.sharding import NamedSharding

from pallas_kernels import nag_update
from pallas_kernels.nag_update import choose, triton_call

pytestmark = pytest.mark.absent_device

ROOT = Path(__file__).parents[2]
WIDTHS = {
    "pallas_triton": (3, 64, 256, 928, 1024, 1408, 2048, 3001, 4096, 8192),
    "mosaic_gpu": (128, 256, 896, 1024, 1408, 2048, 4096, 6144),
    "triton": (3, 64, 928, 1024, 3001, 4096, 8192),
}
CALLED = {"pallas_triton": "__gpu$xla.gpu.triton", "mosaic_gpu": "mosaic_gpu", "triton": "triton_k"}
NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


def both_passes(implementation):
    """The kernel's outputs and gradients, tokens split over the mesh, under `jax.checkpoint`."""

    def function(direction, branch, gain, *cotangents):
        @jax.checkpoint
        def update(*inputs):
            spec = jax.P("data")
            return nag_update(*inputs, implementation=implementation, token_spec=spec)

        out, pull_back = jax.vjp(update, direction, branch, gain)
        return out, pull_back(cotangents)

    return function


def require(kernel):
    """Skips where the kernel cannot be compiled, with the reason."""
    try:
        choose(kernel, "gpu", width=128, dtypes=("float32",))
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kernel, width", [(kernel, width) for kernel, widths in WIDTHS.items() for width in widths]
)
def test_compiles_and_nothing_is_gathered(kernel, width, dtype):
    """On four GPUs each has the two kernels and its own tokens."""
    require(kernel)
    mesh = gpu_mesh(4, (4, 1, 1, 1))
    split = NamedSharding(mesh, jax.P("data"))
    tokens = 4 * 1001
    wide = jax.ShapeDtypeStruct((tokens, width), dtype, sharding=split)
    narrow = jax.ShapeDtypeStruct((tokens,), jnp.float32, sharding=split)
    with jax.set_mesh(mesh):
        lowered = jax.jit(both_passes(kernel)).lower(wide, wide, narrow, wide, narrow)
        compiled = lowered.compile(compiler_options=NO_SPILLS)
    text = compiled.as_text()
    assert text.count(f'custom_call_target="{CALLED[kernel]}') == 2
    assert "all-gather" not in text and "all-reduce" not in text
    # Five arrays in, of which the backward pass returns two and the forward one: nothing besides.
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * width * 4 // 8 + 4096


@pytest.mark.slow
@pytest.mark.parametrize("kernel", WIDTHS)
def test_compiles_under_vmap(kernel):
    """As one call a pass for all, also where an input is the same for all."""
    require(kernel)
    mesh = gpu_mesh(1, (1, 1, 1, 1))
    whole = NamedSharding(mesh, jax.P())
    wide = jax.ShapeDtypeStruct((3, 64, 256), jnp.float32, sharding=whole)
    narrow = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=whole)
    each = jax.vmap(both_passes(kernel), in_axes=(0, 0, None, 0, None))
    with jax.set_mesh(mesh):
        compiled = jax.jit(each).lower(wide, wide, narrow, wide, narrow).compile()
    assert compiled.as_text().count(f'custom_call_target="{CALLED[kernel]}') == 2


@pytest.mark.slow
@pytest.mark.parametrize("kernel", WIDTHS)
def test_no_registers_spill(kernel):
    """In the table that docs/kernels.md shows, for its widths and on both sides of a power of 2."""
    require(kernel)
    gpu_mesh()  # skips
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_registers.py"), f"--kernels={kernel}"]
    widths = "128,640,896,1024,1152,2048,2176,4096,6144,8192"
    out = run([*command, f"--widths={widths}"]).stdout
    rows = re.findall(r"\| (\d+) / (\d+) / \d+ \| (\d+) / (\d+) / \d+ \|", out)
    assert len(rows) == {"mosaic_gpu": 18}.get(kernel, 20), out
    for forward, forward_spilled, backward, backward_spilled in rows:
        assert forward_spilled == backward_spilled == "0", out
        assert max(int(forward), int(backward)) <= 255


@pytest.mark.slow
def test_values_in_tritons_interpreter():
    """All tests of values that take an implementation; 4,096 tokens would take minutes."""
    pytest.importorskip("triton")
    tests = [
        str(ROOT / "tests" / "kernels" / f"test_nag_update{part}.py") for part in ("", "_grid")
    ]
    command = [sys.executable, "-m", "pytest", "-o", "addopts=-q", "-p", "no:cacheprovider", *tests]
    out = run(
        [*command, "-k", "triton and not pallas_triton and not 4096"], TRITON_INTERPRET="1"
    ).stdout
    passed = re.search(r"(\d+) passed", out)
    assert passed and int(passed[1]) > 50 and "skipped" not in out, out


def run(command, **environment):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | environment
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def test_what_is_not_interpreted_says_so(monkeypatch):
    with pytest.raises(ValueError, match="'mosaic_gpu' of nag_update cannot be interpreted in a m"):
        choose("mosaic_gpu", "cpu", width=128, dtypes=("float32",))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="'triton' of nag_update (is|cannot be) interpreted"):
        choose("triton", "cpu", width=128, dtypes=("float32",))


def test_absent_or_unsuitable_jax_triton_is_refused(monkeypatch):
    """In one sentence, whatever is wrong with it."""

    def refusal():
        triton_call._missing.cache_clear()
        try:
            return triton_call._missing()
        finally:
            triton_call._missing.cache_clear()

    monkeypatch.setattr(triton_call.importlib.util, "find_spec", lambda name: None)
    assert refusal() == "needs jax-triton: pip install 'nag-jax[triton]'"
    monkeypatch.setattr(triton_call.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    assert refusal().startswith("cannot import jax-triton: ModuleNotFoundError ")

    def broken(*inputs, interpret):
        raise TypeError("takes 2 arguments but 3 were given\nand more")

    monkeypatch.setattr(triton_call, "_old_signature", lambda: False)
    monkeypatch.setattr(triton_call.importlib, "import_module", lambda name: None)
    monkeypatch.setattr(triton_call.importlib.metadata, "version", lambda name: "0.4.1")
    monkeypatch.setattr(triton_call, "forward", broken)
    version = f"cannot use jax-triton 0.4.1 with jax {jax.__version__}: "
    assert refusal() == version + "TypeError takes 2 arguments but 3 were given"
