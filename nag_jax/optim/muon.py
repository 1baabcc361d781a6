"""Muon: momentum whose matrices are orthogonalised by a Newton-Schulz iteration.

`scale_by_muon` is the mathematics, on leaves with any number of stacked matrices; `muon` is the
optimizer, with AdamW for the leaves that are no matrices.
"""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from nag_jax.errors import UserError
from nag_jax.optim.chains import decoupled, in_float32, working_dtype
from nag_jax.optim.roles import (
    MatrixAxes,
    MatrixSpecs,
    find_matrices,
    matrix_shape,
    path_string,
)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SCALINGS = ("moonshot", "keller")


class MuonState(NamedTuple):
    """State of `scale_by_muon`.

    Attributes:
      momentum: a tree shaped as the parameters.
    """

    momentum: optax.Updates


def newton_schulz(
    x_mn: Float[Array, "*batch m n"],
    steps: int = 5,
    dtype: Any = jnp.float32,
    eps: float = 1e-7,
) -> Float[Array, "*batch m n"]:
    """Moves the singular values of each matrix towards 1, keeping its singular vectors.

    X_0 = X / (||X||_F + eps), then `steps` times X <- a X + (b A + c A^2) X with A = X X^T taken on
    the shorter side and (a, b, c) = (3.4445, -4.7750, 2.0315). After five steps singular values lie
    between about 0.7 and 1.2, unless they were tiny beside the norm.

    Args:
      x_mn: the matrices.
      steps: iterations.
      dtype: of the iteration; the norm is taken in float32 or wider. Matrix products follow
        `jax_default_matmul_precision`.
      eps: added to the norm, so that a zero matrix stays zero.

    Returns:
      The orthogonalised matrices in `dtype`.
    """
    a, b, c = COEFFICIENTS
    wide = x_mn.astype(working_dtype(x_mn.dtype))
    norm = jnp.sqrt(jnp.sum(jnp.square(wide), axis=(-2, -1), keepdims=True))
    x = (wide / (norm + eps)).astype(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def scale_by_muon(
    momentum: float = 0.95,
    nesterov: bool = True,
    newton_schulz_steps: int = 5,
    scaling: Literal["moonshot", "keller"] = "moonshot",
    newton_schulz_dtype: Any = jnp.float32,
    momentum_dtype: Any = jnp.float32,
    eps: float = 1e-7,
    matrices: MatrixSpecs = None,
) -> optax.GradientTransformation:
    """Orthogonalises the momentum of matrices.

    With G the gradient of an m x n matrix ([in, out]) and NS the iteration of `newton_schulz`:

      moonshot: M <- mu M + G,            N = G + mu M,            D = 0.2 sqrt(max(m, n)) NS(N)
      keller:   M <- mu M + (1 - mu) G,   N = (1 - mu) G + mu M,   D = sqrt(max(1, n / m)) NS(N)

    and N = M without `nesterov`. The moonshot scaling gives updates the size of Adam's, so that one
    learning rate serves both; keller's wants about 0.02.

    Every leaf must be a matrix or a stack of them: wrap the transform in `optax.partition` for
    other leaves, or use `muon`. Axes that are neither rows nor columns (layers, experts) are batch
    axes, and rows or columns of several axes (heads, head_dim) are flattened to one.

    Args:
      momentum: mu.
      nesterov: whether the orthogonalised matrix looks one step ahead.
      newton_schulz_steps: iterations.
      scaling: "moonshot" or "keller".
      newton_schulz_dtype: dtype of the iteration.
      momentum_dtype: dtype of the state, the only one there is; None keeps the parameter's.
      eps: added to the Frobenius norm.
      matrices: which axes form each leaf's matrix, see `nag_jax.optim.roles.find_matrices`; by
        default leaves have two axes.

    Returns:
      A transform whose state is one tree of momenta and holds no hyper-parameters. Updates have
      their gradient's dtype.

    Raises:
      UserError: an unknown scaling; at `init`, a leaf that is no matrix or a pattern that matches
        no leaf.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from nag_jax.optim import scale_by_muon
      >>> tx = optax.chain(scale_by_muon(), optax.scale_by_learning_rate(1e-3))
      >>> params = {"w": jnp.ones((4, 8))}
      >>> updates, state = tx.update(params, tx.init(params), params)

    Sources: K. Jordan, Muon (github.com/KellerJordan/Muon); Liu et al., "Muon is Scalable for LLM
    Training" (arXiv 2502.16982) and github.com/MoonshotAI/Moonlight.
    """
    if scaling not in SCALINGS:
        raise UserError(f"Muon's scaling is {scaling!r}; it must be {' or '.join(SCALINGS)}")
    gain = 1.0 if scaling == "moonshot" else 1.0 - momentum

    def init(params):
        found = find_matrices(params, matrices)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if path_string(path) not in found:
                raise UserError(
                    f"parameter {path_string(path)} of shape {tuple(leaf.shape)} is no matrix; "
                    "name its rows and columns in `matrices`, or give it another optimizer"
                )
        return MuonState(
            jax.tree.map(lambda p: jnp.zeros(p.shape, momentum_dtype or p.dtype), params)
        )

    def update(updates, state, params=None):
        del params
        found = find_matrices(updates, matrices)

        def accumulate(m, g):
            wide = working_dtype(m.dtype, g.dtype)
            return momentum * m.astype(wide) + gain * g.astype(wide)

        def direction(path, m, g):
            axes = found[path_string(path)]
            n = momentum * m + gain * g.astype(m.dtype) if nesterov else m
            x = _from_leaf(n, axes)
            x = newton_schulz(x, newton_schulz_steps, newton_schulz_dtype, eps).astype(m.dtype)
            factor = _shape_factor(*matrix_shape(g.shape, axes), scaling)
            return (factor * _to_leaf(x, g.shape, axes)).astype(g.dtype)

        new_momentum = jax.tree.map(accumulate, state.momentum, updates)
        directions = jax.tree_util.tree_map_with_path(direction, new_momentum, updates)
        stored = jax.tree.map(lambda new, m: new.astype(m.dtype), new_momentum, state.momentum)
        return directions, MuonState(stored)

    return optax.GradientTransformation(init, update)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    newton_schulz_steps: int = 5,
    scaling: Literal["moonshot", "keller"] = "moonshot",
    newton_schulz_dtype: Any = jnp.float32,
    momentum_dtype: Any = jnp.float32,
    matrices: MatrixSpecs = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.95,
    adam_eps: float = 1e-8,
    adam_weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Muon for matrices, AdamW for every other leaf.

    The update is -lr (D + wd W): decay is decoupled and multiplied by the learning rate alone, not
    by Muon's factor. Arithmetic and state are float32 on parameters of any dtype. Embedding tables
    and output heads have two axes but are no matrices in this sense: name them with None.

    Args:
      learning_rate: of the matrices, a number or a schedule.
      weight_decay: of the matrices.
      momentum: see `scale_by_muon`, as are the next five.
      nesterov: see there.
      newton_schulz_steps: see there.
      scaling: see there.
      newton_schulz_dtype: see there.
      momentum_dtype: see there; None is the dtype the chain works in.
      matrices: patterns as of `nag_jax.optim.roles.find_matrices`.
      adam_learning_rate: of the other leaves, by default the same as of the matrices.
      adam_b1: decay of Adam's first moment.
      adam_b2: decay of Adam's second moment.
      adam_eps: added to the root of the second moment.
      adam_weight_decay: of the other leaves.

    Returns:
      The transform.

    Raises:
      UserError: as `scale_by_muon`.

    Example:
      >>> import jax.numpy as jnp
      >>> from nag_jax.optim import muon
      >>> params = {"table": jnp.ones((99, 8)), "q": jnp.ones((6, 8, 2, 4)), "b": jnp.ones(8)}
      >>> tx = muon(1e-3, matrices={"table": None, "q": ((1,), (2, 3))})
      >>> updates, state = tx.update(params, tx.init(params), params)
    """
    direction = scale_by_muon(
        momentum=momentum,
        nesterov=nesterov,
        newton_schulz_steps=newton_schulz_steps,
        scaling=scaling,
        newton_schulz_dtype=newton_schulz_dtype,
        momentum_dtype=momentum_dtype,
        matrices=matrices,
    )
    adam = optax.scale_by_adam(adam_b1, adam_b2, adam_eps)
    adam_rate = learning_rate if adam_learning_rate is None else adam_learning_rate

    def labels(tree):
        found = find_matrices(tree, matrices)
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "matrix" if path_string(path) in found else "other", tree
        )

    return in_float32(
        optax.partition(
            {
                "matrix": decoupled(direction, learning_rate, weight_decay),
                "other": decoupled(adam, adam_rate, adam_weight_decay),
            },
            labels,
        )
    )


def _shape_factor(rows: int, columns: int, scaling: str) -> float:
    if scaling == "moonshot":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, columns / rows))


def _order(ndim: int, axes: MatrixAxes) -> tuple[int, ...]:
    batch = tuple(i for i in range(ndim) if i not in (*axes.rows, *axes.columns))
    return (*batch, *axes.rows, *axes.columns)


def _from_leaf(leaf: Array, axes: MatrixAxes) -> Array:
    """Returns the leaf as [*batch, rows, columns]; each batch axis is kept, and so its sharding."""
    order = _order(leaf.ndim, axes)
    batch = tuple(leaf.shape[i] for i in order[: leaf.ndim - len(axes.rows) - len(axes.columns)])
    return leaf.transpose(order).reshape(*batch, *matrix_shape(leaf.shape, axes))


def _to_leaf(matrices: Array, shape: tuple[int, ...], axes: MatrixAxes) -> Array:
    order = _order(len(shape), axes)
    inverse = sorted(range(len(shape)), key=order.__getitem__)
    return matrices.reshape([shape[i] for i in order]).transpose(inverse)
