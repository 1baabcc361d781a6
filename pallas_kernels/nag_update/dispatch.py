"""Chooses the implementation of the norm-agnostic update, and splits its tokens over a mesh."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.nag_update import mosaic_gpu, mosaic_tpu, pallas_triton, triton_call
from pallas_kernels.nag_update.gradient import joint_sums, separate_sums, update_gradient
from pallas_kernels.nag_update.reference import with_pass_through
from pallas_kernels.platform import platform_in_use

Update = tuple[Float[Array, "*tokens d"], Float[Array, "*tokens"]]


class Kernel(NamedTuple):
    """A fused implementation.

    Attributes:
        platform: Where it runs; elsewhere it is interpreted, slowly, if it is asked for.
        refusal: (width, dtypes of direction and branch) -> why it cannot serve, or nothing.
        forward: (direction, branch, gain, interpret) -> (updated, log_gain).
        backward: (direction, branch, gain, d_updated, d_log_gain, interpret) -> (d_direction,
            d_branch, d_gain).
        interpreter_refusal: () -> why it cannot be interpreted, or nothing.
    """

    platform: str
    refusal: Callable[[int, Sequence[jnp.dtype]], str]
    forward: Callable[..., Update]
    backward: Callable[..., tuple[Array, Array, Array]]
    interpreter_refusal: Callable[[], str] = lambda: ""


# Of a platform's kernels "auto" takes the first that serves.
KERNELS = {
    "mosaic_tpu": Kernel("tpu", mosaic_tpu.refusal, mosaic_tpu.forward, mosaic_tpu.backward),
    "pallas_triton": Kernel(
        "gpu",
        pallas_triton.refusal,
        pallas_triton.forward,
        pallas_triton.backward,
        pallas_triton.missing,
    ),
    "mosaic_gpu": Kernel(
        "gpu",
        mosaic_gpu.refusal,
        mosaic_gpu.forward,
        mosaic_gpu.backward,
        mosaic_gpu.interpreter_refusal,
    ),
    "triton": Kernel(
        "gpu",
        triton_call.refusal,
        triton_call.forward,
        triton_call.backward,
        triton_call.interpreter_refusal,
    ),
}
IMPLEMENTATIONS = ("reference", *KERNELS)


def choose(
    implementation: str, platform: str, *, width: int, dtypes: Sequence[Any]
) -> tuple[str, str]:
    """Names the implementation that `nag_update` runs and says why.

    Args:
        implementation: "auto" or a name in `IMPLEMENTATIONS`.
        platform: "cpu", "gpu" or "tpu".
        width: d.
        dtypes: Of direction and branch.

    Returns:
        (name, reason). "auto" takes the platform's kernel where it can serve.

    Raises:
        ValueError: If the name is unknown, or the kernel asked for cannot serve.
    """
    dtypes = [jnp.dtype(dtype) for dtype in dtypes]
    if implementation == "auto":
        refusals = []
        for name, kernel in KERNELS.items():
            if kernel.platform == platform:
                refusal = kernel.refusal(width, dtypes)
                if not refusal:
                    return name, "fused, forward and backward"
                refusals.append(f"{name} {refusal}")
        why = "; ".join(refusals) or f"no fused kernel for {platform.upper()}"
        return "reference", f"{why}: plain JAX, fused by XLA"
    if implementation == "reference":
        return "reference", "asked for; plain JAX, fused by XLA"
    if implementation not in KERNELS:
        raise ValueError(
            f"unknown implementation {implementation!r} of nag_update; "
            f"allowed: auto, {', '.join(IMPLEMENTATIONS)}"
        )
    kernel = KERNELS[implementation]
    elsewhere = kernel.platform != platform
    refusal = kernel.interpreter_refusal() if elsewhere else kernel.refusal(width, dtypes)
    if refusal:
        raise ValueError(f"implementation {implementation!r} of nag_update {refusal}")
    if elsewhere:
        return implementation, f"asked for; interpreted on {platform.upper()}, slow"
    return implementation, "asked for"


def nag_update(
    direction: Float[Array, "*tokens d"],
    branch: Float[Array, "*tokens d"],
    gain: Float[Array, "*tokens"],
    *,
    implementation: str = "auto",
    token_spec: jax.sharding.PartitionSpec | None = None,
) -> Update:
    """Writes a branch into a norm-agnostic stream.

    Equations (10) to (17) of arXiv 2606.16112; `reference.update_formula` is the definition.

    Args:
        direction: Direction of the stream, norm sqrt(d), zero mean over features; d at least 3.
        branch: Output of the sub-layer in any scale.
        gain: Gain a = alpha * m of each token. A token of gain 0 passes bit for bit.
        implementation: "auto" or a name in `IMPLEMENTATIONS`.
        token_spec: On a mesh, how the tokens' axes are split, as `gain` is; None for not at all. A
            kernel runs on each device's own tokens. Plain JAX is left to the partitioner.

    Returns:
        The new direction (dtype of `direction`) and the growth of the log-norm (at least float32).

    Raises:
        ValueError: As `choose`, and for shapes that do not go together.
    """
    if branch.shape != direction.shape or gain.shape != direction.shape[:-1]:
        raise ValueError(
            f"nag_update takes a direction and a branch [*tokens, d] and a gain [*tokens], not "
            f"{direction.shape}, {branch.shape} and {gain.shape}"
        )
    platform = platform_in_use()
    dtypes = (direction.dtype, branch.dtype)
    name, _ = choose(implementation, platform, width=direction.shape[-1], dtypes=dtypes)
    if name == "reference" or direction.size == 0:
        return _plain(direction, branch, gain)
    return _fused(direction, branch, gain, name, KERNELS[name].platform != platform, token_spec)


@jax.custom_vjp
def _plain(direction, branch, gain):
    return with_pass_through(direction, branch, gain)


def _plain_forward(direction, branch, gain):
    return _plain(direction, branch, gain), (direction, branch, gain)


def _plain_backward(residuals, cotangents):
    # XLA for CPU makes a loop over the tokens of each sum; other compilers join them by themselves.
    sums = joint_sums if platform_in_use() == "cpu" else separate_sums
    return update_gradient(*residuals, *cotangents, sums=sums)


_plain.defvjp(_plain_forward, _plain_backward)


# Each pass is mapped over the mesh by itself: the transpose of a mapped call would add gradients up
# over the mesh axes that do not split tokens, though all devices along them have the same.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _fused(direction, branch, gain, name, interpret, spec):
    run = functools.partial(KERNELS[name].forward, interpret=interpret)
    return _on_each_device(run, spec, 2)(direction, branch, gain)


def _fused_forward(direction, branch, gain, name, interpret, spec):
    return _fused(direction, branch, gain, name, interpret, spec), (direction, branch, gain)


def _fused_backward(name, interpret, spec, residuals, cotangents):
    run = functools.partial(KERNELS[name].backward, interpret=interpret)
    return _on_each_device(run, spec, 3)(*residuals, *cotangents)


_fused.defvjp(_fused_forward, _fused_backward)


def _on_each_device(run: Callable, spec: jax.sharding.PartitionSpec | None, outputs: int):
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.are_all_axes_manual:
        return run
    spec = jax.P() if spec is None else spec
    return jax.shard_map(run, in_specs=spec, out_specs=(spec,) * outputs, check_vma=False)
