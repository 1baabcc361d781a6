"""Makes a run's optimizer: config and parameter metadata in, one optax chain out.

Clip by the global norm, then one group per role, each with its own rate, then centring. What a kind
of optimizer does with matrices is the kind's; every other role gets AdamW. A kind is a class with
two static methods, `defaults()` (its own config keys) and `direction(config, matrices)`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import optax

from nag_jax.errors import UserError
from nag_jax.kinds import kind_class
from nag_jax.optim.centring import centre_updates, centred_axes
from nag_jax.optim.chains import decoupled, in_float32
from nag_jax.optim.muon import SCALINGS, scale_by_muon
from nag_jax.optim.roles import MatrixAxes, check_paths, role_tree
from nag_jax.parameters import flatten


class AdamWKind:
    """AdamW for matrices too."""

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Returns the keys of this kind: none."""
        return {}

    @staticmethod
    def direction(
        config: Mapping[str, Any], matrices: Mapping[str, MatrixAxes]
    ) -> optax.GradientTransformation:
        """Returns Adam's direction for matrices.

        Args:
          config: the optimizer's config.
          matrices: {path: axes} of the parameters the transform will see.
        """
        del matrices
        return _adam(config)


class MuonKind:
    """Muon for matrices (see `nag_jax.optim.muon.scale_by_muon`)."""

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Returns the keys of this kind."""
        return {
            "momentum": 0.95,
            "nesterov": True,
            "newton_schulz_steps": 5,
            "scaling": "moonshot",
            "newton_schulz_dtype": "float32",
        }

    @staticmethod
    def direction(
        config: Mapping[str, Any], matrices: Mapping[str, MatrixAxes]
    ) -> optax.GradientTransformation:
        """Returns Muon's direction for matrices.

        Args:
          config: the optimizer's config.
          matrices: {path: axes} of the parameters the transform will see.

        Raises:
          UserError: a value that is not allowed, by its key.
        """
        _check(config, "momentum", lambda x: 0 <= x < 1, "at least 0 and below 1")
        _check(config, "newton_schulz_steps", lambda x: x >= 1, "at least 1")
        _check(config, "scaling", lambda x: x in SCALINGS, " or ".join(SCALINGS))
        dtypes = ("float32", "bfloat16")
        _check(config, "newton_schulz_dtype", lambda x: x in dtypes, " or ".join(dtypes))
        return scale_by_muon(
            momentum=config["momentum"],
            nesterov=config["nesterov"],
            newton_schulz_steps=config["newton_schulz_steps"],
            scaling=config["scaling"],
            newton_schulz_dtype=config["newton_schulz_dtype"],
            momentum_dtype=None,
            matrices=matrices,
        )


def build_optimizer(
    optimizer_config: Mapping[str, Any], total_steps: int, infos: Mapping[str, Any]
) -> tuple[optax.GradientTransformationExtraArgs, optax.Schedule]:
    """Builds the optimizer of a run.

    The update of a parameter W with gradient G is, in float32 and cast to W's dtype at the end,

      -rate(step) * multiplier[role] * (direction(clip(G)) + decay[role] * W),

    where `clip` scales the whole gradient down to the global norm `clip_norm`, `decay` is
    `weight_decay` for matrices, `embedding_decay` for embeddings and 0 for all else, and the
    multiplier of matrices, and of roles that `rate_multiplier` lacks, is 1. Updates of parameters
    marked centred then lose their mean along the axis "embed".

    Args:
      optimizer_config: the config's node `optimizer`, complete.
      total_steps: length of the run in optimizer steps.
      infos: nested dict shaped as the parameters, of `nag_jax.parameters.ParamInfo`. An empty one
        checks the config.

    Returns:
      The transform, and the schedule of the matrices' learning rate (step -> float32). The state is
      a tree of arrays; `nag_jax.optim.state_like_params` says which parameter each belongs to. It
      restores from the abstract state `jax.eval_shape(transform.init, params)`.

    Raises:
      UserError: a value that is not allowed, an unknown role or kind; at `init`, a parameter
        without metadata or metadata without a parameter.
    """
    config = optimizer_config
    _check_shared(config)
    schedule_kind = kind_class("optimizer.schedule", config["schedule"]["kind"])
    schedule = schedule_kind.build(config["schedule"], config["learning_rate"], total_steps)

    labels = role_tree(infos)
    flat = flatten(infos)
    matrices = {
        path: MatrixAxes(info.rows, info.columns)
        for path, info in flat.items()
        if info.role == "matrix"
    }
    matrix_direction = kind_class("optimizer", config["kind"]).direction(config, matrices)
    decay = {"matrix": config["weight_decay"], "embedding": config["embedding_decay"]}
    groups = {}
    for role in sorted({info.role for info in flat.values()}):
        if role == "matrix":
            direction, rate = matrix_direction, schedule
        else:
            multiplier = config["rate_multiplier"].get(role, 1.0)
            direction, rate = _adam(config), _scaled(schedule, multiplier)
        groups[role] = decoupled(direction, rate, decay.get(role, 0.0))

    clip_norm = config["clip_norm"]
    clip = optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity()
    chain = in_float32(
        optax.chain(clip, optax.partition(groups, labels), centre_updates(centred_axes(infos)))
    )

    def init(params):
        check_paths(infos, params)
        return chain.init(params)

    return optax.GradientTransformationExtraArgs(init, chain.update), schedule


def _adam(config: Mapping[str, Any]) -> optax.GradientTransformation:
    return optax.scale_by_adam(config["adam_b1"], config["adam_b2"], config["adam_eps"])


def _scaled(schedule: optax.Schedule, multiplier: float) -> optax.Schedule:
    return lambda step: multiplier * schedule(step)


def _check_shared(config: Mapping[str, Any]) -> None:
    for key in ("learning_rate", "weight_decay", "embedding_decay", "clip_norm"):
        _check(config, key, lambda x: x >= 0, "at least 0")
    for key in ("adam_b1", "adam_b2"):
        _check(config, key, lambda x: 0 <= x < 1, "at least 0 and below 1")
    _check(config, "adam_eps", lambda x: x > 0, "above 0")
    for role, value in config["rate_multiplier"].items():
        if value < 0:
            raise UserError(f"optimizer.rate_multiplier.{role} is {value!r}; it must be at least 0")


def _check(config: Mapping[str, Any], key: str, allowed: Callable[[Any], bool], words: str) -> None:
    if not allowed(config[key]):
        raise UserError(f"optimizer.{key} is {config[key]!r}; it must be {words}")
