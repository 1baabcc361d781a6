"""The norm-agnostic update as one Pallas kernel for Hopper GPUs and newer, through Mosaic GPU.

A block of 128 threads holds one token in registers, in strips of 128 features, so that sums over
features are numbers; `gradient` has the mathematics.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.nag_update.limits import dtype_refusal
from pallas_kernels.nag_update.one_token import backward_token, forward_token

STRIP = 128
MAX_WIDTH = 6144  # the backward pass then takes all 255 registers; at 8192 it spills


def refusal(width: int, dtypes: Sequence[jnp.dtype]) -> str:
    """Why the kernel cannot serve, or nothing."""
    if refused := dtype_refusal(dtypes):
        return refused
    if width % STRIP:
        return f"takes widths that are multiples of {STRIP}, not {width}"
    if width > MAX_WIDTH:
        return f"has no room for tokens of width {width}"
    # Where a program is only compiled for a GPU there is none to ask.
    if jax.default_backend() == "gpu" and not _is_hopper(jax.devices()[0]):
        return "needs a GPU of the Hopper generation or newer"
    return ""


def _is_hopper(device: jax.Device) -> bool:
    generation = device.compute_capability.partition(".")[0]  # of AMD's GPUs it is no number
    return generation.isdigit() and int(generation) >= 9


def interpreter_refusal() -> str:
    """Why the kernel is not interpreted where a model runs; tests interpret it all the same."""
    return (
        "cannot be interpreted in a model: JAX's interpreter for it takes one device, and no remat"
    )


def forward(
    direction: Float[Array, "*tokens d"],
    branch: Float[Array, "*tokens d"],
    gain: Float[Array, "*tokens"],
    interpret: bool,
) -> tuple[Float[Array, "*tokens d"], Float[Array, "*tokens"]]:
    """`reference.with_pass_through`; `interpret` runs the kernel without a GPU."""
    gain = gain.astype(jnp.promote_types(direction.dtype, jnp.float32))
    updated, growth = _call(
        forward_token,
        "forward",
        inputs=(direction, branch, gain),
        outputs=(direction, gain),
        interpret=interpret,
    )
    return updated, 0.5 * jnp.log1p(growth)


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
        backward_token,
        "backward",
        inputs=(direction, branch, wide, d_updated, d_log_gain),
        outputs=(direction, branch, wide),
        interpret=interpret,
    )
    return d_direction, d_branch, d_gain.astype(gain.dtype)


def _call(body, kind, *, inputs, outputs, interpret):
    """Runs `body` on one token at a time; arrays are [*tokens(, d)], outputs like `outputs`."""
    # Not needed to import the package, and slow to import.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    *leading, _ = inputs[0].shape
    tokens = math.prod(leading)

    def flat(shape):
        return (tokens, *shape[len(leading) :])

    def kernel(*refs):
        token = jax.lax.axis_index("token")
        results = body(*(ref[token] for ref in refs[: len(inputs)]))
        for ref, result in zip(refs[len(inputs) :], results, strict=True):
            ref[token] = result.astype(ref.dtype)

    results = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(flat(x.shape), x.dtype) for x in outputs],
        grid=(tokens,),
        grid_names=("token",),
        kernel_name=f"nag_update_{kind}",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=_interpreter() if interpret else None,
    )(*(x.reshape(flat(x.shape)) for x in inputs))
    return tuple(result.reshape(x.shape) for result, x in zip(results, outputs, strict=True))


def _interpreter():
    try:
        from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams
    except ImportError:  # JAX before 0.11
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    return InterpretGPUParams()
