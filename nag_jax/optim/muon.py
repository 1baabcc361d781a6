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
from nag_jax.optim.chains import working_dtype
from nag_jax.optim.hybrid import DEFAULT_ADAMW, AdamW, finite_or_zero, with_adamw
from nag_jax.optim.matrices import from_leaf, shared_out, to_leaf
from nag_jax.optim.roles import MatrixSpecs, all_matrices, matrix_shape, path_string

# By name: (a, b, c) of each step; the last one of a table goes on.
COEFFICIENTS = {
    # K. Jordan, github.com/KellerJordan/Muon.
    "classic": ((3.4445, -4.7750, 2.0315),),
    # Amsel et al., "The Polar Express" (arXiv 2505.16932), for singular values from 1e-3 to 1, each
    # polynomial but the last slowed down by 1.01 against rounding in bfloat16.
    "polar_express": tuple(
        (a / 1.01**slow, b / 1.01 ** (3 * slow), c / 1.01 ** (5 * slow))
        for a, b, c, slow in (
            (8.28721201814563, -23.595886519098837, 17.300387312530933, 1),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601, 1),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137, 1),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372, 1),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673, 1),
            (1.891301407787398, -1.2679958271945868, 0.37680408948524835, 1),
            (1.8750014808534479, -1.2500016453999487, 0.3750001645474248, 1),
            (1.875, -1.25, 0.375, 0),
        )
    ),
}
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
    coefficients: Literal["classic", "polar_express"] = "classic",
) -> Float[Array, "*batch m n"]:
    """Moves the singular values of each matrix towards 1, keeping its singular vectors.

    X_0 = X / (||X||_F + eps), then `steps` times X <- a X + (b A + c A^2) X with A = X X^T taken on
    the shorter side. "classic" has (a, b, c) = (3.4445, -4.7750, 2.0315) in every step: after five
    of them singular values lie between about 0.7 and 1.2, unless they were tiny beside the norm.
    "polar_express" has its own in each step, which bring singular values above a thousandth of the
    norm to within one and a half percent of 1 in six steps.

    Args:
      x_mn: the matrices.
      steps: iterations.
      dtype: of the iteration; the norm is taken in float32 or wider. Matrix products follow
        `jax_default_matmul_precision`.
      eps: added to the norm, so that a zero matrix stays zero.
      coefficients: "classic" or "polar_express".

    Returns:
      The orthogonalised matrices in `dtype`.
    """
    table = COEFFICIENTS[coefficients]
    rows = jnp.asarray([table[min(i, len(table) - 1)] for i in range(steps)], dtype)
    wide = x_mn.astype(working_dtype(x_mn.dtype))
    norm = jnp.sqrt(jnp.sum(jnp.square(wide), axis=(-2, -1), keepdims=True))
    x = (wide / (norm + eps)).astype(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT

    def iterate(x, row):
        a, b, c = row
        gram = x @ x.mT
        return a * x + (b * gram + c * (gram @ gram)) @ x, None

    x, _ = jax.lax.scan(iterate, x, rows)
    return x.mT if tall else x


def scale_by_muon(
    momentum: float = 0.95,
    nesterov: bool = True,
    newton_schulz_steps: int = 5,
    scaling: Literal["moonshot", "keller"] = "moonshot",
    coefficients: Literal["classic", "polar_express"] = "classic",
    newton_schulz_dtype: Any = "float32",
    momentum_dtype: Any = "float32",
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
      coefficients: see `newton_schulz`.
      newton_schulz_dtype: dtype of the iteration.
      momentum_dtype: dtype of the state, the only one there is; None keeps the parameter's.
      eps: added to the Frobenius norm.
      matrices: which axes form each leaf's matrix, see `nag_jax.optim.roles.find_matrices`; by
        default leaves have two axes.

    Returns:
      A transform whose state is one tree of momenta and holds no hyper-parameters. Updates have
      their gradient's dtype. A gradient that is not finite counts as zero for its leaf.

    Raises:
      UserError: an unknown scaling or coefficients; at `init`, a leaf that is no matrix or a
        pattern that matches no leaf.

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
    if coefficients not in COEFFICIENTS:
        raise UserError(
            f"Muon's coefficients are {coefficients!r}; they must be {' or '.join(COEFFICIENTS)}"
        )
    gain = 1.0 if scaling == "moonshot" else 1.0 - momentum

    def orthogonalise(stack):
        return (newton_schulz(stack, newton_schulz_steps, newton_schulz_dtype, eps, coefficients),)

    def init(params):
        all_matrices(params, matrices)
        return MuonState(
            jax.tree.map(lambda p: jnp.zeros(p.shape, momentum_dtype or p.dtype), params)
        )

    def update(updates, state, params=None):
        del params
        found = all_matrices(updates, matrices)
        updates = jax.tree.map(finite_or_zero, updates)

        def accumulate(m, g):
            wide = working_dtype(m.dtype, g.dtype)
            return momentum * m.astype(wide) + gain * g.astype(wide)

        def direction(path, m, g):
            axes = found[path_string(path)]
            n = momentum * m + gain * g.astype(m.dtype) if nesterov else m
            x = from_leaf(n, axes)
            (x,) = shared_out(orthogonalise, x)
            x = x.astype(m.dtype)
            factor = _shape_factor(*matrix_shape(g.shape, axes), scaling)
            return (factor * to_leaf(x, g.shape, axes)).astype(g.dtype)

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
    coefficients: Literal["classic", "polar_express"] = "classic",
    newton_schulz_dtype: Any = "float32",
    momentum_dtype: Any = "float32",
    matrices: MatrixSpecs = None,
    others: AdamW = DEFAULT_ADAMW,
) -> optax.GradientTransformationExtraArgs:
    """Muon for matrices, AdamW for every other leaf.

    The update is -lr (D + wd W): decay is decoupled and multiplied by the learning rate alone, not
    by Muon's factor. Arithmetic and state are float32 on parameters of any dtype. Embedding tables
    and output heads have two axes but are no matrices in this sense: name them with None.

    Args:
      learning_rate: of the matrices, a number or a schedule.
      weight_decay: of the matrices.
      momentum: see `scale_by_muon`, as are the next six.
      nesterov: see there.
      newton_schulz_steps: see there.
      scaling: see there.
      coefficients: see there.
      newton_schulz_dtype: see there.
      momentum_dtype: see there; None is the dtype the chain works in.
      matrices: patterns as of `nag_jax.optim.roles.find_matrices`.
      others: options of the other leaves.

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
        coefficients=coefficients,
        newton_schulz_dtype=newton_schulz_dtype,
        momentum_dtype=momentum_dtype,
        matrices=matrices,
    )
    return with_adamw(direction, learning_rate, weight_decay, matrices, others)


def _shape_factor(rows: int, columns: int, scaling: str) -> float:
    if scaling == "moonshot":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, columns / rows))
