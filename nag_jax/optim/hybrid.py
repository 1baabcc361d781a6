"""Optimizers of matrices with AdamW for every other leaf, and the guard against bad gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from nag_jax.optim.chains import decoupled, in_float32
from nag_jax.optim.roles import MatrixSpecs, find_matrices, path_string


class AdamW(NamedTuple):
    """Options of AdamW for the leaves that are no matrices.

    Attributes:
        learning_rate: A number or a schedule; None is the matrices' own.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled, multiplied by the learning rate.
    """

    learning_rate: optax.ScalarOrSchedule | None = None
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0


DEFAULT_ADAMW = AdamW()


def with_adamw(
    direction: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float,
    matrices: MatrixSpecs,
    others: AdamW,
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer of a transform of matrices.

    Args:
        direction: Turns gradients of matrices into directions.
        learning_rate: Of the matrices, a number or a schedule.
        weight_decay: Of the matrices.
        matrices: Which leaves are matrices, see `nag_jax.optim.roles.find_matrices`.
        others: Options of all other leaves.

    Returns:
        The transform: the update is -lr (D + wd W), in float32 on parameters of any dtype. Of a
        leaf that is no matrix a gradient that is not finite counts as zero.
    """
    adam = optax.chain(
        optax.stateless(lambda updates, _: jax.tree.map(finite_or_zero, updates)),
        optax.scale_by_adam(others.b1, others.b2, others.eps),
    )
    rate = learning_rate if others.learning_rate is None else others.learning_rate

    def labels(tree):
        found = find_matrices(tree, matrices)
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "matrix" if path_string(path) in found else "other", tree
        )

    return in_float32(
        optax.partition(
            {
                "matrix": decoupled(direction, learning_rate, weight_decay),
                "other": decoupled(adam, rate, others.weight_decay),
            },
            labels,
        )
    )


def finite_or_zero(gradient: Array) -> Array:
    """Returns zeros for a gradient with any value that is not finite."""
    return jnp.where(jnp.all(jnp.isfinite(gradient)), gradient, jnp.zeros_like(gradient))
