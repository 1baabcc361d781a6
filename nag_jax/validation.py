"""Combinations of config values that cannot work, refused before any data is read or compiled.

Optimizers and schedules check their own ranges when they are built, which costs nothing, so they
are built here once. Types and unknown keys are `config.resolve`'s; a user's own kinds check their
keys themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from nag_jax.dotted import flatten
from nag_jax.errors import UserError
from nag_jax.kinds import MEMBERS, REGISTRY, is_registered, kind_class, kind_defaults
from nag_jax.models.stages import MAX_LOOPS, stages_of

REMAT_POLICIES = (
    "none",  # keep every intermediate
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)


class Rule(NamedTuple):
    """What a leaf may be: a test, and the same in words after "must be"."""

    allows: Callable[[Any], bool]
    words: str


def _at_least(low: float) -> Rule:
    return Rule(lambda x: x >= low, f"at least {low}")


def _above(low: float) -> Rule:
    return Rule(lambda x: x > low, f"above {low}")


def _one_of(*choices: str) -> Rule:
    return Rule(lambda x: x in choices, f"one of {', '.join(choices)}")


_NOT_EMPTY = Rule(lambda x: x.strip() != "", "non-empty")
_COUNTS = Rule(
    lambda x: len(x) > 0 and all(n >= 1 for n in x),
    "one number for all blocks, or several that blocks take in turn, each at least 1",
)
_OFF_OR_STEP = Rule(lambda x: x == -1 or x >= 0, "-1 (off) or a step")
_SHARE = Rule(lambda x: 0 <= x <= 1, "between 0 and 1")
_AXIS = Rule(lambda x: x == -1 or x >= 1, "-1 (all devices that remain) or at least 1")

RULES: dict[str, Rule] = {
    "seed": Rule(lambda x: 0 <= x < 2**32, "between 0 and 4294967295"),
    "data.source.paths": Rule(
        lambda x: len(x) > 0 and all(path.strip() for path in x), "at least one file or pattern"
    ),
    "data.source.field": _NOT_EMPTY,
    "data.source.dataset": _NOT_EMPTY,
    "data.source.split": _NOT_EMPTY,
    "data.tokenizer.path": _NOT_EMPTY,
    "data.tokenizer.vocab_size": Rule(
        lambda x: x >= 257, "at least 257 (256 bytes and the beginning-of-document token)"
    ),
    "data.row_length": _at_least(1),
    "data.validation_share": Rule(lambda x: 0 <= x < 1, "at least 0 and below 1"),
    "data.validation_bytes": _at_least(0),
    "data.cache_folder": _NOT_EMPTY,
    "data.workers": _at_least(1),
    "data.prefetch_rows": _at_least(0),
    "model.d_model": _at_least(3),
    "model.num_blocks": _at_least(1),
    "model.loops": Rule(lambda x: 1 <= x <= MAX_LOOPS, f"between 1 and {MAX_LOOPS}"),
    "model.prelude_blocks": _at_least(0),
    "model.coda_blocks": _at_least(0),
    "model.vocab_multiple": _at_least(1),
    "model.compute_dtype": _one_of("float32", "bfloat16"),
    "model.remat": _one_of(*REMAT_POLICIES),
    "model.loss_chunk": _at_least(0),
    "model.connection.alpha_exponent": _at_least(0),
    "model.connection.alpha_warmup_steps": _at_least(0),
    "model.connection.gate_directions": _at_least(1),
    "model.connection.gate_init_scale": _at_least(0),
    "model.connection.beta_init": Rule(lambda x: 0 < x <= 100, "above 0 and at most 100"),
    "model.connection.encode_gain_init": _above(0),
    "model.connection.embedding_std": _above(0),
    "model.connection.head": _one_of("tied", "free"),
    "model.connection.norm": _one_of("rms", "layer"),
    "model.connection.router_weight": _one_of("plain", "unit"),
    "model.connection.norm_epsilon": _above(0),
    "model.attention.num_heads": _at_least(1),
    "model.attention.num_kv_heads": _at_least(1),
    "model.attention.head_dim": Rule(
        lambda x: x >= 2 and x % 2 == 0, "even and at least 2 (rotary positions turn pairs)"
    ),
    "model.attention.rope_theta": _above(0),
    "model.attention.rope_fraction": Rule(lambda x: 0 <= x <= 1, "between 0 and 1"),
    "model.attention.temperature_base": _above(0),
    "model.attention.temperature_sign": Rule(lambda x: x in (-1, 1), "-1 or 1"),
    "model.attention.query_chunk": _at_least(1),
    "model.connection.implementation": _one_of(
        "auto", "reference", "mosaic_tpu", "pallas_triton", "mosaic_gpu", "triton"
    ),
    "model.attention.implementation": _one_of("auto", "chunked", "splash"),
    "model.attention.mixing": _one_of("auto", "reference", "mosaic_tpu"),
    "model.attention.depthwise_kernel": _at_least(1),
    "model.attention.grouped_kernel": _at_least(1),
    "model.feedforward.hidden": _at_least(1),
    "model.feedforward.num_experts": _COUNTS,
    "model.feedforward.top_k": _COUNTS,
    "model.feedforward.shared_hidden": _at_least(0),
    "model.feedforward.balance_rate": _at_least(0),
    "model.feedforward.load_balance_loss": _at_least(0),
    "model.feedforward.router_z_loss": _at_least(0),
    "model.feedforward.router_width": _at_least(1),
    "model.feedforward.implementation": _one_of("auto", "blocked", "ragged_dot", "tokamax"),
    "model.feedforward.exchange": _one_of("auto", "gather", "ragged"),
    "model.skipping.rate": Rule(lambda x: 0 <= x < 1, "at least 0 and below 1"),
    "model.skipping.sublayers": _one_of("both", "attention", "feedforward"),
    "model.skipping.ramp_start": _SHARE,
    "model.skipping.ramp_end": _SHARE,
    "model.skipping.threshold_rate": Rule(lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "model.skipping.score": _one_of("gate", "rotation"),
    "model.skipping.keys_values": _one_of("all", "executed"),
    "model.initialisation.std": _above(0),
    "model.initialisation.alpha_qk": _above(0),
    "model.initialisation.alpha_vo": _above(0),
    "model.initialisation.alpha_up": _above(0),
    "model.initialisation.alpha_down": _above(0),
    "train.steps": _at_least(1),
    "train.batch_size": _at_least(1),
    "train.accumulation": _at_least(1),
    "train.log_every": _at_least(1),
    "train.nan_policy": _one_of("stop", "skip"),
    "train.profile_start": _OFF_OR_STEP,
    "train.profile_steps": _at_least(1),
    "train.peak_flops": _at_least(0),
    "evaluation.every": _at_least(1),
    "evaluation.batch_size": _at_least(1),
    "checkpoint.every": _at_least(1),
    "checkpoint.keep_last": _at_least(1),
    "checkpoint.keep_best": _at_least(0),
    "checkpoint.keep_steps": Rule(
        lambda x: all(step >= 1 for step in x), "steps of at least 1, such as (1,10,100)"
    ),
    "checkpoint.keep_log_spaced": _at_least(0),
    "mesh.data": _AXIS,
    "mesh.fsdp": _AXIS,
    "mesh.tensor": _AXIS,
    "mesh.expert": _AXIS,
}


# Sizes and steps are 32-bit integers on devices.
_LARGEST = 2**31 - 1
_LARGE = ("seed", "data.validation_bytes")


def validate(config: ConfigDict) -> None:
    """Refuses values and combinations that cannot work; compiles nothing, needs no device.

    Raises:
      UserError: names the keys and what is allowed.
    """
    leaves, validators = flatten(config), []
    for node in REGISTRY:
        kind = leaves[f"{node}.kind"]
        if not is_registered(node, kind):
            missing = [name for name in MEMBERS[node] if not _has(kind_class(node, kind), name)]
            if missing:
                raise UserError(
                    f"{node}.kind={kind!r}: the class lacks {', '.join(missing)}; "
                    "docs/architecture.md says what such a class needs"
                )
            for key in kind_defaults(node, kind):
                leaves.pop(key, None)
        if node.startswith("model."):
            validators.append(getattr(kind_class(node, kind), "validate", None))
    for key, value in leaves.items():
        if key in RULES and not RULES[key].allows(value):
            raise UserError(f"{key} is {value!r}; it must be {RULES[key].words}")
        if type(value) is int and value > _LARGEST and key not in _LARGE:
            raise UserError(f"{key} is {value}; it must be at most {_LARGEST}")

    heads, kv_heads = (leaves.get(f"model.attention.{n}", 1) for n in ("num_heads", "num_kv_heads"))
    if heads % kv_heads:
        raise UserError(
            f"model.attention.num_heads={heads} cannot be shared by "
            f"model.attention.num_kv_heads={kv_heads}: it must be a multiple "
            f"(num_kv_heads {_numbers(_divisors(heads))} would work)"
        )
    _validate_rotary_width(leaves)
    for name in ("depthwise_kernel", "grouped_kernel"):
        kernel = leaves.get(f"model.attention.{name}", 1)
        if kernel > config.data.row_length:
            raise UserError(
                f"model.attention.{name}={kernel} is longer than a row: it must be at most "
                f"data.row_length={config.data.row_length}"
            )
    outside = config.model.prelude_blocks + config.model.coda_blocks
    if outside >= config.model.num_blocks:
        raise UserError(
            f"model.prelude_blocks={config.model.prelude_blocks} and "
            f"model.coda_blocks={config.model.coda_blocks} leave none of "
            f"model.num_blocks={config.model.num_blocks} for the loop"
        )
    for own in filter(None, validators):
        own(config)
    stages_of(config.model)
    batch, accumulation = config.train.batch_size, config.train.accumulation
    if batch % accumulation:
        raise UserError(
            f"train.batch_size={batch} cannot be cut into train.accumulation={accumulation} equal "
            f"micro-batches (accumulation {_numbers(_divisors(batch))} would work)"
        )
    remaining = [key for key in leaves if key.startswith("mesh.") and leaves[key] == -1]
    if len(remaining) > 1:
        raise UserError(f"{' and '.join(remaining)} are -1: only one of them can take what remains")
    _validate_optimizer(config)


def validate_devices(config: ConfigDict, num_devices: int) -> None:
    """Refuses a mesh that is not made of `num_devices` devices, and what it cannot divide.

    Raises:
      UserError: names the keys and the numbers that would work.
    """
    from nag_jax.sharding.mesh import mesh_shape
    from nag_jax.sharding.rules import BATCH_AXES, MESH_AXES

    mesh = dict(zip(MESH_AXES, mesh_shape(config.mesh, num_devices), strict=True))
    shards = math.prod(mesh[axis] for axis in BATCH_AXES)
    batch, accumulation = config.train.batch_size, config.train.accumulation
    sharers = f"{shards} devices" + (" or groups of them" if mesh["tensor"] > 1 else "")
    if (batch // accumulation) % shards:
        multiple = shards * accumulation
        raise UserError(
            f"train.batch_size={batch} in train.accumulation={accumulation} micro-batches gives "
            f"{batch // accumulation} rows, which {sharers} cannot share equally: "
            f"train.batch_size must be a multiple of {multiple} (such as "
            f"{_numbers(_near_multiples(batch, multiple))})"
        )
    if config.evaluation.batch_size % shards:
        raise UserError(
            f"evaluation.batch_size={config.evaluation.batch_size} rows cannot be shared equally "
            f"by {sharers}: it must be a multiple of {shards} (such as "
            f"{_numbers(_near_multiples(config.evaluation.batch_size, shards))})"
        )
    _refuse_undivided("model.d_model", config.model.d_model, "fsdp", mesh["fsdp"])
    _validate_tensor(config, mesh["tensor"])
    if is_registered("model.feedforward", config.model.feedforward.kind):
        for count in config.model.feedforward.get("num_experts", ()):
            _refuse_undivided("model.feedforward.num_experts", count, "expert", mesh["expert"])


def _validate_tensor(config: ConfigDict, length: int) -> None:
    """Heads, hidden units and the table are split over the tensor axis, as far as kinds are ours.

    Raises:
      UserError: one of them cannot be.
    """
    model = config.model
    _refuse_undivided("model.vocab_multiple", model.vocab_multiple, "tensor", length)
    if is_registered("model.feedforward", model.feedforward.kind):
        for name in ("hidden", "shared_hidden"):
            width = model.feedforward.get(name, 0)
            _refuse_undivided(f"model.feedforward.{name}", width, "tensor", length)
    if is_registered("model.attention", model.attention.kind):
        heads, kv_heads = model.attention.num_heads, model.attention.num_kv_heads
        _refuse_undivided("model.attention.num_heads", heads, "tensor", length)
        if kv_heads % length and length % kv_heads:
            allowed = [n for n in _divisors(heads) if n % length == 0 or length % n == 0]
            raise UserError(
                f"model.attention.num_kv_heads={kv_heads} cannot be split over mesh.tensor="
                f"{length}, nor that over them: one must be a multiple of the other "
                f"(num_kv_heads {_numbers(allowed)} would work)"
            )


def _refuse_undivided(key: str, value: int, axis: str, length: int) -> None:
    """Raises a UserError unless `length`, the mesh axis's, divides the key's value."""
    if value % length:
        raise UserError(
            f"{key}={value} cannot be split over mesh.{axis}={length}: it must be a multiple (such "
            f"as {_numbers(_near_multiples(value, length))}), or mesh.{axis} a divisor "
            f"({_numbers(_divisors(value))})"
        )


def _validate_rotary_width(leaves: dict[str, Any]) -> None:
    """Rotary positions turn pairs."""
    head_dim = leaves.get("model.attention.head_dim", 2)
    fraction = leaves.get("model.attention.rope_fraction", 1.0)
    width = head_dim * fraction
    if not math.isclose(width, 2 * round(width / 2), abs_tol=1e-6):
        raise UserError(
            f"model.attention.rope_fraction={fraction} of model.attention.head_dim={head_dim} is "
            f"{width:g}, but rotary positions turn an even number of features"
        )


def _validate_optimizer(config: ConfigDict) -> None:
    """Builds the optimizer for no parameters: it and its schedule check their own keys."""
    from nag_jax.optim.build import build_optimizer

    build_optimizer(config.optimizer, config.train.steps, {})
    kind_class("optimizer", config.optimizer.kind).direction(config.optimizer, {})


def _has(cls: type, name: str) -> bool:
    """Whether instances have the member; every class itself can be called."""
    return any(name in vars(base) for base in cls.__mro__)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, min(number, 4096) + 1) if number % n == 0]


def _near_multiples(number: int, step: int) -> list[int]:
    below = number // step * step
    return [n for n in (below, below + step) if n > 0]


def _numbers(numbers: list[int]) -> str:
    """Numbers in words, such as "1, 2 or 4"; leaves out the middle of a long list."""
    if len(numbers) > 8:
        numbers = numbers[:4] + numbers[-4:]
    texts = [str(n) for n in numbers]
    return " or ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
