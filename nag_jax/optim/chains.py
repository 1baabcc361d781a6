"""Pieces that every optimizer's chain shares: its end, and the float32 it runs in.

On bfloat16 parameters optax alone would do its arithmetic in bfloat16, where b2 = 0.999 is 1 and
the first Adam update is NaN.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int


def working_dtype(*dtypes: Any) -> jnp.dtype:
    """Returns the dtype statistics are kept in: float32, or float64 if one of `dtypes` is."""
    return jnp.promote_types(jnp.result_type(*dtypes), jnp.float32)


def known_to_be(number: float, value: Any) -> bool:
    """Whether an option is this number; `optax.inject_hyperparams` makes options unknown arrays."""
    return not isinstance(value, jax.Array) and value == number


class StartsLate(optax.GradientTransformation):
    """A transform that only learns from the first gradient: nothing moves, nor decays, by it."""


class DecayState(NamedTuple):
    """State of decay that starts late.

    Attributes:
      step: gradients seen.
    """

    step: Int[Array, ""]


def decoupled(
    direction: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float,
) -> optax.GradientTransformation:
    """Ends a chain: the update is -learning_rate * (direction + weight_decay * parameter).

    Args:
      direction: the transform that turns gradients into directions. Without the first decay if it
        is one that `StartsLate`.
      learning_rate: a number or a schedule.
      weight_decay: of the parameters; the state's structure does not depend on it.

    Returns:
      The chain.
    """
    if isinstance(direction, StartsLate):
        decay = _late_decay(weight_decay)
    elif known_to_be(0, weight_decay):
        decay = optax.identity()
    else:
        decay = optax.add_decayed_weights(weight_decay)
    return optax.chain(direction, decay, optax.scale_by_learning_rate(learning_rate))


def _late_decay(weight_decay: float) -> optax.GradientTransformation:
    def init(params):
        del params
        return DecayState(jnp.zeros((), jnp.int32))

    def update(updates, state, params=None):
        new_state = DecayState(state.step + 1)
        if known_to_be(0, weight_decay):
            return updates, new_state
        if params is None:
            raise ValueError("weight decay needs the parameters: update(updates, state, params)")
        decay = jnp.where(state.step == 0, 0.0, weight_decay)
        return jax.tree.map(lambda u, p: u + decay.astype(u.dtype) * p, updates, params), new_state

    return optax.GradientTransformation(init, update)


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Gives `inner` gradients and parameters in float32 and casts its updates back.

    The state is `inner`'s own, so it is float32 too. Updates come back in their parameter's dtype
    (in the gradient's where no parameters are given). float64 stays float64.

    Args:
      inner: the transform to run.

    Returns:
      A transform with the state of `inner`.
    """
    inner = optax.with_extra_args_support(inner)

    def widen(tree):
        return jax.tree.map(lambda x: x.astype(working_dtype(x.dtype)), tree)

    def init(params):
        return inner.init(widen(params))

    def update(updates, state, params=None, **extra_args):
        like = updates if params is None else params
        wide = None if params is None else widen(params)
        new, state = inner.update(widen(updates), state, wide, **extra_args)
        return jax.tree.map(lambda u, x: u.astype(x.dtype), new, like), state

    return optax.GradientTransformationExtraArgs(init, update)
