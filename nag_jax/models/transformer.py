"""From sub-layers to a language model: stages of scanned blocks, taps, remat, loss and logits.

The forward pass is pure: parameters go in as nested dicts, everything measured comes out. A
sub-layer is a branch and a connection; a block is an attention and a feed-forward sub-layer; a
stage is one `lax.scan` over blocks of one pattern, and may run several times with the same weights.
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
from nag_jax.models.cache import LayerCache, cache_shapes, run_cached
from nag_jax.models.chunked_attention import SAVED_NAMES
from nag_jax.models.connections import Stream
from nag_jax.models.context import Context, Decoding, positions_in_document
from nag_jax.models.embedding import TokenTable
from nag_jax.models.linear import Numerics
from nag_jax.models.losses import chunked_cross_entropy
from nag_jax.models.stages import StageSizes, stages_of
from nag_jax.parameters import flatten, info_of
from nag_jax.sharding import rules

SUBLAYERS = ("attention", "feedforward")

# A stage's cache: arrays by sub-layer and name, each [blocks run, B, ...].
Cache = dict[str, Any]

# The state between tokens: the stages' caches, the column of the next token, each row's first one.
DecodeState = dict[str, Any]


def remat_policy(name: str) -> Callable | None:
    """What the backward pass keeps of a block, by `model.remat`.

    A policy that keeps anything also keeps attention's output and normaliser, so that recomputing a
    block leaves its attention out.
    """
    policies = jax.checkpoint_policies
    if name == "nothing_saveable":
        return policies.nothing_saveable
    return policies.save_from_both_policies(
        getattr(policies, name), policies.save_only_these_names(*SAVED_NAMES)
    )


class SubLayer(nnx.Module):
    """A branch with its connection: read, gate, branch, write."""

    def __init__(self, branch: nnx.Module, connection: nnx.Module):
        self.branch = branch
        self.connection = connection

    def __call__(self, stream: Stream, context: Context) -> tuple[Stream, dict[str, Array], Cache]:
        """Runs the sub-layer.

        Returns:
            The new stream, the taps (empty unless asked for) and the arrays of the sub-layer's
            cache (none outside of decoding). Taps are sums over valid tokens of the stream's norm
            after the write, the realised gain, the rotation in radians and, where there is a gate,
            its value and whether it sat on its floor.
        """
        x = self.connection.read(stream)
        gate = self.connection.gate(x)
        run = self.branch if context.cache is None else functools.partial(run_cached, self.branch)
        out = run(x, None if gate is None else gate.keep, context)
        cache = {} if out.cache is None else out.cache.arrays
        written = self.connection.write(stream, out, gate, context)
        after = tuple(
            rules.constrain(part, "batch", *(None,) * (part.ndim - 1)) for part in written.stream
        )
        if not context.taps:
            return after, {}, cache
        taps = measure(self.connection.describe, stream, after) | {"gain": written.gain}
        if gate is not None:
            taps |= {"gate": gate.m, "gate_floored": gate.floored}
        summed = {name: jnp.sum(jnp.where(context.valid, value, 0)) for name, value in taps.items()}
        return after, jax.lax.stop_gradient(summed), cache


def measure(describe: Callable, before: Stream, after: Stream) -> dict[str, Float[Array, "B T"]]:
    """Norm of the stream after a write, over sqrt(d), and the angle it turned by, per token."""
    direction_before, _ = describe(before)
    direction_after, log_norm = describe(after)
    dtype = log_norm.dtype
    difference = direction_after.astype(dtype) - direction_before.astype(dtype)
    # Through the chord: arccos of a cosine near 1 loses small angles in float32.
    half_chord = 0.5 * jnp.sqrt(jnp.mean(difference * difference, axis=-1))
    return {"norm": jnp.exp(log_norm), "rotation": 2 * jnp.arcsin(jnp.clip(half_chord, 0, 1))}


class Block(nnx.Module):
    """Attention, then feed-forward, each with a connection of its own."""

    def __init__(self, options: ConfigDict, index: Array, numerics: Numerics, rngs: nnx.Rngs):
        """Makes block number `index` (0-based, may be traced)."""
        connection = kind_class("model.connection", options.connection.kind)
        initialisation = kind_class("model.initialisation", options.initialisation.kind)(
            options.initialisation
        )
        for offset, name in enumerate(SUBLAYERS):
            branch = kind_class(f"model.{name}", options[name].kind)
            sublayer = SubLayer(
                branch(options[name], options.d_model, initialisation, numerics, rngs),
                connection(
                    options.connection,
                    options.d_model,
                    len(SUBLAYERS) * index + offset + 1,
                    numerics,
                    rngs,
                ),
            )
            setattr(self, name, sublayer)

    def __call__(
        self, stream: Stream, context: Context, layers: "Layers", cache: Cache | None = None
    ) -> tuple[Stream, dict[str, Array], Cache]:
        """Runs both sub-layers; taps are stacked in their order."""
        collected, new_cache = [], {}
        for offset, name in enumerate(SUBLAYERS):
            told = dataclasses.replace(
                context,
                layer=layers.running + 1,
                sublayer=len(SUBLAYERS) * layers.running + offset + 1,
                first_sublayer=len(SUBLAYERS) * layers.first + offset + 1,
            )
            if context.decoding is not None:
                layer_cache = LayerCache(cache[name], layers.entry, **vars(context.decoding))
                told = dataclasses.replace(told, cache=layer_cache)
            stream, taps, arrays = getattr(self, name)(stream, told)
            if context.decoding is not None:
                new_cache[name] = arrays
            collected.append(taps)
        taps = {key: jnp.stack([taps[key] for taps in collected]) for key in collected[0]}
        return stream, taps, new_cache


class Layers(NamedTuple):
    """Which block runs, in numbers from 0 in order of execution.

    Attributes:
        running: Of the running block.
        first: Of the same block in its loop's first iteration.
        entry: Within the stage, iterations counted: the block's entry in the stage's cache.
    """

    running: Int[Array, ""]
    first: Int[Array, ""]
    entry: Int[Array, ""]


class Stage(nnx.Module):
    """Blocks of one pattern, stacked and scanned, the whole scan run one or several times."""

    def __init__(
        self,
        make_block: Callable[[Array, nnx.Rngs], nnx.Module],
        sizes: StageSizes,
        remat: str,
        rngs: nnx.Rngs,
    ):
        """Makes the stage's blocks, each by its index in order of execution."""
        definition = None

        def create(key, index):
            nonlocal definition
            definition, state = nnx.split(make_block(index, nnx.Rngs(params=key)))
            return state

        keys = jax.random.split(rngs.params(), sizes.blocks)
        stacked = jax.vmap(create)(keys, sizes.first_index + jnp.arange(sizes.blocks))
        self.blocks = nnx.merge(definition, stacked)
        self.sizes = sizes
        self.remat = remat

    def __call__(
        self, stream: Stream, context: Context, cache: Cache | None = None
    ) -> tuple[Stream, dict[str, Array], Cache]:
        """Scans the blocks; taps come out as [sub-layers of the stage, iterations counted]."""
        sizes = self.sizes
        definition, stacked = nnx.split(self.blocks)

        def block(carry, xs, iteration):
            index, state = xs
            entry = iteration * sizes.blocks + index
            layers = Layers(sizes.first_index + entry, sizes.first_index + index, entry)
            stream, cache = carry
            stream, taps, cache = nnx.merge(definition, state)(stream, context, layers, cache)
            return (stream, cache), taps

        if self.remat != "none":
            policy = remat_policy(self.remat)
            block = jax.checkpoint(block, policy=policy, prevent_cse=False)

        def once(carry, iteration):
            step = functools.partial(block, iteration=iteration)
            return jax.lax.scan(step, carry, (jnp.arange(sizes.blocks), stacked))

        carry = (stream, cache or {})
        if sizes.loops == 1:
            (stream, cache), taps = once(carry, 0)
        else:
            (stream, cache), taps = jax.lax.scan(once, carry, jnp.arange(sizes.loops))
        return stream, {name: values.reshape(-1) for name, values in taps.items()}, cache


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

        def make_block(index, rngs):
            return Block(options, index, numerics, rngs)

        self.stage_names = []
        for name, sizes in stages_of(options, loops).items():
            setattr(self, name, Stage(make_block, sizes, options.remat, rngs))
            self.stage_names.append(name)
        self.vocab_size = vocab_size
        self.loss_chunk = options.loss_chunk

    def __call__(
        self, tokens: Int[Array, "B T"], context: Context, cache: dict[str, Cache] | None = None
    ):
        """Hidden states, log-scales, taps by sub-layer and the stages' caches."""
        stream = self.ends.start(self.table(tokens))
        caches, collected = {}, []
        for name in self.stage_names:
            stage_cache = None if cache is None else cache[name]
            stream, taps, caches[name] = getattr(self, name)(stream, context, stage_cache)
            collected.append(taps)
        hidden, log_scale = self.ends.finish(stream)
        taps = {name: jnp.concatenate([t[name] for t in collected]) for name in collected[0]}
        return hidden, log_scale, taps, caches

    def logits_of(self) -> Callable[[Array, Array], Array]:
        """The decoding function of some time steps, over the padded vocabulary."""
        matrix = rules.gather_weight(self.ends.decode_matrix(self.table.rows[...]))
        return lambda hidden, log_scale: self.ends.decode(hidden, log_scale, matrix)


@dataclasses.dataclass(frozen=True, eq=False)  # compared and hashed by identity, for caches
class LanguageModel:
    """A model as pure functions of its parameters.

    Attributes:
        options: The config's `model` node.
        loops: How often the loop runs.
        infos: Nested dict like the parameters', with a `ParamInfo` at each leaf.
        vocab_size: True size of the vocabulary.
        warmup_steps: Optimizer steps over which NAG gains are warmed up; 0 for none.
        sublayer_names: Name of each sub-layer, in the order of the taps.
    """

    options: ConfigDict
    loops: int
    infos: dict[str, Any]
    vocab_size: int
    warmup_steps: int
    sublayer_names: tuple[str, ...]
    _make: Callable[[nnx.Rngs], Transformer]
    _definition: Any
    _structure: Any

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Initial parameters, float32, as nested dicts."""
        return nnx.to_pure_dict(nnx.split(self._make(nnx.Rngs(params=key)))[1])

    def module(self, params: dict[str, Any]) -> Transformer:
        """The Flax module that holds these parameters."""
        state = jax.tree.unflatten(self._structure, jax.tree.leaves(params))
        return nnx.merge(self._definition, state)

    def gain_warmup(self, step: Int[Array, ""] | int) -> Float[Array, ""]:
        """Factor on NAG gains after `step` optimizer steps: (step + 1)/W, at most 1."""
        if self.warmup_steps == 0:
            return jnp.ones((), jnp.float32)
        return jnp.minimum(1.0, (jnp.asarray(step, jnp.float32) + 1) / self.warmup_steps)

    def prefill(
        self,
        params: dict[str, Any],
        tokens: Int[Array, "B P"],
        start: Int[Array, " B"],
        length: int,
        step: Array | int,
    ) -> tuple[Float[Array, "B V"], DecodeState]:
        """Runs whole prompts and keeps what later tokens need of them.

        Args:
            params: Parameters.
            tokens: One prompt a row, each with its padding on the left.
            start: Column of each prompt's first token.
            length: Columns of the cache: how far the rows may grow, P included.
            step: Optimizer steps behind the parameters.

        Returns:
            Logits of the token after each prompt, and the state for `decode_step`.
        """
        batch, columns = tokens.shape
        cache = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.cache_shapes(batch, length)
        )
        state = {"cache": cache, "position": jnp.int32(0), "start": start}
        segment_ids = (jnp.arange(columns) >= start[:, None]).astype(jnp.int32)
        return self._decode(params, tokens, segment_ids, state, step, True)

    def decode_step(
        self, params: dict[str, Any], tokens: Int[Array, " B"], state: DecodeState, step: Any
    ) -> tuple[Float[Array, "B V"], DecodeState]:
        """Adds one token to each row: logits of the next one, and the state after it."""
        tokens = tokens[:, None]
        return self._decode(params, tokens, jnp.ones_like(tokens), state, step, False)

    def cache_shapes(self, batch: int, length: int) -> dict[str, Cache]:
        """Shapes and dtypes of the cache of `batch` rows of `length` columns, by stage."""
        options = self.options
        dtype = Numerics(options.compute_dtype).dtype

        def shapes(name, entries):
            branch = kind_class(f"model.{name}", options[name].kind)
            one = cache_shapes(
                branch, options[name], options.d_model, batch, length, dtype, name == "attention"
            )
            return {
                key: jax.ShapeDtypeStruct((entries, *leaf.shape), leaf.dtype)
                for key, leaf in one.items()
            }

        return {
            stage: {name: shapes(name, sizes.runs) for name in SUBLAYERS}
            for stage, sizes in stages_of(options, self.loops).items()
        }

    def _decode(self, params, tokens, segment_ids, state, step, prefill):
        module = self.module(params)
        position, start = state["position"], state["start"]
        columns = position + jnp.arange(tokens.shape[1])
        context = Context(
            segment_ids=segment_ids,
            positions=jnp.maximum(columns - start[:, None], 0),
            valid=segment_ids > 0,
            gain_warmup=self.gain_warmup(step),
            taps=False,
            decoding=Decoding(position, start, prefill),
        )
        hidden, log_scale, _, cache = module(tokens, context, state["cache"])
        logits = module.logits_of()(hidden[:, -1:], log_scale[:, -1:])[:, 0, : self.vocab_size]
        cache = jax.tree.map(
            lambda leaf: rules.constrain(leaf, None, "batch", *(None,) * (leaf.ndim - 2)), cache
        )
        return logits, state | {"cache": cache, "position": position + tokens.shape[1]}

    def _forward(self, params, tokens, segment_ids, valid, step, taps, packed=True):
        module = self.module(params)
        context = Context(
            segment_ids=segment_ids,
            positions=positions_in_document(segment_ids),
            valid=valid,
            gain_warmup=self.gain_warmup(step),
            taps=taps,
            packed=packed,
        )
        hidden, log_scale, measured, _ = module(tokens, context)
        return module, hidden, log_scale, measured

    def evaluate_batch(
        self, params: dict[str, Any], batch: dict[str, Array], step: Array | int, taps: bool
    ) -> dict[str, Any]:
        """Runs a batch.

        Args:
            params: Parameters.
            batch: tokens and segment_ids int32 [B, T+1], valid bool [B, T+1].
            step: Optimizer steps behind the parameters, for the gain's warm-up.
            taps: Whether to measure sub-layers.

        Returns:
            nats and correct [B, T] (at least float32, 0 where the target is not valid) and taps,
            each [sub-layers], summed over valid targets.
        """
        valid = batch["valid"][:, 1:]
        module, hidden, log_scale, measured = self._forward(
            params, batch["tokens"][:, :-1], batch["segment_ids"][:, :-1], valid, step, taps
        )
        nats, correct = chunked_cross_entropy(
            module.logits_of(),
            hidden,
            log_scale,
            batch["tokens"][:, 1:],
            self.vocab_size,
            module.loss_chunk,
        )
        return {
            "nats": jnp.where(valid, nats, 0),
            "correct": jnp.where(valid, correct, 0),
            "taps": measured,
        }

    def logits(
        self,
        params: dict[str, Any],
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        step: Array | int = 0,
    ) -> Float[Array, "B T V"]:
        """Logits over the true vocabulary; a row is one document unless `segment_ids` is given."""
        packed = segment_ids is not None
        if not packed:
            segment_ids = jnp.ones_like(tokens)
        module, hidden, log_scale, _ = self._forward(
            params, tokens, segment_ids, jnp.ones(tokens.shape, bool), step, False, packed
        )
        return module.logits_of()(hidden, log_scale)[..., : self.vocab_size]


def build_model(config: ConfigDict, vocab_size: int, loops: int | None = None) -> LanguageModel:
    """Builds the model of a complete config without making any parameter.

    Args:
        config: The complete config.
        vocab_size: Size of the tokenizer's vocabulary.
        loops: How often the loop runs, if not `model.loops` times; the parameters are the same.

    Returns:
        The model.

    Raises:
        ValueError: If a part declares a parameter without axes or role.
    """
    options = config.model
    loops = options.loops if loops is None else loops

    def make(rngs):
        return Transformer(options, vocab_size, loops, rngs)

    definition = None

    def abstract(key):
        nonlocal definition
        definition, state = nnx.split(make(nnx.Rngs(params=key)))
        return state

    state = jax.eval_shape(abstract, jax.random.key(0))
    infos: dict[str, Any] = {}
    for path, variable in nnx.to_flat_state(state):
        node = infos
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = info_of(variable, "/".join(map(str, path)))
    paths = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    if paths != sorted(flatten(infos)):
        raise ValueError("parameters must be flattened in the order of their paths")
    connection = kind_class("model.connection", options.connection.kind)
    blocks_run = sum(sizes.runs for sizes in stages_of(options, loops).values())
    return LanguageModel(
        options=options,
        loops=loops,
        infos=infos,
        vocab_size=vocab_size,
        warmup_steps=connection.warmup_steps(options.connection),
        sublayer_names=SUBLAYERS * blocks_run,
        _make=make,
        _definition=definition,
        _structure=jax.tree.structure(state),
    )
