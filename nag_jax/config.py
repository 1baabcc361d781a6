"""The config tree: shared defaults, the kinds' own defaults, overrides, and JSON.

A config holds the shared leaves below and those of the chosen kinds, nothing else. Typed values are
in `values.py`, the kinds in `kinds.py`, forbidden combinations in `validation.py`.
"""

from __future__ import annotations

import difflib
import json
import os
import sysconfig
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from nag_jax.config_files import load_config_file, parse_arg
from nag_jax.dotted import flatten, nest
from nag_jax.errors import UserError
from nag_jax.kinds import RATE_MULTIPLIER, REGISTRY, kind_class, kind_defaults
from nag_jax.validation import RULES, validate, validate_devices
from nag_jax.values import Leaf, convert, describe_type, parse

__all__ = [
    "diff",
    "from_json",
    "help_text",
    "kind_class",
    "load_config_file",
    "parse_arg",
    "read_json",
    "resolve",
    "shared_defaults",
    "smoke",
    "to_json",
    "validate",
    "validate_devices",
    "with_absolute_paths",
]


def shared_defaults() -> dict[str, Any]:
    """The leaves that every config has, with the kinds chosen by default."""
    return {
        "seed": 0,
        "data": {
            "source": {"kind": "python_stdlib"},
            "tokenizer": {"kind": "bytes"},
            "row_length": 512,  # T; a stored row holds T + 1 tokens
            "validation_share": 0.05,  # of the documents, by hash of their names
            "validation_bytes": 500_000,  # whole documents until reached; 0: no limit
            "cache_folder": "~/.cache/nag_jax",
            "workers": 1,  # processes that tokenise
            "prefetch_rows": 256,  # 0: off
        },
        "model": {
            "d_model": 256,
            "num_blocks": 6,
            # A loop runs the blocks between the first and the last few several times.
            "loops": 1,
            "prelude_blocks": 0,
            "coda_blocks": 0,
            "vocab_multiple": 128,  # the table is padded to a multiple of this
            "compute_dtype": "float32",
            "strict_kernels": False,  # refuse a run of which a part has no fused kernel
            "remat": "dots_with_no_batch_dims_saveable",
            "loss_chunk": 2048,  # most ids that a device's loss takes at a time; 0: all
            "connection": {"kind": "nag"},
            "attention": {"kind": "gqa"},
            "feedforward": {"kind": "swiglu"},
            "initialisation": {"kind": "fan_in"},
            "skipping": {"kind": "none"},
        },
        "optimizer": {
            "kind": "muon",
            "learning_rate": 3e-3,
            "weight_decay": 0.1,  # of matrices
            "embedding_decay": 0.0,
            "clip_norm": 1.0,  # 0: off
            "adam_b1": 0.9,
            "adam_b2": 0.95,
            "adam_eps": 1e-8,
            # Of the schedule's rate, which is the matrices'; kinds bring those of other roles.
            "rate_multiplier": {"embedding": 1.0, "scale": 1.0},
            "schedule": {"kind": "cosine"},
        },
        "train": {
            "steps": 300,
            "batch_size": 16,  # rows over all devices and micro-batches
            "accumulation": 1,  # micro-batches per step
            "log_every": 10,
            "nan_policy": "stop",
            "taps": True,
            "optimizer_diagnostics": False,  # orthogonality of weights and the like, each step
            "profile_start": -1,  # -1: no profile
            "profile_steps": 5,
            "peak_flops": 0.0,  # per device, in FLOP/s; 0: measure a matmul
        },
        "evaluation": {"every": 100, "batch_size": 16},
        "checkpoint": {
            "every": 100,
            "keep_last": 2,
            "keep_best": 1,
            "keep_steps": (),
            "keep_log_spaced": 0,  # checkpoints kept per doubling of the step; 0: none
        },
        # -1: all devices that remain
        "mesh": {"data": -1, "fsdp": 1, "tensor": 1, "expert": 1},
        "metrics": {"tensorboard": True, "wandb_project": ""},
    }


# Leaves that name files or folders.
PATH_KEYS = ("data.source.paths", "data.tokenizer.path", "data.cache_folder")

# What `smoke` sets where the config has the leaf: any model, in seconds on a laptop.
SMOKE: dict[str, Leaf] = {
    "data.row_length": 64,
    "data.validation_bytes": 20_000,
    "data.prefetch_rows": 16,
    "data.tokenizer.vocab_size": 512,
    "model.d_model": 32,
    "model.num_blocks": 2,
    "model.loss_chunk": 256,
    "model.connection.alpha_warmup_steps": 2,
    "model.connection.gate_directions": 8,
    "model.attention.num_heads": 2,
    "model.attention.num_kv_heads": 1,
    "model.attention.head_dim": 16,
    "model.attention.query_chunk": 32,
    "model.feedforward.hidden": 64,
    "model.feedforward.router_width": 16,
    "optimizer.schedule.warmup_steps": 2,
    "optimizer.schedule.decay_steps": 2,
    "train.steps": 6,
    "train.batch_size": 8,
    "train.log_every": 1,
    "evaluation.every": 3,
    "evaluation.batch_size": 8,
    "checkpoint.every": 3,
}


def resolve(
    overrides: Mapping[str, Any] | ConfigDict, command_line: Sequence[str] = ()
) -> ConfigDict:
    """The complete config: shared defaults, the chosen kinds' defaults, then the overrides.

    Kinds are decided first (the command line over the config file), so that each chosen kind's own
    defaults are there before other leaves are set. Where the command line replaces a kind that the
    config file chose, the file's leaves of the replaced kind are dropped.

    Args:
      overrides: what a config file returned: only what differs; nested, or by dotted path.
      command_line: "key=value" strings, such as "model.d_model=128"; later ones win.

    Returns:
      A locked ConfigDict with every leaf of the tree.

    Raises:
      UserError: an unknown key, a wrong type, a kind that does not exist, or a leaf of a kind that
        is not chosen; one sentence naming it.
    """
    given = flatten(overrides)
    texts = dict(_split_assignment(item) for item in command_line)
    shared = flatten(shared_defaults())

    file_kinds, kinds = {}, {}
    for node in REGISTRY:
        key = f"{node}.kind"
        file_kinds[node] = convert(key, given.get(key, shared[key]), "")
        kinds[node] = texts.get(key, file_kinds[node])
        shared[key] = kinds[node]
    leaves = shared | _leaves_of_kinds(kinds, shared)

    replaced = {node: file_kinds[node] for node in REGISTRY if kinds[node] != file_kinds[node]}
    dropped = _leaves_of_kinds(
        {n: k for n, k in replaced.items() if any(_may_be_of(key, n) for key in given)}, shared
    )
    for key, value in given.items():
        if key in dropped:
            continue
        _check_key(key, value, leaves, kinds)
        if key in leaves:
            leaves[key] = convert(key, value, leaves[key])
    for key, text in texts.items():
        _check_key(key, text, leaves, kinds)
        leaves[key] = parse(key, text, leaves[key])
    config = ConfigDict(nest(leaves))
    config.lock()
    return config


def to_json(config: ConfigDict) -> str:
    """The complete config as JSON text; tuples become lists and `from_json` brings them back."""
    return json.dumps(config.to_dict(), indent=2) + "\n"


def from_json(text: str, allow_user_kinds: bool = False) -> ConfigDict:
    """The config that `to_json` wrote; warns of keys that the text lacks and that take defaults.

    Args:
      text: JSON.
      allow_user_kinds: whether a "package.module:Class" kind may be imported, which runs its code.

    Raises:
      UserError: no JSON object, an unknown key, a wrong type, or a user's class without permission.
    """
    config, missing = read_json(text, allow_user_kinds)
    if missing:
        warnings.warn(
            f"the stored config lacks {', '.join(missing)}: defaults are used", stacklevel=2
        )
    return config


def read_json(text: str, allow_user_kinds: bool = False) -> tuple[ConfigDict, list[str]]:
    """As `from_json`, but returns (config, keys that the text lacks) instead of warning."""
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise UserError(f"the stored config is no JSON: {error}") from error
    if not isinstance(tree, dict):
        raise UserError("the stored config must be a JSON object of config keys")
    given = flatten(tree)
    for node in REGISTRY:
        kind = given.get(f"{node}.kind")
        if not allow_user_kinds and isinstance(kind, str) and ":" in kind:
            raise UserError(
                f"the stored config names the class {kind!r} as {node}.kind; importing it runs its "
                "code, so it is loaded only with allow_user_kinds=True"
            )
    config = resolve(given)
    return config, [key for key in flatten(config) if key not in given]


def diff(a: ConfigDict, b: ConfigDict) -> list[str]:
    """The leaves in which two configs differ, one line each: "model.d_model: 256 -> 128"."""
    old, new = flatten(a), flatten(b)

    def show(leaves: dict[str, Leaf], key: str) -> str:
        return repr(leaves[key]) if key in leaves else "(absent)"

    return [
        f"{key}: {show(old, key)} -> {show(new, key)}"
        for key in old | new
        if show(old, key) != show(new, key)
    ]


def smoke(overrides: Mapping[str, Any] | ConfigDict) -> ConfigDict:
    """Shrinks what a config file returns until it trains in seconds.

    The kinds stay, but where the corpus is Python's whole standard library it becomes two packages
    of it, well under a megabyte.
    """
    small = flatten(overrides)
    leaves = flatten(resolve(small))
    if leaves["data.source.kind"] == "python_stdlib":
        small["data.source.kind"] = "text"
        library = sysconfig.get_paths()["stdlib"]
        small["data.source.paths"] = (f"{library}/asyncio/*.py", f"{library}/email/*.py")
        small["data.validation_share"] = 0.2
    small |= {key: value for key, value in SMOKE.items() if key in leaves}
    return ConfigDict(nest(small))


def help_text(config: ConfigDict) -> str:
    """Every leaf with its value, as the command line takes it."""
    lines = []
    for key, value in flatten(config).items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        node = key.removesuffix(".kind")
        if node in REGISTRY and key != node:
            allowed = " | ".join(REGISTRY[node])
        elif key in RULES:
            allowed = f"{describe_type(key, value)}, {RULES[key].words}"
        else:
            allowed = describe_type(key, value)
        lines.append(f"  --config.{key}={text or repr(text)}   ({allowed})")
    return "\n".join(lines)


def _split_assignment(item: str) -> tuple[str, str]:
    key, equals, text = item.partition("=")
    if not equals:
        raise UserError(f"{item!r} must have the form key=value")
    return key, text


def with_absolute_paths(config: ConfigDict) -> ConfigDict:
    """The config with its files named absolutely, so that it holds from any working folder."""

    def absolute(path: str) -> str:
        return path if "://" in path else os.path.abspath(os.path.expanduser(path))

    leaves = flatten(config)
    for key in PATH_KEYS:
        value = leaves.get(key)
        if value and isinstance(value, tuple):
            leaves[key] = tuple(absolute(path) if path else path for path in value)
        elif value:
            leaves[key] = absolute(value)
    config = ConfigDict(nest(leaves))
    config.lock()
    return config


def _leaves_of_kinds(kinds: Mapping[str, str], shared: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """The kinds' own leaves; a kind's key must not be a shared one."""
    leaves: dict[str, Leaf] = {}
    for node, kind in kinds.items():
        for key, value in kind_defaults(node, kind).items():
            if any(f"{key}.".startswith(f"{k}.") or f"{k}.".startswith(f"{key}.") for k in shared):
                raise UserError(f"{node}.kind={kind!r}: its key {key} is a shared one")
            leaves[key] = value
    return leaves


def _may_be_of(key: str, node: str) -> bool:
    """Whether a kind of the node may bring this key."""
    return key.startswith((f"{node}.", f"{RATE_MULTIPLIER}."))


def _check_key(key: str, value: Any, leaves: Mapping[str, Leaf], kinds: Mapping[str, str]) -> None:
    """Raises a UserError unless `key` is a leaf (or a group given as an empty dict)."""
    if key in leaves:
        return
    if any(leaf.startswith(f"{key}.") for leaf in leaves):
        if isinstance(value, Mapping):
            return
        hint = f"to choose its kind set {key}.kind" if key in kinds else f"set {key}.<key>"
        raise UserError(f"{key} is a group of keys, not a value: {hint}")
    for node in sorted(kinds, key=len, reverse=True):
        if not _may_be_of(key, node):
            continue
        owners = [
            kind
            for kind in REGISTRY[node]
            if kind != kinds[node] and key in kind_defaults(node, kind)
        ]
        if owners:
            own = [leaf.removeprefix(f"{node}.") for leaf in kind_defaults(node, kinds[node])]
            raise UserError(
                f"{key} belongs to {node.rpartition('.')[2]} kind {' and '.join(owners)}; the "
                f"chosen kind is {kinds[node]}, which takes {', '.join(own) or 'no keys'}"
            )
    raise UserError(f"there is no config key {key or repr(key)}; {_suggest(key, leaves)}")


def _suggest(key: str, leaves: Mapping[str, Leaf]) -> str:
    """What the user may have meant by a key that does not exist."""
    name = key.rpartition(".")[2]
    close = [leaf for leaf in leaves if leaf.rpartition(".")[2] == name]
    close += difflib.get_close_matches(key, leaves, n=3, cutoff=0.75)
    if close:
        return f"did you mean {' or '.join(dict.fromkeys(close))}?"
    group, names = key, {}
    while not names:  # the top level has some
        group = group.rpartition(".")[0]
        prefix = f"{group}." if group else ""
        names = dict.fromkeys(
            leaf.removeprefix(prefix).split(".")[0] for leaf in leaves if leaf.startswith(prefix)
        )
    where = group or "the config"
    return f"{where} takes {', '.join(names)}"
