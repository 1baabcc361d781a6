"""Feed-forward branches: a GELU MLP and SwiGLU, neither with biases."""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float
from ml_collections import ConfigDict

from nag_jax.models.context import BranchOut, Context
from nag_jax.models.kept_rows import Weights, on_kept_rows
from nag_jax.models.linear import Numerics, contract
from nag_jax.parameters import declare


def _up_projection(values: Array) -> nnx.Param:
    return declare(values, ("embed", "hidden"), "matrix", rows=("embed",), columns=("hidden",))


def _down_projection(values: Array) -> nnx.Param:
    return declare(values, ("hidden", "embed"), "matrix", rows=("hidden",), columns=("embed",))


class MLP(nnx.Module):
    """W_down gelu(W_up x), GELU in its tanh form."""

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Keys of `model.feedforward` for this kind."""
        return {"hidden": 1024}

    def __init__(
        self,
        options: ConfigDict,
        d_model: int,
        initialisation: Any,
        numerics: Numerics,
        rngs: nnx.Rngs,
    ):
        self.up = _up_projection(initialisation.up(rngs, d_model, options.hidden))
        self.down = _down_projection(initialisation.down(rngs, options.hidden, d_model))
        self.numerics = numerics

    def __call__(
        self, x: Float[Array, "B T d"], keep: Bool[Array, "B T"] | None, context: Context
    ) -> BranchOut:
        """Applies the layer to every token, or to those to keep."""
        weights = {"up": self.up, "down": self.down}
        return BranchOut(on_kept_rows(self._rows, weights, x, keep, ("embed",), ("embed",)))

    def _rows(self, w: Weights, x: Array) -> Array:
        up = contract("feedforward/up", x, w["up"], self.numerics)
        return contract("feedforward/down", jax.nn.gelu(up), w["down"], self.numerics)


class SwiGLU(nnx.Module):
    """W_down (silu(W_gate x) * W_up x)."""

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Keys of `model.feedforward` for this kind."""
        return {"hidden": 688}

    def __init__(
        self,
        options: ConfigDict,
        d_model: int,
        initialisation: Any,
        numerics: Numerics,
        rngs: nnx.Rngs,
    ):
        self.gate = _up_projection(initialisation.up(rngs, d_model, options.hidden))
        self.up = _up_projection(initialisation.up(rngs, d_model, options.hidden))
        self.down = _down_projection(initialisation.down(rngs, options.hidden, d_model))
        self.numerics = numerics

    def __call__(
        self, x: Float[Array, "B T d"], keep: Bool[Array, "B T"] | None, context: Context
    ) -> BranchOut:
        """Applies the layer to every token, or to those to keep."""
        weights = {"gate": self.gate, "up": self.up, "down": self.down}
        return BranchOut(on_kept_rows(self._rows, weights, x, keep, ("embed",), ("embed",)))

    def _rows(self, w: Weights, x: Array) -> Array:
        gate = contract("feedforward/gate", x, w["gate"], self.numerics)
        up = contract("feedforward/up", x, w["up"], self.numerics)
        return contract("feedforward/down", jax.nn.silu(gate) * up, w["down"], self.numerics)
