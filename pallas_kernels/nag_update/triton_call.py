"""The norm-agnostic update as one Triton kernel, called through jax-triton, an optional extra."""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import math
import os
import threading
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.nag_update import triton_blocks
from pallas_kernels.nag_update.limits import FLOPS

_INTERPRETER = threading.Lock()  # it keeps the program's number in a global


def refusal(width: int, dtypes: Sequence[jnp.dtype]) -> str:
    """Why the kernel cannot serve, or nothing."""
    return triton_blocks.refusal(width, dtypes) or _missing()


@functools.cache
def _missing() -> str:
    """Why jax-triton cannot be used, or nothing."""
    if importlib.util.find_spec("jax_triton") is None:
        return "needs jax-triton: pip install 'nag-jax[triton]'"
    try:
        importlib.import_module("jax_triton")
    except Exception as error:  # such as a jax without its plugin for CUDA
        return f"cannot import jax-triton: {_first_line(error)}"
    if _old_signature() and jax.default_backend() != "gpu":
        return "needs jax-triton 0.4 to be compiled where there is no GPU"
    # Not every pair of versions works, which shows where a call is lowered. There is no rule for
    # CPU, and nothing is compiled on the way to that.
    wide, narrow = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 3), (1,)))
    try:
        jax.jit(functools.partial(forward, interpret=False)).trace(wide, wide, narrow).lower(
            lowering_platforms=("cpu",)
        )
    except NotImplementedError:
        return ""
    except Exception as error:
        version = importlib.metadata.version("jax-triton")
        return f"cannot use jax-triton {version} with jax {jax.__version__}: {_first_line(error)}"
    return ""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__} {error}".splitlines()[0]


def _old_signature() -> bool:
    """Whether jax-triton is older than 0.4, where it also asks the GPU itself what it is."""
    call = importlib.import_module("jax_triton").triton_call
    return "out_type" not in inspect.signature(call).parameters


def interpreter_refusal() -> str:
    """Why the kernel cannot be interpreted, or nothing."""
    if importlib.util.find_spec("triton") is None:
        return "cannot be interpreted without triton: pip install 'nag-jax[triton]'"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "is interpreted only where TRITON_INTERPRET=1 is set in the environment"
    if jax.device_count() > 1:  # calls back into Python, for which several devices' steps can wait
        return "is interpreted on one device only"
    return ""


def _vmap_adds_tokens(function: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple]:
    """Lets a function of arrays [*tokens(, d)] be vmapped, which jax-triton's call cannot."""

    @functools.wraps(function)
    def wrapped(*inputs, interpret):
        call = jax.custom_batching.custom_vmap(functools.partial(function, interpret=interpret))

        @call.def_vmap
        def _(size, batched, *inputs):
            each = [
                x if has else jnp.broadcast_to(x, (size, *x.shape))
                for x, has in zip(inputs, batched, strict=True)
            ]
            results = wrapped(*each, interpret=interpret)
            return results, (True,) * len(results)

        return call(*inputs)

    return wrapped


@_vmap_adds_tokens
def forward(
    direction: Float[Array, "*tokens d"],
    branch: Float[Array, "*tokens d"],
    gain: Float[Array, "*tokens"],
    interpret: bool,
) -> tuple[Float[Array, "*tokens d"], Float[Array, "*tokens"]]:
    """`reference.with_pass_through`; `interpret` runs the kernel in Triton's interpreter."""
    gain = gain.astype(jnp.promote_types(direction.dtype, jnp.float32))
    updated, growth = _call(
        "forward",
        inputs=(direction, branch, gain),
        outputs=(direction, gain),
        interpret=interpret,
    )
    return updated, 0.5 * jnp.log1p(growth)


@_vmap_adds_tokens
def backward(
    direction: Float[Array, "*tokens d"],
    branch: Float[Array, "*tokens d"],
    gain: Float[Array, "*tokens"],
    d_updated: Float[Array, "*tokens d"],
    d_log_gain: Float[Array, "*tokens"],
    interpret: bool,
) -> tuple[Float[Array, "*tokens d"], Float[Array, "*tokens d"], Float[Array, "*tokens"]]:
    """`gradient.update_gradient`."""
    wide = gain.astype(jnp.promote_types(direction.dtype, jnp.float32))
    d_direction, d_branch, d_gain = _call(
        "backward",
        inputs=(direction, branch, wide, d_updated, d_log_gain),
        outputs=(direction, branch, wide),
        interpret=interpret,
    )
    return d_direction, d_branch, d_gain.astype(gain.dtype)


def _call(kind, *, inputs, outputs, interpret):
    """Runs a kernel over arrays [*tokens(, d)] that lie row by row; outputs like `outputs`."""
    from pallas_kernels.nag_update import triton_kernels

    kernel = getattr(triton_kernels, f"{kind}_kernel")
    *leading, width = inputs[0].shape
    tokens = math.prod(leading)
    rows, padded, warps = triton_blocks.blocks_of(width)
    grid = (pl.cdiv(tokens, rows),)
    sizes = {"tokens": tokens, "width": width, "rows": rows, "padded": padded}
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
    if interpret:
        run = functools.partial(_interpreted, kernel, grid, sizes, shapes)
        return jax.pure_callback(run, shapes, *inputs)
    import jax_triton

    if _old_signature():
        options = {"out_shape": shapes}
    else:
        # Triton writes the newest PTX that its own assembler reads, and JAX assembles it with that
        # of the CUDA toolkit, which may be older. This version, of CUDA 12.9, has all GPUs of 2025.
        options = {
            "out_type": shapes,
            "backend_options": {"ptx_version": 88},
            "cost_estimate": {
                "flops": FLOPS[kind] * tokens * width,
                "bytes_accessed": triton_blocks.bytes_of((*inputs, *outputs)),
            },
        }
    return jax_triton.triton_call(
        *inputs,
        kernel=kernel,
        grid=grid,
        name=f"nag_update_{kind}",
        num_warps=warps,
        num_stages=1,
        **options,
        **sizes,
    )


def _interpreted(kernel, grid, sizes, shapes, *inputs):
    """The kernel's outputs on NumPy arrays, whose addresses stand for those of a GPU's memory."""
    from triton import language as tl
    from triton.runtime.interpreter import TensorHandle

    arrays = [np.ascontiguousarray(x) for x in inputs] + [
        np.empty(x.shape, x.dtype) for x in shapes
    ]

    def pointer(array):
        bits = 8 * array.itemsize
        kind = tl.pointer_type(tl.dtype("bf16" if array.dtype.name == "bfloat16" else f"fp{bits}"))
        return tl.tensor(TensorHandle(np.array([array.ctypes.data], np.uint64), kind), kind)

    with _INTERPRETER:
        kernel[grid](*map(pointer, arrays), **sizes)
    return arrays[len(inputs) :]
