"""Runs a function of single rows on those rows alone that do not skip it, at static shapes.

The kept rows are brought to the front and the function runs on the first C of them, C being the
smallest of a few capacities that holds them all; the largest is all rows, so nothing is ever
dropped. The choice is a switch inside a `custom_vjp`: under plain autodiff every branch's
intermediates would be kept.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from nag_jax.models.linear import GROUPED_PRODUCT, gathered
from nag_jax.models.rows import Sorting, sort_by_group, take_rows
from nag_jax.sharding import rules

# Parts of all rows, in eighths, for which there is a branch; more of them cost time to compile.
EIGHTHS = (0, 2, 4, 5, 6, 7, 8)

Weights = Mapping[str, nnx.Param] | dict[str, Array]

# (weights, rows [N, *in]) -> [N, *out]
RowFunction = Callable[[Weights, Array], Array]


def capacities(rows: int) -> list[int]:
    """Numbers of rows, in ascending order, from none to all."""
    return sorted({-(-rows * eighths // 8) for eighths in EIGHTHS})


def on_kept_rows(
    function: RowFunction,
    weights: Mapping[str, nnx.Param],
    x: Float[Array, "B T *in"],
    keep: Bool[Array, "B T"] | None,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
) -> Float[Array, "B T *out"]:
    """`function(weights, x)` where `keep`; elsewhere something finite that nobody should use.

    On a mesh each device runs its own rows with its heads or hidden units.

    Args:
        function: Of single rows; it uses each weight by `linear.contract`.
        weights: Its parameters.
        x: Activations in the compute dtype.
        keep: Rows to run; None for all, in which case nothing is gathered.
        inputs: Logical axes of a row of `x`.
        outputs: Those of a row of the result. Where an axis that is split over devices is in no
            row of the result, the function's results are summed over the devices.
    """
    if keep is None:
        return function(weights, x)
    mesh = jax.sharding.get_abstract_mesh()
    arrays = {name: gathered(w, x.dtype) for name, w in weights.items()}
    if mesh.empty or mesh.size == 1:
        return _on_device(function, arrays, x, keep)
    specs = {
        name: rules.use_spec(w.get_metadata()["axes"], w.shape, mesh) for name, w in weights.items()
    }
    divides = x.shape[0] % rules.batch_shards(mesh) == 0
    rows = rules.BATCH_AXES if divides else None
    x_spec = rules.use_spec(inputs, x.shape[2:], mesh)
    shape = jax.eval_shape(function, arrays, x).shape
    out_spec = rules.use_spec(outputs, shape[2:], mesh)
    split = any("tensor" in spec for spec in (*specs.values(), x_spec))
    summed = split and "tensor" not in out_spec

    def run(arrays, x, keep):
        return _on_device(function, arrays, x, keep)[None]

    mapped = jax.shard_map(
        run,
        in_specs=(specs, P(rows, None, *x_spec), P(rows)),
        out_specs=P("tensor" if summed else None, rows, None, *out_spec),
        check_vma=False,
    )
    # Summed outside, where the transpose is a copy, and in its own dtype.
    return jax.lax.reduce_sum(mapped(arrays, x, keep), (0,))


def _on_device(function: RowFunction, weights: dict, x: Array, keep: Array) -> Array:
    rows = x.reshape(-1, *x.shape[2:])
    sorting = sort_by_group(jnp.where(keep, 0, 1).reshape(-1), 1)
    y = _on_first(function, weights, rows, sorting)
    return y.reshape(*x.shape[:2], *y.shape[1:])


def _switch(rows: Array, sorting: Sorting, branch: Callable, *operands: Any) -> Any:
    """Runs `branch(capacity, *operands)` for the smallest capacity that holds the kept rows."""
    sizes = capacities(rows.shape[0])
    index = jnp.sum(jnp.asarray(sizes[:-1], jnp.int32) < sorting.group_sizes[0])
    return jax.lax.switch(index, [functools.partial(branch, n) for n in sizes], *operands)


def _first(x: Array, sorting: Sorting, capacity: int) -> Array:
    """The first rows in order; all of them as they are."""
    return x if capacity == x.shape[0] else take_rows(x, sorting.order[:capacity])


def _back(y: Array, sorting: Sorting) -> Array:
    """Rows of `_first` where they were, zeros elsewhere."""
    if y.shape[0] == sorting.places.shape[0]:
        return y
    return take_rows(y, sorting.places, past_the_end=True)


def _pull_back(function: RowFunction, weights: dict, rows: Array) -> tuple[Array, Any, list[Array]]:
    """(result, pull-back, what it keeps besides weights and rows): the weights' products."""
    kept = jax.checkpoint(function, policy=jax.checkpoint_policies.dots_saveable)
    y, pull_back = jax.vjp(kept, weights, rows)
    operands = [*jax.tree.leaves(weights), rows]
    leaves = jax.tree.leaves(pull_back)
    return y, pull_back, [x for x in leaves if not any(x is operand for operand in operands)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _on_first(function: RowFunction, weights: dict, x: Array, sorting: Sorting) -> Array:
    def branch(capacity, weights, x):
        if capacity == 0:
            shape = jax.eval_shape(function, weights, x)
            return jnp.zeros(shape.shape, shape.dtype)
        return _back(function(weights, _first(x, sorting, capacity)), sorting)

    return _switch(x, sorting, branch, weights, x)


def _on_first_forward(function, weights, x, sorting):
    def results(capacity, weights, x):
        y, _, kept = _pull_back(function, weights, _first(x, sorting, capacity))
        widths = ((0, x.shape[0] - capacity),)
        padded = [jnp.pad(part, widths + ((0, 0),) * (part.ndim - 1)) for part in kept]
        return _back(y, sorting), padded

    def branch(capacity, weights, x):
        if capacity == 0:
            shapes = jax.eval_shape(functools.partial(results, x.shape[0]), weights, x)
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return results(capacity, weights, x)

    y, kept = _switch(x, sorting, branch, weights, x)
    # Under this name a remat policy keeps them: it cannot see the products in a switch, and would
    # run it again for any one of its results.
    y, *kept = (checkpoint_name(part, GROUPED_PRODUCT) for part in (y, *kept))
    return y, (weights, x, sorting, kept)


def _on_first_backward(function, residuals, d_y):
    weights, x, sorting, kept = residuals

    def branch(capacity, weights, x, kept, d_y):
        if capacity == 0:
            return jax.tree.map(jnp.zeros_like, (weights, x))
        # Traced for its structure: what it computes is replaced by what the forward pass kept.
        _, pull_back, own = _pull_back(function, weights, _first(x, sorting, capacity))
        replaced = {id(old): new[:capacity] for old, new in zip(own, kept, strict=True)}
        pull_back = jax.tree.map(lambda leaf: replaced.get(id(leaf), leaf), pull_back)
        d_weights, d_rows = pull_back(_first(d_y, sorting, capacity))
        return d_weights, _back(d_rows, sorting)

    return *_switch(x, sorting, branch, weights, x, kept, d_y), None


_on_first.defvjp(_on_first_forward, _on_first_backward)
