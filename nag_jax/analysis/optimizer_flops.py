"""FLOPs of one optimizer update by formula: the products and decompositions of its matrices."""

from collections.abc import Mapping
from typing import Any

from nag_jax.optim.roles import MatrixAxes, matrix_shape
from nag_jax.parameters import ParamInfo, flatten

QR, EIGH = 8 / 3, 9  # times n^3


def update_flops(options: Mapping[str, Any], infos: Mapping[str, Any]) -> float:
    """Returns FLOPs of an update, those of refreshes spread over the steps between them.

    Elementwise work, AdamW's all, counts nothing; blocks of matrices are taken as whole ones.

    Args:
        options: The config's `optimizer` node, complete.
        infos: Nested dict of `ParamInfo`.
    """
    of_one = _OF_ONE.get(options["kind"], _nothing)
    return sum(
        _count(info) * of_one(options, *matrix_shape(info.shape, _axes(info)))
        for info in flatten(infos).values()
        if info.role == "matrix"
    )


def _axes(info: ParamInfo) -> MatrixAxes:
    return MatrixAxes(info.rows, info.columns)


def _count(info: ParamInfo) -> float:
    m, n = matrix_shape(info.shape, _axes(info))
    return info.size / (m * n)


def _nothing(options, m, n):
    return 0.0


def _newton_schulz(options, m, n):
    low, high = min(m, n), max(m, n)
    return options["newton_schulz_steps"] * (4 * low**2 * high + 2 * low**3)


def _soap(options, m, n):
    # Factors, into and out of the basis; sorting, the power step, QR, the moment's new basis.
    sides, cubes = m * n * (m + n), m**3 + n**3
    return 6 * sides + (4 * sides + (2 + 2 + QR) * cubes) / options["refresh_every"]


def _shampoo(options, m, n):
    sides, cubes = m * n * (m + n), m**3 + n**3  # factors, direction; roots
    return 4 * sides + (EIGH + 2) * cubes / options["refresh_every"]


def _kl_shampoo(options, m, n):
    cubes = m**3 + n**3
    return 8 * m * m * n + 10 * m * n * n + (2 + QR) * cubes / options["refresh_every"]


_OF_ONE = {
    "muon": _newton_schulz,
    "soap": _soap,
    "shampoo": _shampoo,
    "kl_shampoo": _kl_shampoo,
}
