"""Keeps the rows of an embedding table centred at zero, without a hook after the step.

A table whose rows have mean zero keeps them so if every update's rows have mean zero, weight decay
included; so this is the last link of a chain.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from nag_jax.errors import UserError
from nag_jax.optim.roles import path_string
from nag_jax.parameters import ParamInfo, flatten


def centred_axes(infos: Mapping[str, Any]) -> dict[str, int]:
    """Returns {path: position of the axis "embed"} of the parameters whose rows stay centred.

    Raises:
      UserError: a parameter is marked centred but has no axis "embed".
    """
    return {path: _embed(path, info) for path, info in flatten(infos).items() if info.centred}


def centre_updates(axes: Mapping[str, int]) -> optax.GradientTransformation:
    """Subtracts from the updates of some parameters their mean along one axis.

    Args:
      axes: {path: axis}; updates of other paths pass unchanged.

    Returns:
      A transform without state.
    """

    def centre(path, update):
        axis = axes.get(path_string(path))
        if axis is None:
            return update
        return update - jnp.mean(update, axis=axis, keepdims=True)

    return optax.stateless(
        lambda updates, _: jax.tree_util.tree_map_with_path(centre, updates),
    )


def _embed(path: str, info: ParamInfo) -> int:
    if "embed" not in info.axes:
        raise UserError(
            f"parameter {path} is marked centred but has no axis named embed among {info.axes}"
        )
    return info.axes.index("embed")
