"""Shampoo: gradients times inverse roots of two factors, with the length of Adam's updates.

Gupta et al., "Shampoo: Preconditioned Stochastic Tensor Optimization" (arXiv 1802.09568); averages,
bias correction and grafting as in Shi et al., arXiv 2309.06497.
"""

from typing import Any, Literal

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from nag_jax.errors import UserError
from nag_jax.optim.bases import SIDES, factors_of, identity_like, outer_products
from nag_jax.optim.chains import known_to_be
from nag_jax.optim.hybrid import DEFAULT_ADAMW, AdamW, with_adamw
from nag_jax.optim.matrices import Blocks, product
from nag_jax.optim.preconditioned import Refresh, preconditioned
from nag_jax.optim.roles import MatrixSpecs

Matrices = Float[Array, "*batch rows columns"]
GRAFTINGS = ("adam", "none")
GRAFT_MOMENTS = ("graft_first_moment", "graft_second_moment")
ROOTS = {side: f"{side}_root" for side in SIDES}


def scale_by_shampoo(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-12,
    exponent: float = 0.25,
    trace_scaling: bool = False,
    grafting: Literal["adam", "none"] = "adam",
    graft_eps: float = 1e-8,
    refresh_every: int = 10,
    stagger: bool = False,
    block_size: int = 1024,
    max_side: int = 10_000,
    matrices: MatrixSpecs = None,
) -> optax.GradientTransformation:
    """Multiplies gradients by inverse roots of averages of G G^T and G^T G.

    With G the t-th gradient (t from 1) of an m x n matrix and e the `exponent`:

      L <- b2 L + (1 - b2) G G^T,   R <- b2 R + (1 - b2) G^T G     (plain sums for b2 = 1)
      at t = 1, 1 + f, 1 + 2 f, ...:  A = (L / (1 - b2^t) + eps I)^(-e), B from R likewise
      D = A G B;  with `trace_scaling` times sqrt(trace(L / (1 - b2^t)));
      with `grafting` "adam":  D <- D ||C|| / ||D||, C Adam's bias-corrected direction of G
      M <- b1 M + (1 - b1) D,   and M / (1 - b1^t) is the direction

    For e = 1/2 without grafting use `trace_scaling`: without either it is unstable (Lin et al.,
    arXiv 2509.03378). Factors of lower rank than their side have inverse roots as large as `eps`
    allows.

    Args:
        b1: Decay of the momentum, and of Adam's first moment in grafting.
        b2: Decay of the factors, and of Adam's second moment in grafting (0.999 there for b2 = 1).
        eps: Added to the eigenvalues.
        exponent: e.
        trace_scaling: See above.
        grafting: "adam" or "none".
        graft_eps: Added to the root of Adam's second moment.
        refresh_every: f.
        stagger: Whether refreshes are spread over these steps, after the first.
        block_size: Longest side of a block that has its own factors; 0 for whole matrices.
        max_side: A longer side has no factor; the other one's exponent is then 2 e (ours: with one
            factor alone that is the same power of the gradients).
        matrices: Which axes form each leaf's matrix, see `nag_jax.optim.roles.find_matrices`.

    Returns:
        A transform with a `PreconditionedState`; its arrays are factor and inverse root of each
        side (left: m x m, right: n x n), the momentum and, with grafting, Adam's two moments.

    Raises:
        UserError: An unknown grafting, or as `nag_jax.optim.preconditioned.preconditioned`.
    """
    if grafting not in GRAFTINGS:
        raise UserError(f"Shampoo's grafting is {grafting!r}; it must be {' or '.join(GRAFTINGS)}")
    graft_eps_or_none = graft_eps if grafting == "adam" else None
    rule = _Shampoo(b1, b2, eps, exponent, trace_scaling, graft_eps_or_none, max_side)
    return preconditioned(rule, refresh_every, stagger, block_size, matrices)


def shampoo(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.01,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-12,
    exponent: float = 0.25,
    trace_scaling: bool = False,
    grafting: Literal["adam", "none"] = "adam",
    graft_eps: float = 1e-8,
    refresh_every: int = 10,
    stagger: bool = False,
    block_size: int = 1024,
    max_side: int = 10_000,
    matrices: MatrixSpecs = None,
    others: AdamW = DEFAULT_ADAMW,
) -> optax.GradientTransformationExtraArgs:
    """Shampoo for matrices, AdamW for every other leaf.

    Args:
        learning_rate: Of the matrices, a number or a schedule; with grafting as large as Adam's.
        weight_decay: Decoupled, multiplied by the learning rate.
        b1: See `scale_by_shampoo`.
        b2: See there.
        eps: See there.
        exponent: See there.
        trace_scaling: See there.
        grafting: See there.
        graft_eps: See there.
        refresh_every: See there.
        stagger: See there.
        block_size: See there.
        max_side: See there.
        matrices: See there.
        others: Options of the other leaves.

    Returns:
        The transform.
    """
    direction = scale_by_shampoo(
        b1=b1,
        b2=b2,
        eps=eps,
        exponent=exponent,
        trace_scaling=trace_scaling,
        grafting=grafting,
        graft_eps=graft_eps,
        refresh_every=refresh_every,
        stagger=stagger,
        block_size=block_size,
        max_side=max_side,
        matrices=matrices,
    )
    return with_adamw(direction, learning_rate, weight_decay, matrices, others)


class _Shampoo:
    """The rule: see `scale_by_shampoo`."""

    first_refresh = 0

    def __init__(
        self,
        b1: float,
        b2: float,
        eps: float,
        exponent: float,
        trace_scaling: bool,
        graft_eps: float | None,
        max_side: int,
    ):
        self._b1, self._b2, self._eps = b1, b2, eps
        self._exponent, self._trace_scaling = exponent, trace_scaling
        self._graft_eps = graft_eps
        self._sums = known_to_be(1, b2)
        self._graft_b2 = 0.999 if self._sums else b2
        self._max_side = max_side
        self.names = ("momentum", *SIDES, *ROOTS.values())
        if graft_eps is not None:
            self.names += GRAFT_MOMENTS

    def init(self, blocks: Blocks, dtype: Any) -> dict[str, Array]:
        shape = (*blocks.batch, blocks.rows, blocks.columns)
        moments = ("momentum", *(GRAFT_MOMENTS if self._graft_eps is not None else ()))
        factors = factors_of(blocks, self._max_side, dtype)
        arrays = {name: jnp.zeros(shape, dtype) for name in moments} | factors
        arrays |= {ROOTS[side]: identity_like(factor) for side, factor in factors.items()}
        return arrays

    def update(
        self, gradient: Matrices, arrays: dict[str, Array], step: Array, refresh: Refresh
    ) -> tuple[Matrices, dict[str, Array]]:
        present = [side for side in SIDES if side in arrays]
        count = (step + 1).astype(gradient.dtype)
        outer = outer_products(gradient)
        new_share = 1.0 if self._sums else 1 - self._b2
        seen = 1.0 if self._sums else 1 - self._b2**count
        arrays = arrays | {
            side: self._b2 * arrays[side] + new_share * outer[side] for side in present
        }
        if present:
            exponent = self._exponent * 2 / len(present)

            def roots(*factors):
                return tuple(inverse_root(f, exponent, self._eps) for f in factors)

            factors = tuple(arrays[side] / seen for side in present)
            found = refresh(roots, factors, tuple(arrays[ROOTS[side]] for side in present))
            arrays |= dict(zip((ROOTS[side] for side in present), found, strict=True))

        direction = gradient
        if "left" in present:
            direction = product(arrays[ROOTS["left"]], direction)
        if "right" in present:
            direction = product(direction, arrays[ROOTS["right"]])
        if self._trace_scaling and present:
            trace = jnp.trace(arrays[present[0]], axis1=-2, axis2=-1) / seen
            direction = jnp.sqrt(trace)[..., None, None] * direction
        if self._graft_eps is not None:
            direction, moments = self._grafted(direction, gradient, arrays, count)
            arrays |= moments
        momentum = self._b1 * arrays["momentum"] + (1 - self._b1) * direction
        return momentum / (1 - self._b1**count), arrays | {"momentum": momentum}

    def _grafted(self, direction, gradient, arrays, count):
        """The direction with the norm of Adam's, and Adam's moments."""
        first = self._b1 * arrays["graft_first_moment"] + (1 - self._b1) * gradient
        second = self._graft_b2 * arrays["graft_second_moment"]
        second = second + (1 - self._graft_b2) * jnp.square(gradient)
        root = jnp.sqrt(second / (1 - self._graft_b2**count))
        adam = first / (1 - self._b1**count) / (root + self._graft_eps)
        own = frobenius(direction)
        # A direction of zeros stays zero; one of subnormal length is not blown up to a full step.
        ratio = jnp.where(own > 0, frobenius(adam) / jnp.maximum(own, 1e-30), 0.0)
        return ratio * direction, {"graft_first_moment": first, "graft_second_moment": second}


def frobenius(matrix: Matrices) -> Float[Array, "*batch 1 1"]:
    """Returns the Frobenius norm of each matrix, without overflow or underflow of the squares."""
    largest = jnp.max(jnp.abs(matrix), axis=(-2, -1), keepdims=True)
    safe = jnp.where(largest > 0, largest, 1.0)
    return largest * jnp.sqrt(jnp.sum(jnp.square(matrix / safe), axis=(-2, -1), keepdims=True))


def inverse_root(factor: Float[Array, "n n"], exponent: float, eps: float) -> Float[Array, "n n"]:
    """Returns (factor + eps I)^(-exponent) of one positive semi-definite matrix."""
    values, vectors = jnp.linalg.eigh(factor)
    # Rounding can make the smallest ones negative.
    powers = (jnp.maximum(values, 0.0) + eps) ** -exponent
    return product(vectors * powers, vectors.T)
