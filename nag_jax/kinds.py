"""Kinds: the parts a config chooses by name, or by "package.module:Class" for a user's own class.

Each kind's class gives the typed defaults of its own config leaves through a static method
`defaults()`. Classes are imported when a config first names them, so a run loads only what it uses.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Mapping

from ml_collections import ConfigDict

from nag_jax.dotted import flatten
from nag_jax.errors import UserError
from nag_jax.values import Leaf, check_default

REGISTRY: dict[str, dict[str, str]] = {
    "model.connection": {
        "prenorm": "nag_jax.models.connections:PreNorm",
        "nag": "nag_jax.models.connections:NormAgnostic",
        "residual_free": "nag_jax.models.connections:ResidualFree",
        "gated_prenorm": "nag_jax.models.connections:GatedPreNorm",
    },
    "model.attention": {
        "gqa": "nag_jax.models.attention:GroupedQueryAttention",
        "ccgqa": "nag_jax.models.ccgqa:CompressedConvolutionalAttention",
    },
    "model.feedforward": {
        "mlp": "nag_jax.models.feedforward:MLP",
        "swiglu": "nag_jax.models.feedforward:SwiGLU",
        "moe": "nag_jax.models.moe:MixtureOfExperts",
        "moe_zaya": "nag_jax.models.moe:ZayaMixture",
    },
    "model.initialisation": {
        "fan_in": "nag_jax.models.initialisation:FanIn",
        "gaussian": "nag_jax.models.initialisation:Gaussian",
        "xavier": "nag_jax.models.initialisation:Xavier",
        "kaiming": "nag_jax.models.initialisation:Kaiming",
        "orthogonal": "nag_jax.models.initialisation:Orthogonal",
    },
    "model.skipping": {
        "none": "nag_jax.models.skipping:NoSkipping",
        "threshold": "nag_jax.models.skipping:ThresholdSkipping",
    },
    "optimizer": {
        "adamw": "nag_jax.optim.choices:AdamWKind",
        "muon": "nag_jax.optim.choices:MuonKind",
        "soap": "nag_jax.optim.choices:SoapKind",
        "shampoo": "nag_jax.optim.choices:ShampooKind",
        "kl_shampoo": "nag_jax.optim.choices:KLShampooKind",
        "sign": "nag_jax.optim.choices:SignKind",
        "spectral": "nag_jax.optim.choices:SpectralKind",
    },
    "optimizer.schedule": {
        "cosine": "nag_jax.optim.schedules:Cosine",
        "warmup_stable_decay": "nag_jax.optim.schedules:WarmupStableDecay",
        "constant": "nag_jax.optim.schedules:Constant",
    },
    "data.source": {
        "python_stdlib": "nag_jax.data.sources:PythonStandardLibrary",
        "text": "nag_jax.data.sources:TextFiles",
        "jsonl": "nag_jax.data.sources:JsonLines",
        "parquet": "nag_jax.data.sources:Parquet",
        "huggingface": "nag_jax.data.sources:HuggingFace",
    },
    "data.tokenizer": {
        "bytes": "nag_jax.data.tokenizers:ByteTokenizer",
        "bpe": "nag_jax.data.tokenizers:BpeTokenizer",
        "tokenizers_json": "nag_jax.data.tokenizers:TokenizersJson",
        "sentencepiece": "nag_jax.data.tokenizers:SentencePieceTokenizer",
        "tiktoken": "nag_jax.data.tokenizers:TiktokenTokenizer",
    },
}

RATE_MULTIPLIER = "optimizer.rate_multiplier"

# What a class of a user's own must have besides `defaults()`; docs/architecture.md says more.
MEMBERS: dict[str, tuple[str, ...]] = {
    "model.connection": ("Ends", "warmup_steps", "read", "gate", "write", "describe"),
    "model.attention": ("__call__", "context_flops"),
    "model.feedforward": ("__call__",),
    "model.initialisation": ("attention", "up", "down", "key_gain"),
    "model.skipping": ("sublayers", "only_executed_keys", "score", "decide", "update"),
    "optimizer": ("direction",),
    "optimizer.schedule": ("build",),
    "data.source": ("documents", "listing"),
    "data.tokenizer": ("from_config", "from_files", "to_files", "encode", "trained"),
}

_USER_KIND = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_registered(node: str, kind: str) -> bool:
    """Whether `kind` is one of the names that `node` knows, not a user's class."""
    return kind in REGISTRY[node]


def kind_class(node: str, kind: str) -> type:
    """The class that a config node's kind names, imported now.

    Args:
      node: the node's path in the config, such as "model.connection".
      kind: a registered name or "package.module:Class".

    Raises:
      UserError: no such name, module, class, or a class without `defaults()`; names the key.
    """
    key = f"{node}.kind"
    if is_registered(node, kind):
        module_name, class_name = REGISTRY[node][kind].split(":")
        return getattr(importlib.import_module(module_name), class_name)
    if not _USER_KIND.fullmatch(kind):
        close = difflib.get_close_matches(kind, REGISTRY[node], n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UserError(
            f"{key}={kind!r} is not known{hint}; it takes {', '.join(sorted(REGISTRY[node]))}, or "
            '"package.module:Class" for a class of your own'
        )
    module_name, class_name = kind.split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{key}={kind!r}: there is no module {error.name} "
                "(its folder must be on PYTHONPATH or be the current one)"
            ) from error
        raise UserError(f"{key}={kind!r}: importing {module_name} failed: {error}") from error
    except Exception as error:
        raise UserError(
            f"{key}={kind!r}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        raise UserError(f"{key}={kind!r}: module {module_name} has no class {class_name}")
    if not callable(getattr(cls, "defaults", None)):
        raise UserError(
            f"{key}={kind!r}: the class needs a static method defaults() that returns a dict of "
            "its config keys and their typed defaults ({} for none)"
        )
    return cls


def kind_defaults(node: str, kind: str) -> dict[str, Leaf]:
    """The leaves that a kind brings, by their full path, such as "model.connection.head".

    They are its `defaults()` and, where it has `rate_multipliers()`, one leaf below
    `optimizer.rate_multiplier` for each role of parameters that it says it has.

    Raises:
      UserError: the kind cannot be imported, or its defaults are not typed leaves.
    """
    cls = kind_class(node, kind)
    leaves = {}
    for prefix, method in ((node, "defaults"), (RATE_MULTIPLIER, "rate_multipliers")):
        try:
            values = getattr(cls, method, dict)()
        except Exception as error:
            raise UserError(
                f"{node}.kind={kind!r}: its {method}() failed: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(values, Mapping):
            raise UserError(f"{node}.kind={kind!r}: its {method}() must return a dict")
        for key, value in flatten(values, f"{prefix}.").items():
            for name in key.removeprefix(f"{prefix}.").split("."):
                if not name.isidentifier() or name == "kind" or hasattr(ConfigDict, name):
                    raise UserError(f"{node}.kind={kind!r}: {name!r} cannot be the name of a key")
            if method == "rate_multipliers" and type(value) is not float:
                raise UserError(f"{node}.kind={kind!r}: its {key} must be a float, not {value!r}")
            check_default(key, value)
            leaves[key] = value
    return leaves
