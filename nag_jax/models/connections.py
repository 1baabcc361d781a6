"""How a branch's output enters the stream: the part that this project makes exchangeable.

A connection is one sub-layer's end of the stream (`read`, `gate`, `write`); its `Ends` are the two
ends of the whole stream (`start`, `finish`, `decode`). Attention and feed-forward layers know
nothing of either. A connection of a user's own has the same members; `describe` is what every
analysis reads. P1 is arXiv 2606.16112 (norm-agnostic), P2 arXiv 2605.25880 (residual-free).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from nag_jax.errors import UserError
from nag_jax.models.context import BranchOut, Context
from nag_jax.models.gates import Gate, NormModulator, RouterGate
from nag_jax.models.initializers import fan_in_normal
from nag_jax.models.norms import NORMS, root_mean_square
from nag_jax.parameters import declare
from nag_jax.sharding.rules import rows_spec
from pallas_kernels.nag_update import choose, nag_update
from pallas_kernels.platform import platform_in_use

Stream = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Written:
    """A stream after a write, and the gain that was realised, [B, T] (see each `write`)."""

    stream: Stream
    gain: Float[Array, "B T"]


class NormAgnosticEnds(nnx.Module):
    """Start, finish and decode of a norm-agnostic stream (P1, input embedding and output).

    Logits of any ends are `decode_scale` times the inner products of hidden states with the rows of
    `decode_matrix`.
    """

    centred_table = True

    def __init__(self, options: ConfigDict, d_model: int, vocab_size: int, numerics, rngs):
        del vocab_size, rngs
        self.d_model = d_model
        log_gain = jnp.log(jnp.asarray(options.encode_gain_init, jnp.float32))
        self.log_encode_gain = declare(log_gain, (), "scale")
        self.numerics = numerics

    def start(self, embedding: Float[Array, "B T d"]) -> Stream:
        """R_0 = sqrt(d) e/||e||, s_0 = log(G ||e||/sqrt(d)) for rows e of the centred table."""
        rms = root_mean_square(embedding)
        direction = embedding.astype(rms.dtype) / rms
        log_norm = jnp.log(rms[..., 0]) + self.log_encode_gain[...].astype(rms.dtype)
        return direction.astype(self.numerics.dtype), log_norm

    def finish(self, stream: Stream) -> tuple[Array, Array]:
        """R_L and s_L: hidden state and the log of the inverse temperature exp(s_L)."""
        return stream

    def decode_matrix(self, table: Float[Array, "V d"]) -> Float[Array, "V d"]:
        """Rows of the tied table over their norm."""
        return table / (root_mean_square(table) * table.shape[-1] ** 0.5)

    def decode_scale(self, log_scale: Float[Array, "B T"]) -> Float[Array, "B T"]:
        """exp(s_L)/sqrt(d), so that logit_v = exp(s_L) (R_L/sqrt(d)) . (E_v/||E_v||)."""
        return jnp.exp(log_scale) * self.d_model**-0.5


class NormAgnostic(nnx.Module):
    """The norm-agnostic connection of P1: a direction on a sphere and a log-norm.

    The gain is a = alpha_l * m_l * warm-up, alpha starting at 1/l^p for the l-th sub-layer (23-24),
    attention of block j being l = 2j+1 and its feed-forward l = 2j+2. A router's weight multiplies
    the gain, since the update itself is scale-free: as it is ("plain"), or over its own value
    without gradient ("unit"), which leaves the gain of (14) exact and gives the router the gradient
    of a relative change (both our inference).
    """

    Ends = NormAgnosticEnds
    gated = True

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Keys of `model.connection` for this kind."""
        return {
            "alpha_exponent": 0.5,
            "alpha_warmup_steps": 100,
            "gate_directions": 32,
            "gate_init_scale": 1.0,
            "beta_init": 1.0,
            "beta_trainable": True,
            "encode_gain_init": 1.0,
            "embedding_std": 1.0,
            "router_weight": "plain",
            "implementation": "auto",  # of the update, see pallas_kernels.nag_update
        }

    @staticmethod
    def rate_multipliers() -> dict[str, float]:
        """Learning rate of this kind's roles of parameters, relative to that of matrices."""
        return {"gate": 0.1}

    @staticmethod
    def implementations(config: ConfigDict) -> list[tuple[str, str, str]]:
        """(operation, implementation, reason), for the header of a run.

        Raises:
            UserError: The implementation asked for cannot serve here, or under
                `model.strict_kernels` no fused one can.
        """
        try:
            name, reason = choose(
                config.model.connection.implementation,
                platform_in_use(),
                width=config.model.d_model,
                dtypes=(config.model.compute_dtype,),
            )
        except ValueError as error:
            raise UserError(f"model.connection.implementation: {error}") from error
        if config.model.strict_kernels and name == "reference":
            raise UserError(f"model.strict_kernels is set and no fused update serves: {reason}")
        return [("residual update", name, reason)]

    @staticmethod
    def warmup_steps(options: ConfigDict) -> int:
        """Steps over which all gains are warmed up, against gates that close for good."""
        return options.alpha_warmup_steps

    def __init__(self, options: ConfigDict, d_model: int, index: Array, numerics, rngs):
        """Makes the connection of the sub-layer with 1-based index `index` (may be traced)."""
        alpha = jnp.asarray(index, jnp.float32) ** -options.alpha_exponent
        self.alpha = declare(alpha, (), "gate")
        self.alpha_exponent = options.alpha_exponent
        self.implementation = options.implementation
        self.unit_router_weight = options.router_weight == "unit"
        self.modulator = NormModulator(
            d_model,
            options.gate_directions,
            options.gate_init_scale,
            options.beta_init,
            options.beta_trainable,
            numerics,
            rngs,
        )

    def read(self, stream: Stream) -> Float[Array, "B T d"]:
        """The direction itself; no learned gains."""
        return stream[0]

    def gate(self, x: Float[Array, "B T d"]) -> Gate:
        """The norm modulator (13)."""
        return self.modulator(x)

    def write(self, stream: Stream, out: BranchOut, gate: Gate, context: Context) -> Written:
        """Equations (10) to (17); the realised gain is a.

        In a loop alpha stands for the first iteration's; a later one's falls with its own l.
        """
        direction, log_norm = stream
        gain = self._gain(gate, context)
        if out.weight is not None:
            weight = out.weight.astype(gain.dtype)
            if self.unit_router_weight:
                weight = jnp.maximum(weight, jnp.finfo(weight.dtype).tiny)
                weight = weight / jax.lax.stop_gradient(weight)
            gain = gain * weight
        spec = rows_spec(gain.shape[0], jax.sharding.get_abstract_mesh())
        direction, log_gain = nag_update(
            direction, out.y, gain, implementation=self.implementation, token_spec=spec
        )
        return Written((direction, log_norm + log_gain.astype(log_norm.dtype)), gain)

    def _gain(self, gate: Gate, context: Context) -> Float[Array, "B T"]:
        ratio = jnp.asarray(context.first_sublayer / context.sublayer, gate.m.dtype)
        alpha = self.alpha[...].astype(gate.m.dtype) * ratio**self.alpha_exponent
        return alpha * context.gain_warmup * gate.m

    def rotation(self, gate: Gate, context: Context) -> Float[Array, "B T"]:
        """Sine of the angle by which a write turns the direction, a/sqrt(1 + a^2)."""
        gain = self._gain(gate, context)
        return gain / jnp.sqrt(1 + gain**2)

    @staticmethod
    def describe(stream: Stream) -> tuple[Array, Array]:
        """(direction of norm sqrt(d), log-norm)."""
        return stream


class VectorEnds(nnx.Module):
    """Start, finish and decode of a stream that is one vector: final norm, tied or free head."""

    centred_table = False

    def __init__(self, options: ConfigDict, d_model: int, vocab_size: int, numerics, rngs):
        self.final_norm = NORMS[options.norm](d_model, "embed", options.norm_epsilon)
        self.free_head = options.head == "free"
        if self.free_head:
            values = fan_in_normal(rngs.params(), (vocab_size, d_model), d_model)
            self.head = declare(values, ("vocabulary", "embed"), "head")
        self.numerics = numerics

    def start(self, embedding: Float[Array, "B T d"]) -> Stream:
        """The embedding rows as they are."""
        return (embedding.astype(self.numerics.dtype),)

    def finish(self, stream: Stream) -> tuple[Array, Array]:
        """The final norm of the stream, and a log-scale of 0."""
        hidden = self.final_norm(stream[0])
        return hidden, jnp.zeros(hidden.shape[:-1], self.numerics.statistics_dtype)

    def decode_matrix(self, table: Float[Array, "V d"]) -> Float[Array, "V d"]:
        """The head's own rows, or the tied table's."""
        if self.free_head:
            head = self.head[...]
            return jnp.pad(head, ((0, table.shape[0] - head.shape[0]), (0, 0)))
        return table

    def decode_scale(self, log_scale: Float[Array, "B T"]) -> Float[Array, "B T"]:
        """1: logits are the inner products."""
        return jnp.ones_like(log_scale)


class PreNorm(nnx.Module):
    """The standard residual connection: R <- R + f(norm(R)) (equation 6 of P1)."""

    Ends = VectorEnds

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Keys of `model.connection` for this kind."""
        return {"head": "tied", "norm": "rms", "norm_epsilon": 1e-6, "embedding_std": 0.02}

    @staticmethod
    def rate_multipliers() -> dict[str, float]:
        """Learning rate of this kind's roles of parameters, relative to that of matrices."""
        return {"head": 1.0}

    @staticmethod
    def warmup_steps(options: ConfigDict) -> int:
        """No warm-up."""
        del options
        return 0

    def __init__(self, options: ConfigDict, d_model: int, index: Array, numerics, rngs):
        """Makes the connection; `index` and `rngs` are not needed by this kind."""
        del index, numerics, rngs
        self.norm = NORMS[options.norm](d_model, "embed", options.norm_epsilon)

    def read(self, stream: Stream) -> Float[Array, "B T d"]:
        """The norm of the stream."""
        return self.norm(stream[0])

    def gate(self, x: Float[Array, "B T d"]) -> None:
        """No gate."""

    def write(self, stream: Stream, out: BranchOut, gate: None, context: Context) -> Written:
        """Adds the branch; the realised gain is its size relative to the stream."""
        del gate, context
        return self._added(stream, weighted(out))

    @staticmethod
    def _added(stream: Stream, y: Float[Array, "B T d"]) -> Written:
        gain = root_mean_square(y)[..., 0] / root_mean_square(stream[0])[..., 0]
        return Written((stream[0] + y,), gain)

    @staticmethod
    def describe(stream: Stream) -> tuple[Array, Array]:
        """(stream over its RMS, log of that RMS)."""
        rms = root_mean_square(stream[0])
        return stream[0].astype(rms.dtype) / rms, jnp.log(rms[..., 0])


class GatedPreNorm(PreNorm):
    """Pre-norm with the gate of a mixture of depths: R <- R + g f(norm(R)) (P1, equation 40)."""

    gated = True

    @staticmethod
    def rate_multipliers() -> dict[str, float]:
        """Learning rates of this kind's roles of parameters, relative to that of matrices."""
        return PreNorm.rate_multipliers() | {"gate": 0.1}

    def __init__(self, options: ConfigDict, d_model: int, index: Array, numerics, rngs):
        """Makes the norm and the gate; `index` is not needed by this kind."""
        super().__init__(options, d_model, index, numerics, rngs)
        self.router = RouterGate(d_model, numerics, rngs)

    def gate(self, x: Float[Array, "B T d"]) -> Gate:
        """The router's gate of what the branch reads."""
        return self.router(x)

    def write(self, stream: Stream, out: BranchOut, gate: Gate, context: Context) -> Written:
        """Adds the gated branch; the realised gain is its size relative to the stream."""
        del context
        y = weighted(out)
        return self._added(stream, y * gate.m[..., None].astype(y.dtype))


class ResidualFree(PreNorm):
    """No skip connection: X <- f(norm(X)), with the pre-norms kept (P2, our reading)."""

    def write(self, stream: Stream, out: BranchOut, gate: None, context: Context) -> Written:
        """Replaces the stream; the realised gain is the branch's size over the old stream's."""
        del gate, context
        y = weighted(out)
        gain = root_mean_square(y)[..., 0] / root_mean_square(stream[0])[..., 0]
        return Written((y.astype(stream[0].dtype),), gain)


def weighted(out: BranchOut) -> Float[Array, "B T d"]:
    """The branch's output times its router weight, where it has one."""
    if out.weight is None:
        return out.y
    return out.y * out.weight[..., None].astype(out.y.dtype)
