"""From sub-layers to a language model: stages of scanned blocks, taps, remat, loss and logits.

The forward pass is pure: parameters go in as nested dicts, everything measured comes out. A
sub-layer is a branch and a connection; a block is an attention and a feed-forward sub-layer; a
stage is one `lax.scan` over blocks of one pattern.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from nag_jax.kinds import kind_class
from nag_jax.models.chunked_attention import SAVED_NAMES
from nag_jax.models.connections import Stream
from nag_jax.models.context import Context, positions_in_document
from nag_jax.models.embedding import TokenTable
from nag_jax.models.linear import Numerics
from nag_jax.models.losses import chunked_cross_entropy
from nag_jax.parameters import flatten, info_of
from nag_jax.sharding import rules

SUBLAYERS = ("attention", "feedforward")


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

    def __call__(self, stream: Stream, context: Context) -> tuple[Stream, dict[str, Array]]:
        """Runs the sub-layer.

        Returns:
            The new stream and the taps (empty unless asked for): sums over valid tokens of the
            stream's norm after the write, the realised gain, the rotation in radians and, where
            there is a gate, its value and whether it sat on its floor.
        """
        x = self.connection.read(stream)
        gate = self.connection.gate(x)
        out = self.branch(x, None if gate is None else gate.keep, context)
        written = self.connection.write(stream, out, gate, context)
        after = tuple(
            rules.constrain(part, "batch", *(None,) * (part.ndim - 1)) for part in written.stream
        )
        if not context.taps:
            return after, {}
        taps = measure(self.connection.describe, stream, after) | {"gain": written.gain}
        if gate is not None:
            taps |= {"gate": gate.m, "gate_floored": gate.floored}
        summed = {name: jnp.sum(jnp.where(context.valid, value, 0)) for name, value in taps.items()}
        return after, jax.lax.stop_gradient(summed)


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
        for offset, name in enumerate(SUBLAYERS):
            branch = kind_class(f"model.{name}", options[name].kind)
            sublayer = SubLayer(
                branch(options[name], options.d_model, numerics, rngs),
                connection(
                    options.connection,
                    options.d_model,
                    len(SUBLAYERS) * index + offset + 1,
                    numerics,
                    rngs,
                ),
            )
            setattr(self, name, sublayer)

    def __call__(self, stream: Stream, context: Context) -> tuple[Stream, dict[str, Array]]:
        """Runs both sub-layers; taps are stacked in their order."""
        collected = []
        for name in SUBLAYERS:
            stream, taps = getattr(self, name)(stream, context)
            collected.append(taps)
        return stream, {key: jnp.stack([taps[key] for taps in collected]) for key in collected[0]}


class Stage(nnx.Module):
    """Blocks of one pattern, stacked and scanned."""

    def __init__(
        self,
        make_block: Callable[[Array, nnx.Rngs], nnx.Module],
        repeats: int,
        first_index: int,
        remat: str,
        rngs: nnx.Rngs,
    ):
        """Makes `repeats` blocks with indices from `first_index` on."""
        definition = None

        def create(key, index):
            nonlocal definition
            definition, state = nnx.split(make_block(index, nnx.Rngs(params=key)))
            return state

        keys = jax.random.split(rngs.params(), repeats)
        stacked = jax.vmap(create)(keys, first_index + jnp.arange(repeats))
        self.blocks = nnx.merge(definition, stacked)
        self.remat = remat

    def __call__(self, stream: Stream, context: Context) -> tuple[Stream, dict[str, Array]]:
        """Scans the blocks; taps come out as [sub-layers of the stage]."""
        definition, stacked = nnx.split(self.blocks)

        def body(stream, state):
            return nnx.merge(definition, state)(stream, context)

        if self.remat != "none":
            body = jax.checkpoint(body, policy=remat_policy(self.remat), prevent_cse=False)
        stream, taps = jax.lax.scan(body, stream, stacked)
        return stream, {name: values.reshape(-1) for name, values in taps.items()}


class Transformer(nnx.Module):
    """Token table, stages and the two ends of the stream."""

    def __init__(self, options: ConfigDict, vocab_size: int, rngs: nnx.Rngs):
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

        # One stage today; layers that differ in shape (experts, say) need several.
        stages = ((make_block, options.num_blocks),)
        self.num_stages, first_index = len(stages), 0
        for number, (make, repeats) in enumerate(stages):
            stage = Stage(make, repeats, first_index, options.remat, rngs)
            setattr(self, f"stage_{number}", stage)
            first_index += repeats
        self.vocab_size = vocab_size
        self.loss_chunk = options.loss_chunk

    def __call__(self, tokens: Int[Array, "B T"], context: Context):
        """Hidden states, log-scales and taps by sub-layer."""
        stream = self.ends.start(self.table(tokens))
        collected = []
        for number in range(self.num_stages):
            stream, taps = getattr(self, f"stage_{number}")(stream, context)
            collected.append(taps)
        hidden, log_scale = self.ends.finish(stream)
        taps = {name: jnp.concatenate([t[name] for t in collected]) for name in collected[0]}
        return hidden, log_scale, taps

    def logits_of(self) -> Callable[[Array, Array], Array]:
        """The decoding function of some time steps, over the padded vocabulary."""
        matrix = rules.gather_weight(self.ends.decode_matrix(self.table.rows[...]))
        return lambda hidden, log_scale: self.ends.decode(hidden, log_scale, matrix)


@dataclasses.dataclass(frozen=True, eq=False)  # compared and hashed by identity, for caches
class LanguageModel:
    """A model as pure functions of its parameters.

    Attributes:
        infos: Nested dict like the parameters', with a `ParamInfo` at each leaf.
        vocab_size: True size of the vocabulary.
        warmup_steps: Optimizer steps over which NAG gains are warmed up; 0 for none.
        sublayer_names: Name of each sub-layer, in the order of the taps.
    """

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

    def next_logits(
        self,
        params: dict[str, Any],
        tokens: Int[Array, "B T"],
        position: Int[Array, ""],
        step: Array | int,
    ) -> Float[Array, "B V"]:
        """Logits of the token after `position` alone, for rows that are one document each."""
        module, hidden, log_scale, _ = self._forward(
            params, tokens, jnp.ones_like(tokens), jnp.ones(tokens.shape, bool), step, False
        )
        hidden, log_scale = (
            jax.lax.dynamic_slice_in_dim(x, position, 1, axis=1) for x in (hidden, log_scale)
        )
        return module.logits_of()(hidden, log_scale)[:, 0, : self.vocab_size]

    def _forward(self, params, tokens, segment_ids, valid, step, taps):
        module = self.module(params)
        context = Context(
            segment_ids=segment_ids,
            positions=positions_in_document(segment_ids),
            valid=valid,
            gain_warmup=self.gain_warmup(step),
            taps=taps,
        )
        return module, *module(tokens, context)

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
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        module, hidden, log_scale, _ = self._forward(
            params, tokens, segment_ids, jnp.ones(tokens.shape, bool), step, False
        )
        return module.logits_of()(hidden, log_scale)[..., : self.vocab_size]


def build_model(config: ConfigDict, vocab_size: int) -> LanguageModel:
    """Builds the model of a complete config without making any parameter.

    Args:
        config: The complete config.
        vocab_size: Size of the tokenizer's vocabulary.

    Returns:
        The model.

    Raises:
        ValueError: If a part declares a parameter without axes or role.
    """
    options = config.model

    def make(rngs):
        return Transformer(options, vocab_size, rngs)

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
    return LanguageModel(
        infos=infos,
        vocab_size=vocab_size,
        warmup_steps=connection.warmup_steps(options.connection),
        sublayer_names=SUBLAYERS * options.num_blocks,
        _make=make,
        _definition=definition,
        _structure=jax.tree.structure(state),
    )
