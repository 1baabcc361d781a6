"""Sign descent and spectral descent: the steepest steps under the largest entry and singular value.

The theory of P2 (arXiv 2605.25880) compares the two; its appendix C.4 describes both, the formulas
are the usual ones.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from nag_jax.optim.chains import decoupled, in_float32, known_to_be, working_dtype
from nag_jax.optim.hybrid import DEFAULT_ADAMW, AdamW, finite_or_zero, with_adamw
from nag_jax.optim.matrices import each_matrix, from_leaf, product, shared_out, to_leaf
from nag_jax.optim.muon import newton_schulz
from nag_jax.optim.roles import MatrixSpecs, all_matrices, path_string


class SteepestState(NamedTuple):
    """State of `scale_by_sign` and `scale_by_spectral`.

    Attributes:
        momentum: A tree shaped as the parameters; None without momentum.
    """

    momentum: optax.Updates | None


def scale_by_sign(momentum: float = 0.0) -> optax.GradientTransformation:
    """The direction is sign(M) with M <- mu M + (1 - mu) G, or sign(G) for mu = 0.

    Args:
        momentum: mu.

    Returns:
        A transform for leaves of any shape; a gradient that is not finite counts as zero for its
        leaf.
    """

    def direction(path, m):
        del path
        return jnp.sign(m)

    return _steepest(momentum, lambda tree: None, lambda found: direction)


def scale_by_spectral(
    momentum: float = 0.0,
    newton_schulz_steps: int = 0,
    matrices: MatrixSpecs = None,
) -> optax.GradientTransformation:
    """The direction is U V^T of the singular value decomposition U S V^T of M (or of G, mu = 0).

    M <- mu M + (1 - mu) G. Directions whose singular value is below the rounding of the largest are
    left out, so that a gradient of low rank does not turn the rest of the weights at random.

    Args:
        momentum: mu.
        newton_schulz_steps: Iterations of Muon's kind, which leave singular values near 1; 0 is
            the exact decomposition.
        matrices: Which axes form each leaf's matrix, see `nag_jax.optim.roles.find_matrices`.

    Returns:
        A transform for matrices; a gradient that is not finite counts as zero for its leaf.

    Raises:
        UserError: At `init`, a leaf that is no matrix or a pattern that matches no leaf.
    """

    def polar(matrix):
        u, s, vt = jnp.linalg.svd(matrix, full_matrices=False)
        rank = s > s[0] * max(matrix.shape) * jnp.finfo(s.dtype).eps
        return (product(jnp.where(rank, u, 0.0), vt),)

    def iterate(stack):
        return (newton_schulz(stack, newton_schulz_steps, stack.dtype),)

    def prepare(found):
        def direction(path, m):
            axes = found[path_string(path)]
            stack = from_leaf(m, axes)
            if newton_schulz_steps:
                (stack,) = shared_out(iterate, stack)
            else:
                (stack,) = each_matrix(polar, stack)
            return to_leaf(stack, m.shape, axes)

        return direction

    return _steepest(momentum, lambda tree: all_matrices(tree, matrices), prepare)


def sign_descent(
    learning_rate: optax.ScalarOrSchedule, weight_decay: float = 0.0, momentum: float = 0.0
) -> optax.GradientTransformationExtraArgs:
    """Sign descent for every leaf: W <- W - lr (sign(M) + wd W).

    Args:
        learning_rate: A number or a schedule.
        weight_decay: Decoupled, multiplied by the learning rate.
        momentum: See `scale_by_sign`.

    Returns:
        The transform.
    """
    return in_float32(decoupled(scale_by_sign(momentum), learning_rate, weight_decay))


def spectral_descent(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    newton_schulz_steps: int = 0,
    matrices: MatrixSpecs = None,
    others: AdamW = DEFAULT_ADAMW,
) -> optax.GradientTransformationExtraArgs:
    """Spectral descent for matrices, AdamW for every other leaf.

    Args:
        learning_rate: Of the matrices, a number or a schedule.
        weight_decay: Decoupled, multiplied by the learning rate.
        momentum: See `scale_by_spectral`.
        newton_schulz_steps: See there.
        matrices: See there.
        others: Options of the other leaves.

    Returns:
        The transform.
    """
    direction = scale_by_spectral(momentum, newton_schulz_steps, matrices)
    return with_adamw(direction, learning_rate, weight_decay, matrices, others)


def _steepest(momentum, find, prepare) -> optax.GradientTransformation:
    def init(params):
        find(params)
        if known_to_be(0, momentum):
            return SteepestState(None)
        return SteepestState(
            jax.tree.map(lambda p: jnp.zeros(p.shape, working_dtype(p.dtype)), params)
        )

    def update(updates, state, params=None):
        del params
        found = find(updates)
        wide = jax.tree.map(lambda g: finite_or_zero(g.astype(working_dtype(g.dtype))), updates)
        if state.momentum is not None:
            wide = jax.tree.map(
                lambda m, g: momentum * m + (1 - momentum) * g, state.momentum, wide
            )
            state = SteepestState(wide)
        directions = jax.tree_util.tree_map_with_path(prepare(found), wide)
        return jax.tree.map(lambda d, g: d.astype(g.dtype), directions, updates), state

    return optax.GradientTransformation(init, update)
