"""From sub-layers to a stack of them: blocks, stages of scanned blocks, taps and remat.

A sub-layer is a branch and a connection; a block is an attention and a feed-forward sub-layer; a
stage is one `lax.scan` over repeats of a pattern of blocks, and may run several times with the same
weights. Losses, logits and decoding are in `transformer.py`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from nag_jax.kinds import kind_class
from nag_jax.models.cache import LayerCache, run_cached
from nag_jax.models.chunked_attention import SAVED_NAMES
from nag_jax.models.connections import Stream
from nag_jax.models.context import BranchOut, Context
from nag_jax.models.embedding import TokenTable
from nag_jax.models.linear import GROUPED_PRODUCT, Numerics, scores
from nag_jax.models.losses import cross_entropy
from nag_jax.models.skipping import histogram
from nag_jax.models.stages import SUBLAYERS, StageSizes, pattern_of, stages_of
from nag_jax.sharding import rules

# The place of thresholds among the sub-layers of a block, in the balance and in the statistics.
SKIPPING = "skipping"

# A stage's cache: arrays by block name, sub-layer and name, each [repeats and iterations, B, ...].
Cache = dict[str, Any]

# State that is neither parameter nor optimizer, by stage, block name, sub-layer and name, each
# [repeats, ...], or a part of that tree; thresholds by stage, block name, `SKIPPING` and sub-layer,
# each [repeats, loops].
Balance = dict[str, Any]


def remat_policy(name: str) -> Callable | None:
    """What the backward pass keeps of a block, by `model.remat`.

    A policy that keeps anything also keeps attention's output and normaliser, so that recomputing a
    block leaves its attention out, and the products of experts, which are no plain matrix products.
    """
    policies = jax.checkpoint_policies
    if name == "nothing_saveable":
        return policies.nothing_saveable
    return policies.save_from_both_policies(
        getattr(policies, name), policies.save_only_these_names(*SAVED_NAMES, GROUPED_PRODUCT)
    )


class SubLayer(nnx.Module):
    """A branch with its connection: read, gate, branch, write; `skipping` where it has a say."""

    def __init__(self, branch: nnx.Module, connection: nnx.Module, skipping: Any):
        self.branch = branch
        self.connection = connection
        self.skipping = skipping

    def __call__(
        self, stream: Stream, context: Context
    ) -> tuple[Stream, dict[str, Array], BranchOut, Array | None]:
        """Runs the sub-layer.

        Returns:
            The new stream, the taps (empty unless asked for), what the branch returned and, where
            tokens may skip it, the histogram of their scores (not in decoding). Taps are sums over
            valid tokens of the stream's norm after the write, the realised gain, the rotation in
            radians and, where there is a gate, its value and whether it sat on its floor; where the
            model skips, how many tokens did.
        """
        x = self.connection.read(stream)
        gate = told = self.connection.gate(x)
        counts = None
        if context.threshold is not None:
            score = self.skipping.score(self.connection, gate, context)
            keep, m = self.skipping.decide(gate, score, context.threshold)
            gate = dataclasses.replace(gate, keep=keep, m=m)
            if context.decoding is None:  # nobody would read it
                counts = histogram(score, context.valid)
        run = self.branch if context.cache is None else functools.partial(run_cached, self.branch)
        out = run(x, None if gate is None else gate.keep, context)
        written = self.connection.write(stream, out, gate, context)
        after = tuple(
            rules.constrain(part, "batch", *(None,) * (part.ndim - 1)) for part in written.stream
        )
        if not context.taps:
            return after, {}, out, counts
        taps = measure(self.connection.describe, stream, after) | {"gain": written.gain}
        if told is not None:
            taps |= {"gate": told.m, "gate_floored": told.floored}
        if self.skipping.sublayers:
            keep = jnp.ones_like(context.valid) if gate.keep is None else gate.keep
            taps["skipped"] = jnp.logical_not(keep).astype(jnp.float32)
        summed = {name: jnp.sum(jnp.where(context.valid, value, 0)) for name, value in taps.items()}
        return after, jax.lax.stop_gradient(summed), out, counts


def measure(describe: Callable, before: Stream, after: Stream) -> dict[str, Float[Array, "B T"]]:
    """Norm of the stream after a write, over sqrt(d), and the angle it turned by, per token."""
    direction_before, _ = describe(before)
    direction_after, log_norm = describe(after)
    dtype = log_norm.dtype
    difference = direction_after.astype(dtype) - direction_before.astype(dtype)
    # Through the chord: arccos of a cosine near 1 loses small angles in float32.
    half_chord = 0.5 * jnp.sqrt(jnp.mean(difference * difference, axis=-1))
    return {"norm": jnp.exp(log_norm), "rotation": 2 * jnp.arcsin(jnp.clip(half_chord, 0, 1))}


class Layers(NamedTuple):
    """Which block runs, in numbers from 0 in order of execution.

    Attributes:
        running: Of the running block.
        first: Of the same block in its loop's first iteration.
        entry: The block's entry in its arrays of the stage's cache.
    """

    running: Int[Array, ""]
    first: Int[Array, ""]
    entry: Int[Array, ""]


class Carry(NamedTuple):
    """What blocks hand on.

    Attributes:
        stream: The residual stream.
        memo: By sub-layer, what one leaves for that of the next block.
        cache: The stage's cache by block name, or the running block's own.
    """

    stream: Stream
    memo: dict[str, dict[str, Array]]
    cache: Cache


class Measured(NamedTuple):
    """What blocks report, summed over valid tokens.

    Attributes:
        taps: By name, for each sub-layer.
        auxiliary_loss: Terms of the training loss, in nats; None where no branch has any.
        statistics: By sub-layer and name, what the update of the balance wants.
    """

    taps: dict[str, Array]
    auxiliary_loss: Float[Array, ""] | None
    statistics: dict[str, Any]


class Block(nnx.Module):
    """Attention, then feed-forward, each with a connection of its own."""

    def __init__(
        self,
        options: ConfigDict,
        branches: dict[str, ConfigDict],
        index: Array,
        numerics: Numerics,
        rngs: nnx.Rngs,
    ):
        """Makes block number `index` (0-based, may be traced), its branches by these options."""
        connection = kind_class("model.connection", options.connection.kind)
        initialisation, skipping = (
            kind_class(f"model.{node}", options[node].kind)(options[node])
            for node in ("initialisation", "skipping")
        )
        for offset, name in enumerate(SUBLAYERS):
            branch = kind_class(f"model.{name}", options[name].kind)
            sublayer = SubLayer(
                branch(branches[name], options.d_model, initialisation, numerics, rngs),
                connection(
                    options.connection,
                    options.d_model,
                    len(SUBLAYERS) * index + offset + 1,
                    numerics,
                    rngs,
                ),
                skipping,
            )
            setattr(self, name, sublayer)

    def __call__(
        self, carry: Carry, context: Context, layers: Layers, balance: Balance
    ) -> tuple[Carry, Measured]:
        """Runs both sub-layers; taps are stacked in their order."""
        stream, memo, new_cache = carry.stream, dict(carry.memo), {}
        collected, losses, statistics = [], [], {}
        for offset, name in enumerate(SUBLAYERS):
            told = dataclasses.replace(
                context,
                layer=layers.running + 1,
                sublayer=len(SUBLAYERS) * layers.running + offset + 1,
                first_sublayer=len(SUBLAYERS) * layers.first + offset + 1,
                balance=balance.get(name, {}),
                memo=memo.get(name, {}),
                threshold=balance.get(SKIPPING, {}).get(name),
            )
            if context.decoding is not None:
                layer_cache = LayerCache(carry.cache[name], layers.entry, **vars(context.decoding))
                told = dataclasses.replace(told, cache=layer_cache)
            stream, taps, out, counts = getattr(self, name)(stream, told)
            if context.decoding is not None:
                new_cache[name] = out.cache.arrays
            if out.memo is not None:
                memo[name] = out.memo
            if out.auxiliary_loss is not None:
                losses.append(out.auxiliary_loss)
            if out.statistics:
                statistics[name] = jax.lax.stop_gradient(out.statistics)
            if counts is not None:
                statistics.setdefault(SKIPPING, {})[name] = counts
            collected.append(taps)
        taps = {key: jnp.stack([taps[key] for taps in collected]) for key in collected[0]}
        measured = Measured(taps, _total(losses), statistics)
        return Carry(stream, memo, new_cache), measured


class Stage(nnx.Module):
    """A pattern of blocks, stacked and scanned, the whole scan run one or several times."""

    def __init__(
        self,
        make_block: Callable[[int, Array, nnx.Rngs], nnx.Module],
        sizes: StageSizes,
        remat: str,
        rngs: nnx.Rngs,
    ):
        """Makes the stage's blocks, each by its pattern's entry and its index in execution."""
        for offset, name in enumerate(sizes.block_names):
            setattr(self, name, self._stacked(make_block, sizes, offset, rngs))
        self.sizes = sizes
        self.remat = remat

    @staticmethod
    def _stacked(
        make_block: Callable, sizes: StageSizes, offset: int, rngs: nnx.Rngs
    ) -> nnx.Module:
        """One block of the pattern with the weights of all repeats."""
        definition = None

        def create(key, index):
            nonlocal definition
            block = make_block(sizes.positions[offset], index, nnx.Rngs(params=key))
            definition, state = nnx.split(block)
            return state

        keys = jax.random.split(rngs.params(), sizes.repeats)
        indices = len(sizes.positions) * jnp.arange(sizes.repeats) + sizes.first_index + offset
        stacked = jax.vmap(create)(keys, indices)
        return nnx.merge(definition, stacked)

    def __call__(self, carry: Carry, context: Context, balance: Balance) -> tuple[Carry, Measured]:
        """Scans the blocks.

        Taps come out as [sub-layers of the stage, iterations counted], statistics by block name as
        [repeats, ...], summed over iterations; those of skipping are [repeats, loops, ...].
        """
        sizes = self.sizes
        splits = {name: nnx.split(getattr(self, name)) for name in sizes.block_names}
        stacked = {name: state for name, (_, state) in splits.items()}

        def block(carry, name, layers, state, balance):
            return nnx.merge(splits[name][0], state)(carry, context, layers, balance)

        if self.remat != "none":
            policy = remat_policy(self.remat)
            block = jax.checkpoint(block, policy=policy, prevent_cse=False, static_argnums=1)

        def repeat(carry, xs, iteration):
            number, states, balance = xs
            taps, losses, statistics = [], [], {}
            for offset, name in enumerate(sizes.block_names):
                first = sizes.first_index + len(sizes.positions) * number + offset
                running = first + iteration * sizes.blocks
                layers = Layers(running, first, iteration * sizes.repeats + number)
                own = carry._replace(cache=carry.cache.get(name, {}))
                told = dict(balance.get(name, {}))
                if SKIPPING in told:
                    told[SKIPPING] = {key: x[iteration] for key, x in told[SKIPPING].items()}
                out, measured = block(own, name, layers, states[name], told)
                carry = out._replace(cache=carry.cache | ({name: out.cache} if out.cache else {}))
                taps.append(measured.taps)
                losses.append(measured.auxiliary_loss)
                statistics |= {name: measured.statistics} if measured.statistics else {}
            taps = {key: jnp.concatenate([tap[key] for tap in taps]) for key in taps[0]}
            return carry, Measured(taps, _total(losses), statistics)

        def once(carry, iteration):
            step = functools.partial(repeat, iteration=iteration)
            return jax.lax.scan(step, carry, (jnp.arange(sizes.repeats), stacked, balance))

        if sizes.loops == 1:
            carry, measured = once(carry, 0)
            statistics = jax.tree.map(lambda x: x[None], measured.statistics)
        else:
            carry, measured = jax.lax.scan(once, carry, jnp.arange(sizes.loops))
            statistics = measured.statistics
        statistics = {
            name: {
                part: jax.tree.map(
                    lambda x, part=part: jnp.swapaxes(x, 0, 1) if part == SKIPPING else x.sum(0),
                    values,
                )
                for part, values in parts.items()
            }
            for name, parts in statistics.items()
        }
        taps = {name: values.reshape(-1) for name, values in measured.taps.items()}
        loss = jax.tree.map(jnp.sum, measured.auxiliary_loss)
        return carry, Measured(taps, loss, statistics)


class Forward(NamedTuple):
    """What a forward pass gives; `Measured` says what the last three are.

    Attributes:
        hidden: Final hidden states.
        log_scale: Log of each position's inverse temperature.
        cache: The stages' caches, in decoding.
        taps: [sub-layers], in order of execution.
        auxiliary_loss: Summed over blocks.
        statistics: By stage.
    """

    hidden: Float[Array, "B T d"]
    log_scale: Float[Array, "B T"]
    cache: dict[str, Cache]
    taps: dict[str, Array]
    auxiliary_loss: Float[Array, ""] | None
    statistics: dict[str, Any]


class Transformer(nnx.Module):
    """Token table, stages and the two ends of the stream."""

    def __init__(self, options: ConfigDict, vocab_size: int, loops: int, rngs: nnx.Rngs):
        """Makes the parts; the loop runs `loops` times, whatever `options.loops` says."""
        numerics = Numerics(options.compute_dtype)
        ends = kind_class("model.connection", options.connection.kind).Ends
        multiple = options.vocab_multiple
        self.table = TokenTable(
            vocab_size,
            -(-vocab_size // multiple) * multiple,
            options.d_model,
            options.connection.embedding_std,
            ends.centred_table,
            numerics,
            rngs,
        )
        self.ends = ends(options.connection, options.d_model, vocab_size, numerics, rngs)
        pattern = pattern_of(options)

        def make_block(position, index, rngs):
            return Block(options, pattern[position], index, numerics, rngs)

        self.stage_names = []
        for name, sizes in stages_of(options, loops).items():
            setattr(self, name, Stage(make_block, sizes, options.remat, rngs))
            self.stage_names.append(name)
        self.memo_widths = tuple(
            (name, key, width)
            for name in SUBLAYERS
            for key, width in memo_widths(name, options[name]).items()
        )
        self.numerics = numerics
        self.vocab_size = vocab_size
        self.loss_chunk = options.loss_chunk

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        context: Context,
        balance: Balance,
        cache: dict[str, Cache] | None = None,
    ) -> Forward:
        """Runs the stages."""
        carry = Carry(self.ends.start(self.table(tokens)), self.initial_memo(tokens.shape), {})
        caches, collected, losses, statistics = {}, [], [], {}
        for name in self.stage_names:
            carry = carry._replace(cache={} if cache is None else cache[name])
            carry, measured = getattr(self, name)(carry, context, balance.get(name, {}))
            caches[name] = carry.cache
            collected.append(measured.taps)
            losses.append(measured.auxiliary_loss)
            statistics |= {name: measured.statistics} if measured.statistics else {}
        hidden, log_scale = self.ends.finish(carry.stream)
        taps = {name: jnp.concatenate([t[name] for t in collected]) for name in collected[0]}
        return Forward(hidden, log_scale, caches, taps, _total(losses), statistics)

    def initial_memo(self, shape: tuple[int, int]) -> dict[str, dict[str, Array]]:
        """What the first block finds, by sub-layer, where a kind leaves anything."""
        memo: dict[str, dict[str, Array]] = {}
        for name, key, width in self.memo_widths:
            zeros = jnp.zeros((*shape, width), self.numerics.statistics_dtype)
            memo.setdefault(name, {})[key] = rules.constrain(zeros, "batch", None, None)
        return memo

    def logits_of(self) -> Callable[[Array, Array], Array]:
        """The decoding function of some time steps, over the padded vocabulary."""
        matrix = self.ends.decode_matrix(self.table.rows[...])
        matrix = rules.gather_weight(matrix, ("vocabulary", "embed"))

        def logits(hidden, log_scale):
            scale = self.ends.decode_scale(log_scale)
            return scores(hidden, matrix, self.numerics) * scale[..., None]

        return logits

    def cross_entropy(
        self, forward: Forward, targets: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """`losses.cross_entropy` of what a forward pass gave."""
        return cross_entropy(
            forward.hidden,
            self.ends.decode_scale(forward.log_scale),
            self.ends.decode_matrix(self.table.rows[...]),
            targets,
            self.vocab_size,
            self.loss_chunk,
        )


def _total(losses: list[Array | None]) -> Array | None:
    """The sum of the terms that there are."""
    losses = [loss for loss in losses if loss is not None]
    return sum(losses[1:], losses[0]) if losses else None


def memo_widths(name: str, options: ConfigDict) -> dict[str, int]:
    """Widths of what a kind of branch leaves for the next block's, by its `memo_widths`, if any."""
    kind = kind_class(f"model.{name}", options.kind)
    return kind.memo_widths(options) if hasattr(kind, "memo_widths") else {}
