"""Tiny models, batches and parameters for tests, also of scripts that tests start."""

import contextlib
import math
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from nag_jax.config import resolve
from nag_jax.dotted import flatten
from nag_jax.models.transformer import LanguageModel, build_model
from nag_jax.parameters import ParamInfo

SMALL = {
    "model.d_model": 16,
    "model.num_blocks": 2,
    "model.vocab_multiple": 8,
    "model.loss_chunk": 5,
    "model.connection.gate_directions": 3,
    "model.connection.alpha_warmup_steps": 4,
    "model.attention.num_heads": 4,
    "model.attention.num_kv_heads": 2,
    "model.attention.head_dim": 6,
    "model.attention.query_chunk": 4,
    "model.feedforward.hidden": 20,
}
VOCAB = 13


@contextlib.contextmanager
def quick_compilation():
    """Compiles without most optimisations: half the time where a test is about values alone."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def small_config(overrides: dict[str, Any] | None = None, **keys: Any) -> ConfigDict:
    """A complete config of a tiny model; leaves of kinds that are not chosen are left out.

    Args:
        overrides: Values by dotted path.
        **keys: The same with "__" for the dot below `model`, such as connection__kind="prenorm".
    """
    given = dict(overrides or {})
    given |= {f"model.{key.replace('__', '.')}": value for key, value in keys.items()}
    kinds = {key: value for key, value in given.items() if key.endswith(".kind")}
    known = flatten(resolve(kinds))
    return resolve({key: value for key, value in SMALL.items() if key in known} | given)


def small_model(
    overrides: dict[str, Any] | None = None, vocab_size: int = VOCAB, **keys: Any
) -> LanguageModel:
    """The model of `small_config`."""
    return build_model(small_config(overrides, **keys), vocab_size)


def random_params(model: LanguageModel, seed: int = 0) -> dict[str, Any]:
    """Random parameters of sensible sizes, no leaf at 0 or 1, without compiling `init`.

    Rows of a centred table are centred; rows that pad the vocabulary are not zero.
    """
    rng = np.random.default_rng(seed)

    def draw(info: ParamInfo) -> np.ndarray:
        values = rng.normal(size=info.shape)
        if info.role == "matrix":
            values /= math.sqrt(math.prod(info.shape[axis] for axis in info.rows))
        elif info.role == "head" or (info.role == "gate" and "embed" in info.axes):
            values /= math.sqrt(info.shape[info.axes.index("embed")])
        elif info.role in ("gate", "scale"):
            values = 0.8 + 0.2 * values
        if info.centred:
            values -= values.mean(axis=-1, keepdims=True)
        return values.astype(np.float32)

    return jax.tree.map(draw, model.infos)


def as_float64(params: dict[str, Any]) -> dict[str, Any]:
    """The same parameters as NumPy float64."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def packed_batch(
    rows: list[list[int]], length: int, vocab_size: int = VOCAB, seed: int = 0
) -> dict[str, np.ndarray]:
    """Rows of `length` + 1 tokens holding documents of the given lengths, then padding."""
    rng = np.random.default_rng(seed)
    shape = (len(rows), length + 1)
    segment_ids = np.zeros(shape, np.int32)
    for row, documents in zip(segment_ids, rows, strict=True):
        assert sum(documents) <= length + 1
        row[: sum(documents)] = np.repeat(1 + np.arange(len(documents)), documents)
    valid = segment_ids > 0
    tokens = np.where(valid, rng.integers(0, vocab_size, shape), 0).astype(np.int32)
    return {"tokens": tokens, "segment_ids": segment_ids, "valid": valid}
