"""KL-Shampoo: Shampoo with the factors of the Gaussian that is nearest to the gradients.

Lin et al., "Understanding and Improving Shampoo and SOAP via Kullback-Leibler Minimization"
(arXiv 2509.03378), in the order of operations of the authors' code
(github.com/yorkerlin/KL-Methods).
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
    to_basis,
)
from nag_jax.optim.hybrid import DEFAULT_ADAMW, AdamW, with_adamw
from nag_jax.optim.matrices import Blocks, product
from nag_jax.optim.preconditioned import Refresh, preconditioned
from nag_jax.optim.roles import MatrixSpecs

Matrices = Float[Array, "*batch rows columns"]
SCALES = {side: f"{side}_scales" for side in SIDES}


def scale_by_kl_shampoo(
    b1: float = 0.9,
    b2: float = 0.98,
    eps: float = 1e-8,
    refresh_every: int = 10,
    initial_scale: float = 0.1,
    clamp_floor: float = 4000.0,
    clamp_ceiling: float = 4000.0,
    stagger: bool = False,
    block_size: int = 0,
    max_side: int = 10_000,
    matrices: MatrixSpecs = None,
) -> optax.GradientTransformation:
    """Whitens the momentum by two factors of which each is estimated through the other.

    With G the gradient of an m x n matrix, Q_a and Q_b the bases and la and lb the scales (their
    eigenvalues) of the sides, the first gradient makes S_a = (1 - b2) G G^T / n,
    S_b = (1 - b2) G^T G / m and their eigenvectors in descending order, sets all scales to
    `initial_scale`, and moves nothing. Each later one, with what was stored before it on all right
    hand sides:

      M <- b1 M + (1 - b1) G
      D = Q_a ((Q_a^T M Q_b) * w) Q_b^T,   w_ij = u_ij / (1 + eps u_ij),  u_ij = 1 / sqrt(la_i lb_j)
      S_a <- b2 S_a + (1 - b2) / n  G Q_b diag(1 / lb) Q_b^T G^T
      S_b <- b2 S_b + (1 - b2) / m  G^T Q_a diag(1 / la) Q_a^T G
      la_i <- b2 la_i + (1 - b2) mean_j H_ij^2 / lb_j   with H = Q_a^T G Q_b, lb likewise

    with each 1 / sqrt(scale) at most max(clamp_floor, min(side, clamp_ceiling)); and on every
    `refresh_every`-th Q_a <- qr(S_a Q_a), Q_b <- qr(S_b Q_b), without sorting.

    The authors' `clamp_floor` is 10, which bounds the whitening of a small model by its own sides:
    with sides of 64 the product of both is at most 4096, so gradients of less than 2.4e-4 are never
    whitened and their updates stay silently small. The default here is 4000 for every side.

    Args:
        b1: Decay of the momentum.
        b2: Decay of factors and scales.
        eps: See above.
        refresh_every: Steps between refreshes of a basis.
        initial_scale: Of all scales; above the square of usual gradients it acts as a warm-up,
            since la lb falls to that as b2^(2 t).
        clamp_floor: See above.
        clamp_ceiling: See above.
        stagger: Whether refreshes are spread over these steps.
        block_size: Longest side of a block that has its own bases; 0 for whole matrices.
        max_side: A longer side has no factor: the identity as basis and scales of 1 (ours).
        matrices: Which axes form each leaf's matrix, see `nag_jax.optim.roles.find_matrices`.

    Returns:
        A transform with a `PreconditionedState`; its arrays are factor, basis and scales of each
        side (left: a, right: b) and the momentum, float32.

    Raises:
        UserError: As `nag_jax.optim.preconditioned.preconditioned`.
    """
    rule = _KLShampoo(b1, b2, eps, initial_scale, clamp_floor, clamp_ceiling, max_side)
    return preconditioned(rule, refresh_every, stagger, block_size, matrices)


def kl_shampoo(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.01,
    b1: float = 0.9,
    b2: float = 0.98,
    eps: float = 1e-8,
    refresh_every: int = 10,
    initial_scale: float = 0.1,
    clamp_floor: float = 4000.0,
    clamp_ceiling: float = 4000.0,
    stagger: bool = False,
    block_size: int = 0,
    max_side: int = 10_000,
    matrices: MatrixSpecs = None,
    others: AdamW = DEFAULT_ADAMW,
) -> optax.GradientTransformationExtraArgs:
    """KL-Shampoo for matrices, AdamW for every other leaf.

    Args:
        learning_rate: Of the matrices, a number or a schedule; as large as Adam's.
        weight_decay: Decoupled, multiplied by the learning rate.
        b1: See `scale_by_kl_shampoo`.
        b2: See there.
        eps: See there.
        refresh_every: See there.
        initial_scale: See there.
        clamp_floor: See there.
        clamp_ceiling: See there.
        stagger: See there.
        block_size: See there.
        max_side: See there.
        matrices: See there.
        others: Options of the other leaves.

    Returns:
        The transform.
    """
    direction = scale_by_kl_shampoo(
        b1=b1,
        b2=b2,
        eps=eps,
        refresh_every=refresh_every,
        initial_scale=initial_scale,
        clamp_floor=clamp_floor,
        clamp_ceiling=clamp_ceiling,
        stagger=stagger,
        block_size=block_size,
        max_side=max_side,
        matrices=matrices,
    )
    return with_adamw(direction, learning_rate, weight_decay, matrices, others)


class _KLShampoo:
    """The rule: see `scale_by_kl_shampoo`."""

    names = ("momentum", *SIDES, *BASES.values(), *SCALES.values())
    first_refresh = 1

    def __init__(
        self,
        b1: float,
        b2: float,
        eps: float,
        initial_scale: float,
        clamp_floor: float,
        clamp_ceiling: float,
        max_side: int,
    ):
        self._b1, self._b2, self._eps = b1, b2, eps
        self._initial_scale = initial_scale
        self._clamp_floor, self._clamp_ceiling = clamp_floor, clamp_ceiling
        self._max_side = max_side

    def init(self, blocks: Blocks, dtype: Any) -> dict[str, Array]:
        factors = factors_of(blocks, self._max_side, dtype)
        arrays = {"momentum": jnp.zeros((*blocks.batch, blocks.rows, blocks.columns), dtype)}
        for side, factor in factors.items():
            arrays[side] = factor
            arrays[BASES[side]] = identity_like(factor)
            arrays[SCALES[side]] = jnp.full(factor.shape[:-1], self._initial_scale, dtype)
        return arrays

    def update(
        self, gradient: Matrices, arrays: dict[str, Array], step: Array, refresh: Refresh
    ) -> tuple[Matrices, dict[str, Array]]:
        present = [side for side in SIDES if side in arrays]

        def begin(arrays):
            factors = self._blended(arrays, gradient, gradient)
            bases = {BASES[side]: eigenvectors(factors[side]) for side in present}
            return jnp.zeros_like(gradient), arrays | factors | bases

        def go_on(arrays):
            momentum = self._b1 * arrays["momentum"] + (1 - self._b1) * gradient
            inverse = {
                "left": 1 / arrays[SCALES["left"]][..., :, None] if "left" in arrays else 1.0,
                "right": 1 / arrays[SCALES["right"]][..., None, :] if "right" in arrays else 1.0,
            }
            whitening = jnp.sqrt(inverse["left"]) * jnp.sqrt(inverse["right"])
            whitening = whitening / (1 + self._eps * whitening)
            direction = from_basis(to_basis(momentum, arrays) * whitening, arrays)

            # The factor of a side sees the gradient whitened along the other one.
            left = right = rotated = gradient
            if "left" in arrays:
                left = rotated = product(arrays[BASES["left"]].mT, gradient)
            if "right" in arrays:
                right = product(gradient, arrays[BASES["right"]])
                rotated = product(left, arrays[BASES["right"]])
            factors = self._blended(
                arrays, right * jnp.sqrt(inverse["right"]), left * jnp.sqrt(inverse["left"])
            )
            squares = jnp.square(rotated)
            means = {
                "left": jnp.mean(squares * inverse["right"], axis=-1),
                "right": jnp.mean(squares * inverse["left"], axis=-2),
            }
            scales = {
                SCALES[side]: self._clamped(
                    self._b2 * arrays[SCALES[side]] + (1 - self._b2) * means[side]
                )
                for side in present
            }
            return direction, arrays | {"momentum": momentum} | factors | scales

        direction, arrays = jax.lax.cond(step == 0, begin, go_on, arrays)
        if present:
            before = tuple(arrays[BASES[side]] for side in present)
            factors = tuple(arrays[side] for side in present)
            after = refresh(_power_steps, (*factors, *before), before)
            arrays = arrays | dict(zip((BASES[side] for side in present), after, strict=True))
        return direction, arrays

    def _blended(self, arrays, for_left, for_right) -> dict[str, Array]:
        """Factors after a gradient, given what stands for it on each side."""
        rows, columns = for_left.shape[-2:]
        seen = {
            "left": lambda: product(for_left, for_left.mT) / columns,
            "right": lambda: product(for_right.mT, for_right) / rows,
        }
        return {
            side: self._b2 * arrays[side] + (1 - self._b2) * seen[side]()
            for side in SIDES
            if side in arrays
        }

    def _clamped(self, scales: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        side = scales.shape[-1]
        largest = jnp.maximum(self._clamp_floor, jnp.minimum(side, self._clamp_ceiling))
        return jnp.maximum(scales, 1 / largest**2)


def _power_steps(*factors_and_bases: Float[Array, "n n"]) -> tuple[Float[Array, "n n"], ...]:
    half = len(factors_and_bases) // 2
    pairs = zip(factors_and_bases[:half], factors_and_bases[half:], strict=True)
    return tuple(orthonormal(product(factor, basis)) for factor, basis in pairs)
