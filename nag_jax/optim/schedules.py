"""Learning-rate schedules, as the kinds that `optimizer.schedule.kind` chooses from.

Each is a linear warm-up times a shape. The first step already moves, at peak / warmup_steps, and
the last one still does: a shape reaches its final share one step after the run's end.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from nag_jax.errors import UserError


class Constant:
    """The peak rate after the warm-up."""

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Returns the keys of this kind."""
        return {"warmup_steps": 20}

    @staticmethod
    def build(node: Mapping[str, Any], peak: float, total_steps: int) -> optax.Schedule:
        """Returns step -> rate (float32): peak * min(1, (step + 1) / warmup_steps).

        Args:
          node: the schedule's keys.
          peak: the rate after warm-up.
          total_steps: length of the run in optimizer steps.

        Raises:
          UserError: the warm-up is negative or longer than the run.
        """
        _check_steps(node, "warmup_steps", total_steps)
        return _warmed(node, peak, jnp.ones_like)


class Cosine:
    """Half a cosine from the peak down to a share of it."""

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Returns the keys of this kind."""
        return {"warmup_steps": 20, "final_share": 0.1}

    @staticmethod
    def build(node: Mapping[str, Any], peak: float, total_steps: int) -> optax.Schedule:
        """Returns step -> rate (float32), with u = (step - warmup) / (total - warmup) in [0, 1]:

        peak * min(1, (step + 1) / warmup) * (final + (1 - final) (1 + cos(pi u)) / 2).

        Args:
          node: the schedule's keys.
          peak: the rate after warm-up.
          total_steps: length of the run in optimizer steps.

        Raises:
          UserError: the warm-up is negative or longer than the run, or `final_share` not in [0, 1].
        """
        warmup = _check_steps(node, "warmup_steps", total_steps)
        final = _check_share(node)
        length = max(1, total_steps - warmup)

        def shape(step):
            done = jnp.clip((step - warmup) / length, 0.0, 1.0)
            return final + (1.0 - final) * 0.5 * (1.0 + jnp.cos(jnp.pi * done))

        return _warmed(node, peak, shape)


class WarmupStableDecay:
    """The peak rate until the last `decay_steps`, then a straight line down to a share of it."""

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Returns the keys of this kind."""
        return {"warmup_steps": 20, "decay_steps": 100, "final_share": 0.0}

    @staticmethod
    def build(node: Mapping[str, Any], peak: float, total_steps: int) -> optax.Schedule:
        """Returns step -> rate (float32), with v = (total - step) / decay_steps in [0, 1]:

        peak * min(1, (step + 1) / warmup) * (final + (1 - final) v).

        Args:
          node: the schedule's keys.
          peak: the rate after warm-up.
          total_steps: length of the run in optimizer steps.

        Raises:
          UserError: warm-up or decay are negative, or together longer than the run, or
            `final_share` is not in [0, 1].
        """
        warmup = _check_steps(node, "warmup_steps", total_steps)
        decay = _check_steps(node, "decay_steps", total_steps)
        final = _check_share(node)
        if warmup + decay > total_steps:
            raise UserError(
                f"optimizer.schedule.warmup_steps = {warmup} and optimizer.schedule.decay_steps = "
                f"{decay} are together longer than the run of {total_steps} steps"
            )

        def shape(step):
            left = jnp.clip((total_steps - step) / max(1, decay), 0.0, 1.0)
            return final + (1.0 - final) * left

        return _warmed(node, peak, shape)


def _warmed(
    node: Mapping[str, Any], peak: float, shape: Callable[[jax.Array], jax.Array]
) -> optax.Schedule:
    warmup = max(1, node["warmup_steps"])

    def rate(step):
        step = jnp.asarray(step, jnp.float32)
        return peak * jnp.minimum(1.0, (step + 1.0) / warmup) * shape(step)

    return rate


def _check_steps(node: Mapping[str, Any], key: str, total_steps: int) -> int:
    if not 0 <= node[key] <= total_steps:
        raise UserError(
            f"optimizer.schedule.{key} = {node[key]} does not fit a run of {total_steps} steps; "
            f"it must lie between 0 and {total_steps}"
        )
    return node[key]


def _check_share(node: Mapping[str, Any]) -> float:
    if not 0.0 <= node["final_share"] <= 1.0:
        raise UserError(
            f"optimizer.schedule.final_share = {node['final_share']}; it must lie between 0 and 1"
        )
    return node["final_share"]
