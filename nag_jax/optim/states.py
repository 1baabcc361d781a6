"""Which parameter each array of an optimizer's state belongs to.

Optimizers keep trees shaped as the parameters inside their own tuples, so the state's shardings
follow from the parameters'.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax


def state_like_params(
    transform: optax.GradientTransformation,
    params: Any,
    values: Any,
    default: Any,
    derived: Callable[[Any, tuple[int, ...], tuple[int, ...]], Any] | None = None,
) -> Any:
    """Returns a tree shaped as the optimizer's state that holds each parameter's value.

    An array of the state belongs to a parameter if its path ends in the parameter's path (the
    longest such path counts). It mirrors the parameter if it has its shape too, and otherwise, as
    the factors of SOAP, is only made of it.

    Args:
      transform: the optimizer.
      params: parameters, or `jax.ShapeDtypeStruct`s; nothing is computed.
      values: a tree shaped as `params` with one value each, a sharding for example.
      default: the value of every other array: step counts, for example.
      derived: (value, shape of the parameter, shape of the array) -> the value of an array that is
        made of a parameter; by default such arrays have the value `default`.

    Returns:
      A tree shaped as `transform.init(params)`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> params, specs = {"w": jnp.ones((4, 8))}, {"w": jax.P("fsdp", None)}
      >>> state_like_params(optax.adam(1e-3), params, specs, jax.P())[0].mu
      {'w': P('fsdp', None)}
    """
    treedef = jax.tree.structure(params)
    shapes = jax.tree_util.tree_leaves_with_path(params)
    owners = {
        path: (leaf.shape, value)
        for (path, leaf), value in zip(shapes, treedef.flatten_up_to(values), strict=True)
    }

    def value_of(path, leaf):
        for start in range(len(path)):
            if path[start:] in owners:
                shape, value = owners[path[start:]]
                if shape == leaf.shape:
                    return value
                return derived(value, shape, leaf.shape) if derived else default
        return default

    return jax.tree_util.tree_map_with_path(value_of, jax.eval_shape(transform.init, params))
