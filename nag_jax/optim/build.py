"""Makes a run's optimizer: config and parameter metadata in, one optax chain out.

Clip by the global norm, then one group per role, each with its own rate, then centring. What a kind
of optimizer does with matrices is the kind's (`choices.py`); every other role gets AdamW. A kind is
a class with two static methods, `defaults()` (its own config keys) and
`direction(config, matrices)`.
"""

from collections.abc import Mapping
from typing import Any

import optax

from nag_jax.errors import UserError
from nag_jax.kinds import kind_class
from nag_jax.optim.centring import centre_updates, centred_axes
from nag_jax.optim.chains import decoupled, in_float32
from nag_jax.optim.choices import adam, check
from nag_jax.optim.roles import MatrixAxes, check_paths, role_tree
from nag_jax.parameters import ParamInfo, flatten

HEADS = ("heads", "kv_heads")


def build_optimizer(
    optimizer_config: Mapping[str, Any], total_steps: int, infos: Mapping[str, Any]
) -> tuple[optax.GradientTransformationExtraArgs, optax.Schedule]:
    """Builds the optimizer of a run.

    The update of a parameter W with gradient G is, in float32 and cast to W's dtype at the end,

      -rate(step) * multiplier[role] * (direction(clip(G)) + decay[role] * W),

    where `clip` scales the whole gradient down to the global norm `clip_norm`, `decay` is
    `weight_decay` for matrices, `embedding_decay` for embeddings and 0 for all else, and the
    multiplier of matrices, and of roles that `rate_multiplier` lacks, is 1. With `split_heads`, a
    key of most kinds, projections of attention are one matrix for each head instead of one for all.
    Updates of parameters marked centred then lose their mean along the axis "embed".

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
        path: matrix_axes(info, config.get("split_heads", False))
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
            direction, rate = adam(config), _scaled(schedule, multiplier)
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


def matrix_axes(info: ParamInfo, split_heads: bool) -> MatrixAxes:
    """The axes of a parameter's matrix; heads are no part of it where they are split."""
    axes = (
        tuple(i for i in side if not (split_heads and info.axes[i] in HEADS))
        for side in (info.rows, info.columns)
    )
    return MatrixAxes(*axes)


def _scaled(schedule: optax.Schedule, multiplier: float) -> optax.Schedule:
    return lambda step: multiplier * schedule(step)


def _check_shared(config: Mapping[str, Any]) -> None:
    for key in ("learning_rate", "weight_decay", "embedding_decay", "clip_norm"):
        check(config, key, lambda x: x >= 0, "at least 0")
    for key in ("adam_b1", "adam_b2"):
        check(config, key, lambda x: 0 <= x < 1, "at least 0 and below 1")
    check(config, "adam_eps", lambda x: x > 0, "above 0")
    for role, value in config["rate_multiplier"].items():
        if value < 0:
            raise UserError(f"optimizer.rate_multiplier.{role} is {value!r}; it must be at least 0")
