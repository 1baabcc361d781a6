"""The norm-agnostic update as one Pallas kernel for NVIDIA GPUs, lowered through Triton.

A program computes the definition (`reference.update_formula`, or `gradient.update_gradient`) on
the tokens that `triton_blocks` gives it.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.nag_update import triton_blocks
from pallas_kernels.nag_update.gradient import update_gradient
from pallas_kernels.nag_update.limits import FLOPS
from pallas_kernels.nag_update.reference import with_pass_through

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # JAX warns that it will be removed
    plgpu = None


def refusal(width: int, dtypes: Sequence[jnp.dtype]) -> str:
    """Why the kernel cannot serve, or nothing."""
    return missing() or triton_blocks.refusal(width, dtypes)


def missing() -> str:
    """Why the kernel can neither run nor be interpreted, or nothing."""
    return "needs an older JAX, with Pallas' lowering through Triton" if plgpu is None else ""


def forward(
    direction: Float[Array, "*tokens d"],
    branch: Float[Array, "*tokens d"],
    gain: Float[Array, "*tokens"],
    interpret: bool,
) -> tuple[Float[Array, "*tokens d"], Float[Array, "*tokens"]]:
    """`reference.with_pass_through`; `interpret` runs the kernel without a GPU."""
    statistics = jnp.promote_types(direction.dtype, jnp.float32)
    return _call(
        with_pass_through,
        "forward",
        inputs=(direction, branch, gain.astype(statistics)),
        outputs=(direction, jax.ShapeDtypeStruct(gain.shape, statistics)),
        interpret=interpret,
    )


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
        update_gradient,
        "backward",
        inputs=(direction, branch, wide, d_updated, d_log_gain),
        outputs=(direction, branch, wide),
        interpret=interpret,
    )
    return d_direction, d_branch, d_gain.astype(gain.dtype)


def _call(body, kind, *, inputs, outputs, interpret):
    """Runs `body(*inputs, width)` on some tokens at a time; arrays are [*tokens(, d)]."""
    *leading, width = inputs[0].shape
    tokens = math.prod(leading)
    rows, padded, warps = triton_blocks.blocks_of(width)
    narrow = len(leading)

    def kernel(*refs):
        token = pl.program_id(0) * rows + jnp.arange(rows)
        feature = jnp.arange(padded)
        inside = token < tokens
        whole = inside[:, None] & (feature < width)[None]

        def place(ref):
            if len(ref.shape) == 1:
                return ref.at[token], inside
            return ref.at[token[:, None], feature[None]], whole

        def load(ref):
            at, mask = place(ref)
            return plgpu.load(at, mask=mask, other=0.0)

        results = body(*map(load, refs[: len(inputs)]), width=width)
        for ref, result in zip(refs[len(inputs) :], results, strict=True):
            at, mask = place(ref)
            plgpu.store(at, result.astype(ref.dtype), mask=mask)

    flat = [x.reshape(tokens, width) if x.ndim > narrow else x.reshape(tokens) for x in inputs]
    shapes = [(tokens, width) if len(x.shape) > narrow else (tokens,) for x in outputs]
    results = pl.pallas_call(
        kernel,
        name=f"nag_update_{kind}",
        grid=(pl.cdiv(tokens, rows),),
        out_shape=[
            jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, outputs, strict=True)
        ],
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=FLOPS[kind] * tokens * width,
            transcendentals=2 * tokens,
            bytes_accessed=triton_blocks.bytes_of((*inputs, *outputs)),
        ),
        interpret=interpret,
    )(*flat)
    return tuple(
        result.reshape(x.shape).astype(x.dtype) for result, x in zip(results, outputs, strict=True)
    )
