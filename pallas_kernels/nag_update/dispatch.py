"""Chooses the implementation of the norm-agnostic update, and splits its tokens over a mesh."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.nag_update import mosaic_tpu, pallas_triton
from pallas_kernels.nag_update.reference import nag_update_reference
from pallas_kernels.platform import platform_in_use

Update = tuple[Float[Array, "*tokens d"], Float[Array, "*tokens"]]


class Kernel(NamedTuple):
    """A fused implementation.

    Attributes:
        platform: Where it runs; elsewhere it is interpreted, slowly, if it is asked for.
        refusal: (width, dtype) -> why it cannot serve, or nothing.
        run: (direction, branch, gain, interpret) -> update.
    """

    platform: str
    refusal: Callable[[int, jnp.dtype], str]
    run: Callable[..., Update]


KERNELS = {
    "mosaic_tpu": Kernel("tpu", mosaic_tpu.refusal, mosaic_tpu.nag_update_mosaic_tpu),
    "pallas_triton": Kernel("gpu", pallas_triton.refusal, pallas_triton.nag_update_pallas_triton),
}
IMPLEMENTATIONS = ("reference", *KERNELS)


def choose(
    implementation: str,
    platform: str,
    *,
    width: int,
    dtype: str | jnp.dtype,
) -> tuple[str, str]:
    """Names the implementation that `nag_update` runs and says why.

    Args:
        implementation: "auto" or a name in `IMPLEMENTATIONS`.
        platform: "cpu", "gpu" or "tpu".
        width: d.
        dtype: Of the direction.

    Returns:
        (name, reason). "auto" takes the platform's kernel where it can serve.

    Raises:
        ValueError: If the name is unknown, or the kernel asked for cannot serve.
    """
    dtype = jnp.dtype(dtype)
    if implementation == "auto":
        refusals = []
        for name, kernel in KERNELS.items():
            if kernel.platform == platform:
                refusal = kernel.refusal(width, dtype)
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
    if kernel.platform != platform:
        return implementation, f"asked for; interpreted on {platform.upper()}, slow"
    if refusal := kernel.refusal(width, dtype):
        raise ValueError(f"implementation {implementation!r} of nag_update {refusal}")
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
        ValueError: As `choose`.
    """
    platform = platform_in_use()
    name, _ = choose(implementation, platform, width=direction.shape[-1], dtype=direction.dtype)
    if name == "reference":
        return nag_update_reference(direction, branch, gain)
    kernel = KERNELS[name]
    interpret = kernel.platform != platform

    def run(direction, branch, gain):
        return kernel.run(direction, branch, gain, interpret)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.are_all_axes_manual:
        return run(direction, branch, gain)
    spec = jax.P() if token_spec is None else token_spec
    mapped = jax.shard_map(run, in_specs=spec, out_specs=(spec, spec), check_vma=False)
    return mapped(direction, branch, gain)
