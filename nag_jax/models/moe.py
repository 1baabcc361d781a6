"""Mixtures of experts: which tokens go to which SwiGLU experts, and with what weight.

Nothing is dropped: every token is run by each expert it chose, whatever the load. How rows reach
the experts' weights is in `sharding/experts.py` and `rows.py`. P1 is arXiv 2606.16112.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from ml_collections import ConfigDict

from nag_jax.errors import UserError
from nag_jax.models import rows
from nag_jax.models.context import BranchOut, Context
from nag_jax.models.feedforward import SwiGLU
from nag_jax.models.linear import Numerics, contract_grouped
from nag_jax.models.router import LinearRouter, ZayaRouter
from nag_jax.parameters import declare
from nag_jax.sharding import experts
from pallas_kernels.platform import platform_in_use

EXPERTS = ("gate", "up", "down")


class MixtureOfExperts(nnx.Module):
    """Top-k routing by a linear router over E SwiGLU experts of width `hidden`.

    With p = softmax(router logits) in at least float32 and b the balance bias, which decides who is
    chosen and nothing else, the experts c_1..c_k of a token are the k largest p + b, and

        weight = p[c_1] + ... + p[c_k],        y = sum_i p[c_i] / weight * expert_(c_i)(x).

    The branch returns y and the weight apart, for the connection to place: a norm-agnostic write
    or the next norm would remove a factor on y, and the router of k = 1 would get no gradient. With
    a shared expert, which runs for every token, the branch is shared(x) + weight * y as a whole.

    P1 says neither how its experts are chosen nor balanced. The bias moves by `balance_rate` a step
    towards the even load (as in DeepSeek-V3; our inference for P1):

        b_e <- b_e + balance_rate * sign(mean load - load_e).

    Optional terms of the loss, per token and layer: `load_balance_loss` * E sum_e f_e p_e, with f
    the share of the last step's global choices that fell on e (so that no split of the batch
    matters), and `router_z_loss` * logsumexp(logits)^2.

    `num_experts` and `top_k` have one entry for all blocks, or several that blocks take in turn.
    """

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Keys of `model.feedforward` for this kind."""
        return {
            "hidden": 344,  # of each expert
            "num_experts": (8,),
            "top_k": (1,),
            "shared_hidden": 0,  # width of the shared expert; 0: none
            "balance_rate": 1e-3,
            "load_balance_loss": 0.0,
            "router_z_loss": 0.0,
            "implementation": "auto",
            "exchange": "auto",
        }

    @staticmethod
    def rate_multipliers() -> dict[str, float]:
        """Learning rate of the router, relative to that of matrices."""
        return {"router": 1.0}

    @staticmethod
    def pattern(options: ConfigDict) -> list[ConfigDict]:
        """The options of each block of the pattern: one number of experts and one k."""
        length = math.lcm(len(options.num_experts), len(options.top_k))
        blocks = []
        for i in range(length):
            own = options.copy_and_resolve_references()
            with own.unlocked():
                for name in ("num_experts", "top_k"):
                    own[name] = (options[name][i % len(options[name])],)
            blocks.append(own)
        return blocks

    @staticmethod
    def balance_shapes(options: ConfigDict) -> dict[str, tuple[int, ...]]:
        """One layer's balance: the bias, and the share of the last step's choices by expert."""
        (count,) = options.num_experts
        return {"bias": (count,), "load": (count,)}

    @staticmethod
    def update_balance(
        options: ConfigDict, balance: dict[str, Array], statistics: dict[str, Array]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """One layer's balance after a step, and what is told of it.

        Args:
            options: The layer's options.
            balance: What the step's forward passes read.
            statistics: "load", the number of the step's valid tokens that chose each expert.

        Returns:
            The new balance; the largest load over the mean, and the share of experts without any.
        """
        load = statistics["load"]
        mean = jnp.mean(load)
        share = load / jnp.maximum(jnp.sum(load), 1)
        bias = balance["bias"] + options.balance_rate * jnp.sign(mean - load)
        told = {
            "load_over_mean": len(share) * jnp.max(share),
            "idle_experts": jnp.mean((load == 0).astype(jnp.float32)),
        }
        return {"bias": bias, "load": share}, told

    @staticmethod
    def active_share(options: ConfigDict) -> float:
        """Which part of the experts' weights a token uses."""
        return options.top_k[0] / options.num_experts[0]

    @staticmethod
    def implementations(config: ConfigDict) -> list[tuple[str, str, str]]:
        """(operation, implementation, reason), for the header of a run.

        Raises:
            UserError: What the config asks for cannot serve here.
        """
        options, platform = config.model.feedforward, platform_in_use()
        # How long the axis is, unless it is left to the number of devices.
        shards = None if config.mesh.expert == -1 else config.mesh.expert
        choice = rows.choose(
            options.implementation,
            platform,
            dtype=config.model.compute_dtype,
            strict=config.model.strict_kernels,
        )
        return [choice.row, experts.choose(options.exchange, platform, shards).row]

    @staticmethod
    def validate(config: ConfigDict) -> None:
        """Refuses numbers of experts that do not fit together or the model.

        Raises:
            UserError: Names the keys and what is allowed.
        """
        node, options = "model.feedforward", config.model.feedforward
        for name in ("num_experts", "top_k"):
            if len(options[name]) > config.model.num_blocks:
                raise UserError(
                    f"{node}.{name} has {len(options[name])} entries, which blocks take in turn: "
                    f"there are only model.num_blocks={config.model.num_blocks}"
                )
        for own in MixtureOfExperts.pattern(options):
            if own.top_k[0] > own.num_experts[0]:
                raise UserError(
                    f"{node}.top_k={own.top_k[0]} of {node}.num_experts={own.num_experts[0]}: a "
                    f"block cannot choose more experts than it has (at most {own.num_experts[0]})"
                )
            if (
                config.model.connection.kind == "residual_free"
                and own.top_k[0] == 1
                and not options.shared_hidden
            ):
                raise UserError(
                    f"model.connection.kind=residual_free removes the router's weight, so with "
                    f"{node}.top_k=1 the router would get no gradient: set {node}.shared_hidden "
                    f"above 0, or {node}.top_k to 2 or more (of at least as many experts)"
                )

    def __init__(
        self,
        options: ConfigDict,
        d_model: int,
        initialisation: Any,
        numerics: Numerics,
        rngs: nnx.Rngs,
    ):
        (self.num_experts,), (self.top_k,) = options.num_experts, options.top_k
        self.load_balance_loss = options.load_balance_loss
        self.router_z_loss = options.router_z_loss
        self.implementation, self.exchange = options.implementation, options.exchange
        self.numerics = numerics
        self.router = self.make_router(options, d_model, rngs)

        def stacked(start: Any, inputs: int, outputs: int) -> Array:
            keys = jax.random.split(rngs.params(), self.num_experts)
            return jax.vmap(lambda key: start(nnx.Rngs(params=key), inputs, outputs))(keys)

        up, down = ("expert", "embed", "hidden"), ("expert", "hidden", "embed")
        sides = {"rows": ("embed",), "columns": ("hidden",)}
        gate = stacked(initialisation.up, d_model, options.hidden)
        self.gate = declare(gate, up, "matrix", **sides)
        self.up = declare(
            stacked(initialisation.up, d_model, options.hidden), up, "matrix", **sides
        )
        self.down = declare(
            stacked(initialisation.down, options.hidden, d_model),
            down,
            "matrix",
            rows=("hidden",),
            columns=("embed",),
        )
        self.has_shared = options.shared_hidden > 0
        if self.has_shared:
            shared = ConfigDict({"hidden": options.shared_hidden})
            self.shared = SwiGLU(shared, d_model, initialisation, numerics, rngs)

    def make_router(self, options: ConfigDict, d_model: int, rngs: nnx.Rngs) -> nnx.Module:
        """The router of this kind."""
        return LinearRouter(d_model, self.num_experts, self.numerics, rngs)

    def __call__(
        self, x: Float[Array, "B T d"], keep: Bool[Array, "B T"] | None, context: Context
    ) -> BranchOut:
        """Routes every token and runs its experts; tokens that skip have none."""
        logits, memo = self.router(x, context.memo)
        probabilities = jax.nn.softmax(logits, axis=-1)
        chosen = self._choose(probabilities, context.balance["bias"])
        of_chosen = self._at(chosen, probabilities)
        weight = jnp.sum(of_chosen, axis=-1)
        if self.has_shared:
            shares, weight = of_chosen, None
        elif self.top_k == 1:  # p/p is 1, but its computed gradient would be rounding noise
            shares = jnp.ones_like(of_chosen)
        else:
            # p/sum p, also where the bias chose experts whose probabilities underflow.
            shares = jax.nn.softmax(self._at(chosen, logits), axis=-1)
        weights = {name: getattr(self, name) for name in EXPERTS}
        platform = platform_in_use()
        dtype = self.numerics.dtype
        implementation = rows.choose(self.implementation, platform, dtype=dtype).name
        mesh = jax.sharding.get_abstract_mesh()
        shards = 1 if mesh.empty else mesh.shape["expert"]

        def run(local: dict[str, Array], tokens: Array, sizes: Array) -> Array:
            def product(name: str, inputs: Array) -> Array:
                return contract_grouped(
                    f"moe/{name}", inputs, local[name], sizes, self.numerics, implementation
                )

            hidden = jax.nn.silu(product("gate", tokens)) * product("up", tokens)
            return product("down", hidden)

        counted, dispatched = context.valid, chosen
        if keep is not None:
            counted = counted & keep
            dispatched = jnp.where(keep[..., None], chosen, self.num_experts)
        y = experts.run_experts(
            run,
            weights,
            x.astype(self.numerics.dtype),
            dispatched,
            shares.astype(self.numerics.dtype),
            exchange=experts.choose(self.exchange, platform, shards).name,
        )
        if self.has_shared:
            y = y + self.shared(x, keep, context).y
        return BranchOut(
            y,
            weight,
            memo=memo,
            auxiliary_loss=self._auxiliary_loss(logits, probabilities, context, counted),
            statistics={"load": self._load(chosen, counted)},
        )

    def _choose(
        self, probabilities: Float[Array, "B T E"], bias: Float[Array, " E"]
    ) -> Int[Array, "B T k"]:
        """The chosen experts, best first, of equal ones the first."""
        return jax.lax.top_k(jax.lax.stop_gradient(probabilities + bias), self.top_k)[1]

    def _at(
        self, chosen: Int[Array, "B T k"], values: Float[Array, "B T E"]
    ) -> Float[Array, "B T k"]:
        """The chosen experts' values; not by a gather, whose transpose is a scatter."""
        marks = chosen[..., None] == jnp.arange(self.num_experts)
        return jnp.sum(jnp.where(marks, values[..., None, :], 0), axis=-1)

    def _load(self, chosen: Int[Array, "B T k"], counted: Bool[Array, "B T"]) -> Float[Array, " E"]:
        """How many counted tokens chose each expert."""
        marks = (chosen[..., None] == jnp.arange(self.num_experts)) & counted[..., None, None]
        return jnp.sum(marks.astype(jnp.float32), axis=(0, 1, 2))

    def _auxiliary_loss(
        self, logits: Float[Array, "B T E"], probabilities: Array, context: Context, counted: Array
    ) -> Float[Array, ""]:
        """The optional terms of the loss, summed over counted tokens."""
        by_token = [jnp.zeros(probabilities.shape[:-1], probabilities.dtype)]
        if self.load_balance_loss:
            load = context.balance["load"].astype(probabilities.dtype)
            uneven = self.num_experts * jnp.sum(load * probabilities, axis=-1)
            by_token.append(self.load_balance_loss * uneven)
        if self.router_z_loss:
            by_token.append(self.router_z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2)
        return jnp.sum(jnp.where(counted, sum(by_token), 0))


class ZayaMixture(MixtureOfExperts):
    """The same experts behind the router of Zyphra's ZAYA1, which also reads the block before's."""

    @staticmethod
    def defaults() -> dict[str, Any]:
        """Keys of `model.feedforward` for this kind."""
        return MixtureOfExperts.defaults() | {"router_width": 256}

    @staticmethod
    def memo_widths(options: ConfigDict) -> dict[str, int]:
        """What a router hands to the next block's: its state before the norm."""
        return {"state": options.router_width}

    def make_router(self, options: ConfigDict, d_model: int, rngs: nnx.Rngs) -> nnx.Module:
        """The router of this kind."""
        return ZayaRouter(d_model, self.num_experts, options.router_width, self.numerics, rngs)
