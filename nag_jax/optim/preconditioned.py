"""What SOAP, Shampoo and KL-Shampoo share: leaves as stacks of matrices, refreshes, bad gradients.

A rule says what happens to one stack of matrices; `preconditioned` makes an optax transform of it.
A gradient that is not finite counts as zero for its matrix, so it enters no factor and no moment; a
refresh whose result is not finite leaves its matrix as it was. Both are counted in the state.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from nag_jax.errors import UserError
from nag_jax.optim.chains import StartsLate, working_dtype
from nag_jax.optim.matrices import Blocks, blocks_of, each_matrix, from_blocks, to_blocks
from nag_jax.optim.roles import MatrixSpecs, all_matrices, path_string


class PreconditionedState(NamedTuple):
    """State of `scale_by_soap`, `scale_by_shampoo` and `scale_by_kl_shampoo`.

    Attributes:
        step: Gradients seen.
        arrays: The rule's arrays: a tree shaped as the parameters for each of its names, with None
            where a leaf has no such array.
        rejected: Matrices whose gradient was not finite, of all steps.
        failed: Refreshes whose result was not finite, of all steps.
    """

    step: Int[Array, ""]
    arrays: dict[str, Any]
    rejected: Int[Array, ""]
    failed: Int[Array, ""]


class Rule(Protocol):
    """The mathematics of an optimizer on a stack of matrices [*batch, rows, columns].

    Attributes:
        names: Of all arrays that a stack may have.
        first_refresh: 0: all matrices are refreshed by the first gradient, then as they are due;
            1: the first gradient makes what is refreshed later, in the rule's own way, and moves
            nothing.
    """

    names: tuple[str, ...]
    first_refresh: int

    def init(self, blocks: Blocks, dtype: Any) -> dict[str, Float[Array, "..."]]:
        """Returns the arrays of a stack before the first gradient."""
        ...

    def update(
        self,
        gradient: Float[Array, "*batch rows columns"],
        arrays: dict[str, Array],
        step: Int[Array, ""],
        refresh: "Refresh",
    ) -> tuple[Float[Array, "*batch rows columns"], dict[str, Array]]:
        """Returns the direction and the new arrays; `step` gradients were seen before."""
        ...


class Refresh:
    """Renews what is dear of a stack of matrices, when it is due.

    Args:
        step: Gradients seen before.
        every: Steps between two refreshes of a matrix: at steps that it divides, if not staggered.
        first: As `Rule.first_refresh`.
        offset: Where staggered, matrices of other leaves before this one; None where all matrices
            are refreshed in the same step.

    Attributes:
        failed: Refreshes whose result was not finite.
    """

    def __init__(self, step: Int[Array, ""], every: int, first: int, offset: int | None):
        self._step = step
        self._every = every
        self._first = first
        self._offset = offset
        self.failed = jnp.zeros((), jnp.int32)

    def __call__(
        self,
        function: Callable[..., tuple[Array, ...]],
        operands: tuple[Float[Array, "*batch _ _"], ...],
        old: tuple[Float[Array, "*batch _ _"], ...],
    ) -> tuple[Float[Array, "*batch _ _"], ...]:
        """Returns the results where they are due and finite, and the old ones elsewhere.

        Args:
            function: Of one matrix of each operand; returns as many matrices as `old` has.
            operands: What it needs.
            old: What its results replace.
        """
        batch = old[0].shape[:-2]
        operands, old = (
            tuple(stack.reshape(-1, *stack.shape[-2:]) for stack in stacks)
            for stacks in (operands, old)
        )

        def renew(operands, old):
            new = each_matrix(function, *operands)
            good = jnp.stack([jnp.all(jnp.isfinite(x), axis=(-2, -1)) for x in new]).all(axis=0)
            kept = tuple(
                jnp.where(good[:, None, None], n, o) for n, o in zip(new, old, strict=True)
            )
            return kept, jnp.sum(~good, dtype=jnp.int32)

        def keep(operands, old):
            del operands
            return old, jnp.zeros((), jnp.int32)

        if self._offset is None:
            due = (self._step >= self._first) & (self._step % self._every == 0)
            new, failed = jax.lax.cond(due, renew, keep, operands, old)
        else:
            # The first gradient is everybody's turn, or nobody's.
            at_first = keep if self._first else renew
            some = self._some(renew, keep)
            new, failed = jax.lax.cond(self._step == 0, at_first, some, operands, old)
        self.failed += failed
        return tuple(stack.reshape(*batch, *stack.shape[1:]) for stack in new)

    def _some(self, renew, keep):
        """As `renew`, for the part of the stack whose turn it is."""

        def some(operands, old):
            count = old[0].shape[0]
            each = -(-count // self._every)
            turn = (self._step + self._offset) % self._every
            first = jnp.minimum(turn * each, count - each)
            rows = first + jnp.arange(each)

            def renew_some(operands, old):
                part, old_part = (
                    tuple(jax.lax.dynamic_slice_in_dim(x, first, each) for x in stacks)
                    for stacks in (operands, old)
                )
                new, failed = renew(part, old_part)
                # Where turns do not divide the stack the last one reaches back to others' matrices.
                own = (rows >= turn * each)[:, None, None]
                new = (jnp.where(own, n, o) for n, o in zip(new, old_part, strict=True))
                return tuple(
                    jax.lax.dynamic_update_slice_in_dim(whole, n, first, 0)
                    for whole, n in zip(old, new, strict=True)
                ), failed

            return jax.lax.cond(turn * each < count, renew_some, keep, operands, old)

        return some


def preconditioned(
    rule: Rule,
    every: int,
    stagger: bool,
    largest: int,
    matrices: MatrixSpecs,
) -> optax.GradientTransformation:
    """Makes a transform of a rule.

    Args:
        rule: The mathematics.
        every: Steps between refreshes.
        stagger: Whether refreshes are spread over these steps, a part of the matrices in each.
        largest: Bound of a block's sides; 0 for whole matrices.
        matrices: See `nag_jax.optim.roles.find_matrices`; every leaf must be a matrix.

    Returns:
        The transform. Its arithmetic and its state are float32 (float64 for such leaves); updates
        have their gradient's dtype.

    Raises:
        UserError: at once, if `every` is below 1 or `largest` below 0; at `init`, a leaf that is no
            matrix or a pattern that matches no leaf.
    """
    if every < 1:
        raise UserError(f"refresh_every is {every!r}; it must be at least 1")
    if largest < 0:
        raise UserError(
            f"block_size is {largest!r}; it must be at least 1, or 0 for whole matrices"
        )

    def plans(tree):
        found = all_matrices(tree, matrices)
        return {path: blocks_of(leaf.shape, found[path], largest) for path, leaf in _leaves(tree)}

    def init(params):
        made = [
            rule.init(blocks, working_dtype(leaf.dtype))
            for blocks, (_, leaf) in zip(plans(params).values(), _leaves(params), strict=True)
        ]
        treedef = jax.tree.structure(params)
        return PreconditionedState(
            jnp.zeros((), jnp.int32),
            {name: treedef.unflatten([arrays.get(name) for arrays in made]) for name in rule.names},
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.int32),
        )

    def update(updates, state, params=None):
        del params
        treedef = jax.tree.structure(updates)
        old = {name: treedef.flatten_up_to(tree) for name, tree in state.arrays.items()}
        new = {name: [] for name in old}
        directions, rejected, failed, offset = [], state.rejected, state.failed, 0
        found = plans(updates)
        for index, (path, leaf) in enumerate(_leaves(updates)):
            blocks = found[path]
            gradient = to_blocks(leaf.astype(working_dtype(leaf.dtype)), blocks)
            finite = jnp.all(jnp.isfinite(gradient), axis=(-2, -1), keepdims=True)
            rejected += jnp.sum(~finite, dtype=jnp.int32)
            arrays = {name: values[index] for name, values in old.items()}
            refresh = Refresh(state.step, every, rule.first_refresh, offset if stagger else None)
            direction, arrays = rule.update(
                jnp.where(finite, gradient, 0.0),
                {name: array for name, array in arrays.items() if array is not None},
                state.step,
                refresh,
            )
            failed += refresh.failed
            offset += -(-gradient[..., 0, 0].size // every)
            for name, values in new.items():
                values.append(arrays.get(name))
            directions.append(from_blocks(direction, blocks).astype(leaf.dtype))
        return treedef.unflatten(directions), PreconditionedState(
            state.step + 1,
            {name: treedef.unflatten(values) for name, values in new.items()},
            rejected,
            failed,
        )

    return (StartsLate if rule.first_refresh else optax.GradientTransformation)(init, update)


def _leaves(tree):
    return [(path_string(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]
