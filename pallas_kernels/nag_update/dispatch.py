"""Chooses the implementation of the norm-agnostic update."""

from jaxtyping import Array, Float

from pallas_kernels.nag_update.reference import nag_update_reference

IMPLEMENTATIONS = {"reference": nag_update_reference}


def choose(implementation: str = "auto") -> tuple[str, str]:
    """Names the implementation that `nag_update` runs and says why.

    Args:
        implementation: "auto" or a name in `IMPLEMENTATIONS`.

    Returns:
        (name, reason).

    Raises:
        ValueError: If the name is unknown.
    """
    if implementation == "auto":
        return "reference", "plain JAX, fused by XLA"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"unknown implementation {implementation!r} of nag_update; "
            f"allowed: auto, {', '.join(IMPLEMENTATIONS)}"
        )
    return implementation, "asked for"


def nag_update(
    direction: Float[Array, "*tokens d"],
    branch: Float[Array, "*tokens d"],
    gain: Float[Array, "*tokens"],
    *,
    implementation: str = "auto",
) -> tuple[Float[Array, "*tokens d"], Float[Array, "*tokens"]]:
    """Writes a branch into a norm-agnostic stream.

    Equations (10) to (17) of arXiv 2606.16112; `reference.update_formula` is the definition.

    Args:
        direction: Direction of the stream, norm sqrt(d), zero mean over features; d at least 3.
        branch: Output of the sub-layer in any scale.
        gain: Gain a = alpha * m of each token. A token of gain 0 passes bit for bit.
        implementation: "auto" or a name in `IMPLEMENTATIONS`.

    Returns:
        The new direction (dtype of `direction`) and the growth of the log-norm (at least float32).
    """
    name, _ = choose(implementation)
    return IMPLEMENTATIONS[name](direction, branch, gain)
