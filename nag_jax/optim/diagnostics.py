"""What an optimizer does to matrices, as numbers: updates, orthogonality, factors, failures.

All are functions of one step's arrays and can be jitted.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nag_jax.optim.bases import BASES, SIDES
from nag_jax.optim.matrices import from_leaf, product
from nag_jax.optim.preconditioned import PreconditionedState
from nag_jax.optim.roles import MatrixAxes
from nag_jax.parameters import flatten


def update_rms_by_role(updates: Any, infos: Mapping[str, Any]) -> dict[str, Float[Array, ""]]:
    """Root mean square of the updates of all parameters of a role, by role."""
    squares: dict[str, list[Array]] = {}
    sizes: dict[str, int] = {}
    flat = flatten(infos)
    for path, update in flatten(updates).items():
        role = flat[path].role
        squares.setdefault(role, []).append(jnp.sum(jnp.square(update.astype(jnp.float32))))
        sizes[role] = sizes.get(role, 0) + update.size
    return {role: jnp.sqrt(sum(each) / sizes[role]) for role, each in squares.items()}


def orthogonality_error(leaf: Array, axes: MatrixAxes) -> Float[Array, "..."]:
    """||W^T W - I||_F / sqrt(n) of each matrix of a leaf, n its shorter side.

    It is the drift of P2's theory: zero for orthonormal columns (of a tall matrix) or rows.

    Args:
      leaf: a parameter.
      axes: its matrix axes.

    Returns:
      One number a matrix, in the shape of the leaf's other axes.
    """
    matrix = from_leaf(leaf.astype(jnp.float32), axes)
    if matrix.shape[-2] < matrix.shape[-1]:
        matrix = matrix.mT
    size = matrix.shape[-1]
    gram = product(matrix.mT, matrix) - jnp.eye(size)
    return jnp.sqrt(jnp.sum(jnp.square(gram), axis=(-2, -1)) / size)


def factor_conditions(state: PreconditionedState) -> dict[str, Float[Array, "..."]]:
    """Condition of each factor, as its own basis sees it: largest over smallest of diag(Q^T L Q).

    Exact for eigenvectors; between refreshes a lower bound. Infinite where a factor lacks rank.

    Args:
      state: of SOAP or KL-Shampoo.

    Returns:
      {"left/<path>" or "right/<path>": one number a matrix}.
    """
    found = {}
    for side in SIDES:
        if BASES[side] not in state.arrays:
            continue
        factors, bases = (
            jax.tree_util.tree_leaves_with_path(state.arrays[name]) for name in (side, BASES[side])
        )
        for (path, factor), (_, basis) in zip(factors, bases, strict=True):
            scales = jnp.sum(basis * product(factor, basis), axis=-2)
            name = f"{side}/{jax.tree_util.keystr(path, simple=True, separator='/')}"
            found[name] = jnp.max(scales, axis=-1) / jnp.maximum(jnp.min(scales, axis=-1), 0.0)
    return found


def failures(state: Any) -> dict[str, Float[Array, ""]]:
    """What SOAP, Shampoo and KL-Shampoo inside an optimizer's state have counted, of all steps.

    Args:
      state: of any optimizer.

    Returns:
      rejected (gradients of matrices that were not finite) and failed (refreshes whose result was
      not), or nothing where the optimizer has none of them.
    """
    states = _preconditioned_states(state)
    if not states:
        return {}
    return {
        "rejected": sum(each.rejected for each in states),
        "failed": sum(each.failed for each in states),
    }


def diagnostics(
    updates: Any, params: Any, state: Any, infos: Mapping[str, Any]
) -> dict[str, Float[Array, ""]]:
    """All numbers of this file for one step.

    Args:
      updates: what was added to the parameters.
      params: the parameters after it.
      state: the optimizer's state after it.
      infos: nested dict shaped as the parameters, of `nag_jax.parameters.ParamInfo`.

    Returns:
      update_rms/<role>; orthogonality/<path>, the mean over a leaf's matrices; condition/<side>/
      <path>, the largest of a leaf's factors.
    """
    found = {f"update_rms/{k}": v for k, v in update_rms_by_role(updates, infos).items()}
    flat = flatten(params)
    for path, info in flatten(infos).items():
        if info.role == "matrix":
            errors = orthogonality_error(flat[path], MatrixAxes(info.rows, info.columns))
            found[f"orthogonality/{path}"] = jnp.mean(errors)
    for each in _preconditioned_states(state):
        for name, values in factor_conditions(each).items():
            found[f"condition/{name}"] = jnp.max(values)
    return found


def _preconditioned_states(state: Any) -> list[PreconditionedState]:
    leaves = jax.tree.leaves(state, is_leaf=_is_preconditioned)
    return [leaf for leaf in leaves if _is_preconditioned(leaf)]


def _is_preconditioned(value: Any) -> bool:
    return isinstance(value, PreconditionedState)
