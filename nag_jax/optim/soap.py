"""SOAP: Adam in the eigenbasis of Shampoo's factors, which a step of power iteration follows.

Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (arXiv 2409.11321), in the order
of operations of the authors' code (github.com/nikhilvyas/SOAP).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from nag_jax.optim.bases import (
    BASES,
    SIDES,
    eigenvectors,
    factors_of,
    from_basis,
    identity_like,
    orthonormal,
    outer_products,
    to_basis,
)
from nag_jax.optim.hybrid import DEFAULT_ADAMW, AdamW, with_adamw
from nag_jax.optim.matrices import Blocks, product
from nag_jax.optim.preconditioned import Refresh, preconditioned
from nag_jax.optim.roles import MatrixSpecs

Matrices = Float[Array, "*batch rows columns"]


def scale_by_soap(
    b1: float = 0.95,
    b2: float = 0.95,
    shampoo_beta: float | None = None,
    eps: float = 1e-8,
    refresh_every: int = 10,
    stagger: bool = False,
    block_size: int = 0,
    max_side: int = 10_000,
    matrices: MatrixSpecs = None,
) -> optax.GradientTransformation:
    """Runs Adam in the eigenbasis of Shampoo's two factors.

    With G the gradient of an m x n matrix, Q_L and Q_R the bases, t the count of later gradients
    and bs = `shampoo_beta`, the first gradient makes L = (1 - bs) G G^T, R = (1 - bs) G^T G and
    their eigenvectors in descending order, and moves nothing. Each later one:

      M' <- b1 M' + (1 - b1) G',   V <- b2 V + (1 - b2) G'^2   with G' = Q_L^T G Q_R
      D = sqrt(1 - b2^t) / (1 - b1^t) Q_L (M' / (sqrt(V) + eps)) Q_R^T
      L <- bs L + (1 - bs) G G^T,   R <- bs R + (1 - bs) G^T G

    and on every `refresh_every`-th each side is sorted by the diagonal of Q^T L Q, descending, V's
    rows or columns with it; then Q <- qr(L Q), and M' turns into the new basis.

    Args:
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        shampoo_beta: Decay of the factors; None is `b2`.
        eps: Added to the root of the second moment.
        refresh_every: Steps between refreshes of a basis.
        stagger: Whether refreshes are spread over these steps.
        block_size: Longest side of a block that has its own bases; 0 for whole matrices.
        max_side: A longer side keeps the identity as its basis, and no factor.
        matrices: Which axes form each leaf's matrix, see `nag_jax.optim.roles.find_matrices`.

    Returns:
        A transform with a `PreconditionedState`; its arrays are factor and basis of each side
        (left: m x m, right: n x n) and both moments, float32.

    Raises:
        UserError: As `nag_jax.optim.preconditioned.preconditioned`.
    """
    rule = _Soap(b1, b2, b2 if shampoo_beta is None else shampoo_beta, eps, max_side)
    return preconditioned(rule, refresh_every, stagger, block_size, matrices)


def soap(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.01,
    b1: float = 0.95,
    b2: float = 0.95,
    shampoo_beta: float | None = None,
    eps: float = 1e-8,
    refresh_every: int = 10,
    stagger: bool = False,
    block_size: int = 0,
    max_side: int = 10_000,
    matrices: MatrixSpecs = None,
    others: AdamW = DEFAULT_ADAMW,
) -> optax.GradientTransformationExtraArgs:
    """SOAP for matrices, AdamW for every other leaf.

    Args:
        learning_rate: Of the matrices, a number or a schedule; the authors use 3e-3.
        weight_decay: Decoupled, multiplied by the learning rate.
        b1: See `scale_by_soap`.
        b2: See there.
        shampoo_beta: See there.
        eps: See there.
        refresh_every: See there.
        stagger: See there.
        block_size: See there.
        max_side: See there.
        matrices: See there.
        others: Options of the other leaves.

    Returns:
        The transform.
    """
    direction = scale_by_soap(
        b1, b2, shampoo_beta, eps, refresh_every, stagger, block_size, max_side, matrices
    )
    return with_adamw(direction, learning_rate, weight_decay, matrices, others)


class _Soap:
    """The rule: see `scale_by_soap`."""

    names = ("first_moment", "second_moment", *SIDES, *BASES.values())
    first_refresh = 1

    def __init__(self, b1: float, b2: float, shampoo_beta: float, eps: float, max_side: int):
        self._b1, self._b2, self._bs, self._eps = b1, b2, shampoo_beta, eps
        self._max_side = max_side

    def init(self, blocks: Blocks, dtype: Any) -> dict[str, Array]:
        shape = (*blocks.batch, blocks.rows, blocks.columns)
        factors = factors_of(blocks, self._max_side, dtype)
        return (
            {name: jnp.zeros(shape, dtype) for name in ("first_moment", "second_moment")}
            | factors
            | {BASES[side]: identity_like(factor) for side, factor in factors.items()}
        )

    def update(
        self, gradient: Matrices, arrays: dict[str, Array], step: Array, refresh: Refresh
    ) -> tuple[Matrices, dict[str, Array]]:
        outer = outer_products(gradient)
        arrays = arrays | {
            side: self._bs * arrays[side] + (1 - self._bs) * outer[side]
            for side in SIDES
            if side in arrays
        }

        def begin(arrays):
            found = {BASES[side]: eigenvectors(arrays[side]) for side in SIDES if side in arrays}
            return jnp.zeros_like(gradient), arrays | found

        def go_on(arrays):
            rotated = to_basis(gradient, arrays)
            first = self._b1 * arrays["first_moment"] + (1 - self._b1) * rotated
            second = self._b2 * arrays["second_moment"] + (1 - self._b2) * jnp.square(rotated)
            count = step.astype(gradient.dtype)
            bias = jnp.sqrt(1 - self._b2**count) / (1 - self._b1**count)
            direction = from_basis(first / (jnp.sqrt(second) + self._eps), arrays)
            return bias * direction, arrays | {"first_moment": first, "second_moment": second}

        direction, arrays = jax.lax.cond(step == 0, begin, go_on, arrays)
        return direction, arrays | self._turned(arrays, refresh)

    def _turned(self, arrays: dict[str, Array], refresh: Refresh) -> dict[str, Array]:
        """The bases after a refresh, and the moments in them."""
        sides = [side for side in SIDES if side in arrays]
        if not sides:
            return {}
        changed = ["first_moment", "second_moment", *(BASES[side] for side in sides)]

        def turn(*operands):
            old = dict(zip([*changed, *sides], operands, strict=True))
            new = {"second_moment": old["second_moment"]}
            for side in sides:
                basis, factor = old[BASES[side]], old[side]
                scales = jnp.sum(basis * product(factor, basis), axis=0)
                order = jnp.argsort(scales, descending=True)
                new[BASES[side]] = orthonormal(product(factor, basis[:, order]))
                new["second_moment"] = jnp.take(new["second_moment"], order, axis=SIDES.index(side))
            new["first_moment"] = to_basis(from_basis(old["first_moment"], old), new)
            return tuple(new[name] for name in changed)

        before = tuple(arrays[name] for name in changed)
        after = refresh(turn, (*before, *(arrays[side] for side in sides)), before)
        return dict(zip(changed, after, strict=True))
