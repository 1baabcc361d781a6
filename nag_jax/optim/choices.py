"""The kinds of optimizers that `optimizer.kind` chooses from: what becomes of matrices.

Keys of a kind are arguments of its transform and are explained there.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import optax

from nag_jax.errors import UserError
from nag_jax.optim.kl_shampoo import scale_by_kl_shampoo
from nag_jax.optim.muon import COEFFICIENTS, SCALINGS, scale_by_muon
from nag_jax.optim.roles import MatrixAxes
from nag_jax.optim.shampoo import GRAFTINGS, scale_by_shampoo
from nag_jax.optim.soap import scale_by_soap
from nag_jax.optim.steepest import scale_by_sign, scale_by_spectral

_SHARE = (lambda x: 0 <= x < 1, "at least 0 and below 1")
_POSITIVE = (lambda x: x > 0, "above 0")
_COUNT = (lambda x: x >= 1, "at least 1")


def _one_of(names):
    return (lambda x: x in names, " or ".join(names))


# What is allowed for a key of a kind.
_RULES = {
    "momentum": _SHARE,
    "b1": _SHARE,
    "b2": _SHARE,
    "eps": _POSITIVE,
    "graft_eps": _POSITIVE,
    "exponent": _POSITIVE,
    "initial_scale": _POSITIVE,
    "clamp_floor": _POSITIVE,
    "clamp_ceiling": _POSITIVE,
    "shampoo_beta": _SHARE,
    "refresh_every": _COUNT,
    "newton_schulz_steps": _COUNT,
    "max_side": _COUNT,
    "block_size": (lambda x: x >= 0, "at least 1, or 0 for whole matrices"),
    "scaling": _one_of(SCALINGS),
    "coefficients": _one_of(COEFFICIENTS),
    "newton_schulz_dtype": _one_of(("float32", "bfloat16")),
    "grafting": _one_of(GRAFTINGS),
}


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
        return adam(config)


class _TransformKind:
    """A kind whose keys are arguments of a transform of matrices.

    `split_heads`, whether each head of attention is a matrix of its own, is `build_optimizer`'s.
    """

    transform: ClassVar[Callable[..., optax.GradientTransformation]]
    keys: ClassVar[dict[str, Any]]
    rules: ClassVar[dict[str, Any]] = {}
    by_matrix: ClassVar[bool] = True

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Returns the keys of this kind."""
        return cls.keys | ({"split_heads": False} if cls.by_matrix else {})

    @classmethod
    def direction(
        cls, config: Mapping[str, Any], matrices: Mapping[str, MatrixAxes]
    ) -> optax.GradientTransformation:
        """Returns the direction of matrices.

        Args:
          config: the optimizer's config.
          matrices: {path: axes} of the parameters the transform will see.

        Raises:
          UserError: a value that is not allowed, by its key.
        """
        rules = _RULES | cls.rules
        for key in cls.keys:
            if key in rules:
                check(config, key, *rules[key])
        return cls.transform(**{key: config[key] for key in cls.keys}, matrices=matrices)


class MuonKind(_TransformKind):
    """Muon for matrices (see `nag_jax.optim.muon.scale_by_muon`)."""

    # The chain is float32, or float64 where parameters are, and so is the momentum.
    transform = staticmethod(partial(scale_by_muon, momentum_dtype=None))
    keys: ClassVar = {
        "momentum": 0.95,
        "nesterov": True,
        "newton_schulz_steps": 5,
        "scaling": "moonshot",
        "coefficients": "classic",
        "newton_schulz_dtype": "float32",
    }


class SoapKind(_TransformKind):
    """SOAP for matrices (see `nag_jax.optim.soap.scale_by_soap`)."""

    transform = staticmethod(scale_by_soap)
    keys: ClassVar = {
        "b1": 0.95,
        "b2": 0.95,
        "shampoo_beta": 0.95,
        "eps": 1e-8,
        "refresh_every": 10,
        "stagger": False,
        "block_size": 0,
        "max_side": 10_000,
    }


class ShampooKind(_TransformKind):
    """Shampoo for matrices (see `nag_jax.optim.shampoo.scale_by_shampoo`)."""

    transform = staticmethod(scale_by_shampoo)
    rules: ClassVar = {"b2": (lambda x: 0 <= x <= 1, "from 0 to 1; 1 for plain sums")}
    keys: ClassVar = {
        "b1": 0.9,
        "b2": 0.999,
        "eps": 1e-12,
        "exponent": 0.25,
        "trace_scaling": False,
        "grafting": "adam",
        "graft_eps": 1e-8,
        "refresh_every": 10,
        "stagger": False,
        "block_size": 1024,
        "max_side": 10_000,
    }


class KLShampooKind(_TransformKind):
    """KL-Shampoo for matrices (see `nag_jax.optim.kl_shampoo.scale_by_kl_shampoo`)."""

    transform = staticmethod(scale_by_kl_shampoo)
    keys: ClassVar = {
        "b1": 0.9,
        "b2": 0.98,
        "eps": 1e-8,
        "refresh_every": 10,
        "initial_scale": 0.1,
        "clamp_floor": 4000.0,
        "clamp_ceiling": 4000.0,
        "stagger": False,
        "block_size": 0,
        "max_side": 10_000,
    }


class SignKind(_TransformKind):
    """Sign descent for matrices (see `nag_jax.optim.steepest.scale_by_sign`)."""

    transform = staticmethod(lambda momentum, matrices: scale_by_sign(momentum))
    keys: ClassVar = {"momentum": 0.0}
    by_matrix: ClassVar = False


class SpectralKind(_TransformKind):
    """Spectral descent for matrices (see `nag_jax.optim.steepest.scale_by_spectral`)."""

    transform = staticmethod(scale_by_spectral)
    keys: ClassVar = {"momentum": 0.0, "newton_schulz_steps": 0}
    rules: ClassVar = {"newton_schulz_steps": (lambda x: x >= 0, "at least 1, or 0 for exactness")}


def adam(config: Mapping[str, Any]) -> optax.GradientTransformation:
    """Returns Adam's direction with the shared keys `adam_...`."""
    return optax.scale_by_adam(config["adam_b1"], config["adam_b2"], config["adam_eps"])


def check(config: Mapping[str, Any], key: str, allowed: Callable[[Any], bool], words: str) -> None:
    """Raises `UserError` with the key and what is allowed unless the value is."""
    if not allowed(config[key]):
        raise UserError(f"optimizer.{key} is {config[key]!r}; it must be {words}")
