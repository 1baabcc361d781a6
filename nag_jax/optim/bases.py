"""Factors and bases of the two sides of a matrix, as SOAP, Shampoo and KL-Shampoo use them.

Arrays are named by side: "left" [*batch, rows, rows] and "right" [*batch, columns, columns] are
factors, "left_basis" and "right_basis" their bases, one vector a column. A side without an array
has the identity.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from nag_jax.optim.matrices import Blocks, each_matrix, product

SIDES = ("left", "right")
BASES = {side: f"{side}_basis" for side in SIDES}


def factors_of(blocks: Blocks, max_side: int, dtype: Any) -> dict[str, Float[Array, "..."]]:
    """Returns factors of zeros, by side, for the sides of a length up to `max_side`."""
    lengths = dict(zip(SIDES, (blocks.rows, blocks.columns), strict=True))
    return {
        side: jnp.zeros((*blocks.batch, length, length), dtype)
        for side, length in lengths.items()
        if length <= max_side
    }


def identity_like(factor: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """Returns as many identity matrices."""
    return jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)


def outer_products(gradient: Float[Array, "*batch m n"]) -> dict[str, Float[Array, "..."]]:
    """Returns G G^T (left) and G^T G (right)."""
    return {"left": product(gradient, gradient.mT), "right": product(gradient.mT, gradient)}


def to_basis(
    matrix: Float[Array, "*batch m n"], arrays: Mapping[str, Array]
) -> Float[Array, "*batch m n"]:
    """Returns Q_L^T X Q_R."""
    if BASES["left"] in arrays:
        matrix = product(arrays[BASES["left"]].mT, matrix)
    if BASES["right"] in arrays:
        matrix = product(matrix, arrays[BASES["right"]])
    return matrix


def from_basis(
    matrix: Float[Array, "*batch m n"], arrays: Mapping[str, Array]
) -> Float[Array, "*batch m n"]:
    """Returns Q_L X Q_R^T."""
    if BASES["left"] in arrays:
        matrix = product(arrays[BASES["left"]], matrix)
    if BASES["right"] in arrays:
        matrix = product(matrix, arrays[BASES["right"]].mT)
    return matrix


def eigenvectors(factor: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """Returns eigenvectors in descending order of their values; the identity where it fails."""

    def one(matrix):
        _, vectors = jnp.linalg.eigh(matrix)
        vectors = vectors[:, ::-1]
        good = jnp.all(jnp.isfinite(vectors))
        return (jnp.where(good, vectors, jnp.eye(matrix.shape[0], dtype=matrix.dtype)),)

    return each_matrix(one, factor)[0]


def orthonormal(matrix: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """Returns Q of the QR decomposition of one matrix."""
    return jnp.linalg.qr(matrix)[0]
