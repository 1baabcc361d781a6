"""The matrices of a parameter leaf as a stack, whole or cut into blocks of bounded sides, and back.

Axes of the leaf that are neither rows nor columns (layers, experts, heads) stay axes of the stack,
so what is split over devices stays split.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nag_jax.optim.barrier import sharding_barrier
from nag_jax.optim.roles import MatrixAxes, matrix_shape

HIGHEST = jax.lax.Precision.HIGHEST


class Blocks(NamedTuple):
    """How a leaf becomes a stack of matrices.

    Attributes:
        shape: Shape of the leaf.
        axes: Its matrix axes.
        batch: Shape of the stack: the other axes and, where the matrices are cut, blocks along the
            rows and blocks along the columns.
        rows: Rows of a block.
        columns: Columns of a block.
    """

    shape: tuple[int, ...]
    axes: MatrixAxes
    batch: tuple[int, ...]
    rows: int
    columns: int


def blocks_of(shape: tuple[int, ...], axes: MatrixAxes, largest: int = 0) -> Blocks:
    """Plans the blocks of a leaf.

    Args:
        shape: Shape of the leaf.
        axes: Its matrix axes.
        largest: Bound of a block's sides; 0 for no bound. A longer side is cut into as few blocks
            as the bound allows, all equally long; zeros fill up the last one.

    Returns:
        The plan.
    """
    batch = tuple(shape[i] for i in _order(len(shape), axes)[: len(shape) - _inner(axes)])
    sides = matrix_shape(shape, axes)
    parts = tuple(-(-side // largest) if largest else 1 for side in sides)
    rows, columns = (-(-side // count) for side, count in zip(sides, parts, strict=True))
    return Blocks(tuple(shape), axes, batch + (parts if max(parts) > 1 else ()), rows, columns)


def to_blocks(leaf: Array, blocks: Blocks) -> Float[Array, "*batch rows columns"]:
    """Returns the leaf's matrices as a stack."""
    stack = from_leaf(leaf, blocks.axes)
    outer = stack.shape[:-2]
    if blocks.batch == outer:
        return stack
    parts = blocks.batch[len(outer) :]
    padding = [
        (0, count * side - whole)
        for count, side, whole in zip(
            parts, (blocks.rows, blocks.columns), stack.shape[-2:], strict=True
        )
    ]
    stack = jnp.pad(stack, [(0, 0)] * len(outer) + padding)
    stack = stack.reshape(*outer, parts[0], blocks.rows, parts[1], blocks.columns)
    return stack.swapaxes(-3, -2)


def from_blocks(stack: Float[Array, "*batch rows columns"], blocks: Blocks) -> Array:
    """Returns the leaf of a stack of matrices: the inverse of `to_blocks`."""
    sides = matrix_shape(blocks.shape, blocks.axes)
    outer = blocks.batch[: len(blocks.shape) - _inner(blocks.axes)]
    if blocks.batch != outer:
        parts = blocks.batch[len(outer) :]
        stack = stack.swapaxes(-3, -2)
        stack = stack.reshape(*outer, parts[0] * blocks.rows, parts[1] * blocks.columns)
        stack = stack[..., : sides[0], : sides[1]]
    return to_leaf(stack, blocks.shape, blocks.axes)


def from_leaf(leaf: Array, axes: MatrixAxes) -> Float[Array, "*batch rows columns"]:
    """Returns the leaf's whole matrices; each batch axis is kept, and so its sharding."""
    order = _order(leaf.ndim, axes)
    batch = tuple(leaf.shape[i] for i in order[: leaf.ndim - _inner(axes)])
    return leaf.transpose(order).reshape(*batch, *matrix_shape(leaf.shape, axes))


def to_leaf(
    stack: Float[Array, "*batch rows columns"], shape: tuple[int, ...], axes: MatrixAxes
) -> Array:
    """Returns the leaf of some shape: the inverse of `from_leaf`."""
    order = _order(len(shape), axes)
    inverse = sorted(range(len(shape)), key=order.__getitem__)
    return stack.reshape([shape[i] for i in order]).transpose(inverse)


def product(*factors: Float[Array, "*batch _ _"]) -> Float[Array, "*batch rows columns"]:
    """Returns the matrix product from left to right at the highest precision.

    On accelerators the default precision of float32 products is that of bfloat16 or little more,
    which a basis or an inverse root does not bear.
    """
    result = factors[0]
    for factor in factors[1:]:
        result = jnp.matmul(result, factor, precision=HIGHEST)
    return result


def each_matrix(
    function: Callable[..., tuple[Array, ...]], *stacks: Float[Array, "*batch _ _"]
) -> tuple[Float[Array, "*batch _ _"], ...]:
    """Applies a function of single matrices to a stack; on a mesh each device has its share.

    One after the other on CPU, where decompositions of several batches at once can wait for each
    other for ever (seen with jax 0.10.2 on two cores); as one batch elsewhere.

    Args:
        function: Of one matrix of each stack; returns a tuple of matrices.
        stacks: Arrays with the same batch axes.

    Returns:
        The stacks of results.
    """

    def run(*flat):
        return jax.lax.platform_dependent(
            flat,
            cpu=lambda flat: jax.lax.map(lambda one: function(*one), flat),
            default=lambda flat: jax.vmap(function)(*flat),
        )

    return shared_out(run, *stacks)


def shared_out(
    function: Callable[..., tuple[Array, ...]], *stacks: Float[Array, "*batch _ _"]
) -> tuple[Float[Array, "*batch _ _"], ...]:
    """Applies a function of stacks; on a mesh each device gets whole matrices, an equal share.

    The mesh is that of `jax.set_mesh`; a stack whose number of matrices its devices do not divide
    is filled up with zeros. What is split otherwise changes places first and comes back as the
    next operation wants it; of replicated stacks only the results travel.

    Args:
        function: Of stacks [count, _, _], any count; returns a tuple of such stacks.
        stacks: Arrays with the same batch axes.

    Returns:
        The stacks of results.
    """
    batch = stacks[0].shape[:-2]
    flat = tuple(stack.reshape(-1, *stack.shape[-2:]) for stack in stacks)
    count = flat[0].shape[0]
    mesh = jax.sharding.get_abstract_mesh()
    automatic = not mesh.empty and not mesh.manual_axes
    if not automatic or mesh.size == 1 or count == 1:
        results = function(*flat)
    else:
        missing = -count % mesh.size
        split = jax.P(mesh.axis_names)
        shared = jax.shard_map(function, in_specs=split, out_specs=split, check_vma=False)
        flat = tuple(
            jnp.pad(sharding_barrier(stack), ((0, missing), (0, 0), (0, 0))) for stack in flat
        )
        results = tuple(sharding_barrier(result[:count]) for result in shared(*flat))
    return tuple(result.reshape(*batch, *result.shape[1:]) for result in results)


def _inner(axes: MatrixAxes) -> int:
    return len(axes.rows) + len(axes.columns)


def _order(ndim: int, axes: MatrixAxes) -> tuple[int, ...]:
    batch = tuple(i for i in range(ndim) if i not in (*axes.rows, *axes.columns))
    return (*batch, *axes.rows, *axes.columns)
