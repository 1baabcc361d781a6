"""FLOPs of one optimizer update by formula: the products and decompositions of its matrices."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from nag_jax.optim.build import matrix_axes
from nag_jax.optim.matrices import blocks_of
from nag_jax.parameters import flatten

# Times n^3, or for the SVD of an m x n matrix m n^2 and n^3 (Golub and Van Loan).
QR, EIGH, SVD = 8 / 3, 9, (14, 8)


class UpdateFlops(NamedTuple):
    """FLOPs of an update.

    Attributes:
        shared: Newton-Schulz, decompositions and QR, which the devices of a mesh share out.
        repeated: Products with factors and bases, done where the parameter lies: by every device
            that has it, or its part.
    """

    shared: float
    repeated: float


def update_flops(options: Mapping[str, Any], infos: Mapping[str, Any]) -> UpdateFlops:
    """Counts an update, refreshes spread over the steps between them.

    Elementwise work, AdamW's all, counts nothing.

    Args:
        options: The config's `optimizer` node, complete.
        infos: Nested dict of `ParamInfo`.
    """
    shared = repeated = 0.0
    for info in flatten(infos).values():
        if info.role == "matrix" and options["kind"] in _OF_ONE:
            axes = matrix_axes(info, options.get("split_heads", False))
            blocks = blocks_of(info.shape, axes, options.get("block_size", 0))
            count = 1
            for length in blocks.batch:
                count *= length
            one = _OF_ONE[options["kind"]](options, blocks.rows, blocks.columns)
            shared += count * one.shared
            repeated += count * one.repeated
    return UpdateFlops(shared, repeated)


def _newton_schulz(options, m, n):
    low, high = min(m, n), max(m, n)
    return UpdateFlops(options["newton_schulz_steps"] * (4 * low**2 * high + 2 * low**3), 0.0)


def _spectral(options, m, n):
    if options["newton_schulz_steps"]:
        return _newton_schulz(options, m, n)
    low, high = min(m, n), max(m, n)
    return UpdateFlops(SVD[0] * high * low**2 + SVD[1] * low**3 + 2 * high * low**2, 0.0)


def _sides(options, m, n):
    """Lengths of the sides that have a factor."""
    return [side for side in (m, n) if side <= options["max_side"]]


def _soap(options, m, n):
    # Sorting, the power step, QR and the moment's new basis; factors, into and out of the basis.
    sides = _sides(options, m, n)
    products, cubes = m * n * sum(sides), sum(side**3 for side in sides)
    refresh = 4 * products + (2 + 2 + QR) * cubes
    return UpdateFlops(refresh / options["refresh_every"], 6 * products)


def _shampoo(options, m, n):
    sides = _sides(options, m, n)
    roots = (EIGH + 2) * sum(side**3 for side in sides)
    factors_and_direction = 4 * m * n * sum(sides)
    return UpdateFlops(roots / options["refresh_every"], factors_and_direction)


def _kl_shampoo(options, m, n):
    # Of each side factor, gradient in its basis, direction into and out of it; with both sides the
    # gradient in both bases.
    sides = _sides(options, m, n)
    refresh = (2 + QR) * sum(side**3 for side in sides)
    both = 2 * m * n * n if len(sides) == 2 else 0
    return UpdateFlops(refresh / options["refresh_every"], 8 * m * n * sum(sides) + both)


_OF_ONE = {
    "muon": _newton_schulz,
    "spectral": _spectral,
    "soap": _soap,
    "shampoo": _shampoo,
    "kl_shampoo": _kl_shampoo,
}
