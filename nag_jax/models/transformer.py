"""A language model as pure functions of its parameters: loss, logits and decoding.

Parameters and everything else that changes go in as nested dicts, everything measured comes out.
The stack itself is in `blocks.py`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from nag_jax.kinds import kind_class
from nag_jax.models.attention import EXECUTED
from nag_jax.models.blocks import SKIPPING, Balance, Cache, Transformer
from nag_jax.models.cache import cache_shapes
from nag_jax.models.context import Context, Decoding, positions_in_document
from nag_jax.models.linear import Numerics
from nag_jax.models.stages import SUBLAYERS, pattern_of, stages_of
from nag_jax.parameters import flatten, info_of
from nag_jax.sharding import rules

# The state between tokens: the stages' caches, the column of the next token, each row's first one.
DecodeState = dict[str, Any]


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
        balance_shapes: Shapes of the balance, empty for models that have none.
    """

    options: ConfigDict
    loops: int
    infos: dict[str, Any]
    vocab_size: int
    warmup_steps: int
    sublayer_names: tuple[str, ...]
    balance_shapes: Balance
    _make: Callable[[nnx.Rngs], Transformer]
    _definition: Any
    _structure: Any

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Initial parameters, float32, as nested dicts."""
        return nnx.to_pure_dict(nnx.split(self._make(nnx.Rngs(params=key)))[1])

    def initial_balance(self) -> Balance:
        """The balance at the start of training: zeros."""
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.balance_shapes)

    @property
    def decoding_infos(self) -> dict[str, Any]:
        """`infos` as decoding holds the parameters: matrices in the dtype that they multiply in.

        Cast for every token, weights in float32 would be read and written again each time. A part
        of role "matrix" must not multiply in another dtype.
        """
        dtype = jnp.dtype(self.options.compute_dtype)
        return jax.tree.map(
            lambda info: dataclasses.replace(info, dtype=dtype) if info.role == "matrix" else info,
            self.infos,
        )

    def decoding_params(self, params: dict[str, Any]) -> dict[str, Any]:
        """The parameters as `decoding_infos` says; what is no matrix as it is."""
        return jax.tree.map(
            lambda x, info: x.astype(info.dtype) if info.role == "matrix" else x,
            params,
            self.decoding_infos,
        )

    @property
    def skipping(self) -> Any:
        """The model's kind of skipping."""
        return _skipping(self.options)

    def update_balance(
        self, balance: Balance, statistics: dict[str, Any], progress: Array | float
    ) -> tuple[Balance, dict[str, Array]]:
        """The balance after an optimizer step.

        Args:
            balance: The balance that the step's forward passes read.
            statistics: Their statistics, summed over micro-batches.
            progress: The step's number over the run's steps.

        Returns:
            The new balance, and what to log of the statistics: by name, for each layer that has it.
        """
        pattern, new, told = pattern_of(self.options), {}, {}
        for stage, sizes in stages_of(self.options, self.loops).items():
            for block, position in zip(sizes.block_names, sizes.positions, strict=True):
                for name, values in balance.get(stage, {}).get(block, {}).items():
                    if name == SKIPPING:
                        continue
                    options = pattern[position][name]
                    update = kind_class(f"model.{name}", options.kind).update_balance
                    updated, measured = jax.vmap(functools.partial(update, options))(
                        values, statistics[stage][block][name]
                    )
                    new.setdefault(stage, {}).setdefault(block, {})[name] = updated
                    for key, value in measured.items():
                        told.setdefault(f"{name}_{key}", []).append(value)
        thresholds = skipping_part(balance)
        if thresholds:
            found = self.skipping.update(thresholds, skipping_part(statistics), progress)
            new = with_thresholds(new, found)
            for name in self.skipping.sublayers:
                told[f"{name}_threshold"] = [
                    part[name].reshape(-1) for blocks in found.values() for part in blocks.values()
                ]
        return new, {key: jnp.concatenate(values) for key, values in told.items()}

    def _required(self, balance: Balance | None) -> Balance:
        if balance is None and self.balance_shapes:
            raise ValueError("this model has a balance: pass it, or model.initial_balance()")
        return balance or {}

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
        balance: Balance | None = None,
    ) -> tuple[Float[Array, "B V"], DecodeState]:
        """Runs whole prompts and keeps what later tokens need of them.

        Args:
            params: Parameters.
            tokens: One prompt a row, each with its padding on the left.
            start: Column of each prompt's first token.
            length: Columns of the cache: how far the rows may grow, P included.
            step: Optimizer steps behind the parameters.
            balance: The model's balance, where it has any.

        Returns:
            Logits of the token after each prompt, and the state for `decode_step`.
        """
        batch, columns = tokens.shape
        cache = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.cache_shapes(batch, length)
        )
        state = {"cache": cache, "position": jnp.int32(0), "start": start}
        segment_ids = (jnp.arange(columns) >= start[:, None]).astype(jnp.int32)
        return self._decode(params, tokens, segment_ids, state, step, balance, True)

    def decode_step(
        self,
        params: dict[str, Any],
        tokens: Int[Array, " B"],
        state: DecodeState,
        step: Array | int,
        balance: Balance | None = None,
    ) -> tuple[Float[Array, "B V"], DecodeState]:
        """Adds one token to each row: logits of the next one, and the state after it."""
        tokens = tokens[:, None]
        return self._decode(params, tokens, jnp.ones_like(tokens), state, step, balance, False)

    def cache_shapes(self, batch: int, length: int) -> dict[str, Cache]:
        """Shapes and dtypes of the cache of `batch` rows of `length` columns, by stage."""
        options = self.options
        dtype = Numerics(options.compute_dtype).dtype

        pattern = pattern_of(options)
        skipping = self.skipping
        marks = skipping.only_executed_keys and "attention" in skipping.sublayers

        def shapes(branch_options, name, entries):
            branch = kind_class(f"model.{name}", branch_options.kind)
            one = cache_shapes(
                branch, branch_options, options.d_model, batch, length, dtype, name == "attention"
            )
            if name == "attention" and marks:
                one = one | {EXECUTED: jax.ShapeDtypeStruct((batch, length), bool)}
            return {
                key: jax.ShapeDtypeStruct((entries, *leaf.shape), leaf.dtype)
                for key, leaf in one.items()
            }

        return {
            stage: {
                block: {
                    name: shapes(pattern[position][name], name, sizes.repeats * sizes.loops)
                    for name in SUBLAYERS
                }
                for block, position in zip(sizes.block_names, sizes.positions, strict=True)
            }
            for stage, sizes in stages_of(options, self.loops).items()
        }

    def _decode(self, params, tokens, segment_ids, state, step, balance, prefill):
        module = self.module(params)
        position, start = state["position"], state["start"]
        columns = position + jnp.arange(tokens.shape[1])
        context = Context(
            segment_ids=segment_ids,
            positions=jnp.maximum(columns - start[:, None], 0),
            valid=segment_ids > 0,
            gain_warmup=self.gain_warmup(step),
            only_executed_keys=self.skipping.only_executed_keys,
            taps=False,
            decoding=Decoding(position, start, prefill),
        )
        out = module(tokens, context, self._required(balance), state["cache"])
        logits = module.logits_of()(out.hidden[:, -1:], out.log_scale[:, -1:])
        logits = logits[:, 0, : self.vocab_size]
        cache = jax.tree.map(
            lambda leaf: rules.constrain(leaf, None, "batch", *(None,) * (leaf.ndim - 2)), out.cache
        )
        return logits, state | {"cache": cache, "position": position + tokens.shape[1]}

    def _forward(self, params, tokens, segment_ids, valid, step, taps, balance, packed=True):
        module = self.module(params)
        context = Context(
            segment_ids=segment_ids,
            positions=positions_in_document(segment_ids),
            valid=valid,
            gain_warmup=self.gain_warmup(step),
            only_executed_keys=self.skipping.only_executed_keys,
            taps=taps,
            packed=packed,
        )
        return module, module(tokens, context, self._required(balance))

    def evaluate_batch(
        self,
        params: dict[str, Any],
        batch: dict[str, Array],
        step: Array | int,
        taps: bool,
        balance: Balance | None = None,
    ) -> dict[str, Any]:
        """Runs a batch.

        Args:
            params: Parameters.
            batch: tokens and segment_ids int32 [B, T+1], valid bool [B, T+1].
            step: Optimizer steps behind the parameters, for the gain's warm-up.
            taps: Whether to measure sub-layers.
            balance: The model's balance, where it has any.

        Returns:
            nats and correct [B, T] (at least float32, 0 where the target is not valid); summed over
            valid targets: taps, each [sub-layers], auxiliary_loss in nats (None where no branch has
            any), and the statistics for `update_balance`.
        """
        valid = batch["valid"][:, 1:]
        inputs = batch["tokens"][:, :-1], batch["segment_ids"][:, :-1]
        module, out = self._forward(params, *inputs, valid, step, taps, balance)
        nats, correct = module.cross_entropy(out, batch["tokens"][:, 1:])
        return {
            "nats": jnp.where(valid, nats, 0),
            "correct": jnp.where(valid, correct, 0),
            "taps": out.taps,
            "auxiliary_loss": out.auxiliary_loss,
            "statistics": out.statistics,
        }

    def logits(
        self,
        params: dict[str, Any],
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        step: Array | int = 0,
        balance: Balance | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits over the true vocabulary; a row is one document unless `segment_ids` is given."""
        packed = segment_ids is not None
        if not packed:
            segment_ids = jnp.ones_like(tokens)
        everywhere = jnp.ones(tokens.shape, bool)
        module, out = self._forward(
            params, tokens, segment_ids, everywhere, step, False, balance, packed
        )
        return module.logits_of()(out.hidden, out.log_scale)[..., : self.vocab_size]


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
        balance_shapes=_balance_shapes(options, loops),
        _make=make,
        _definition=definition,
        _structure=jax.tree.structure(state),
    )


def _skipping(options: ConfigDict) -> Any:
    return kind_class("model.skipping", options.skipping.kind)(options.skipping)


def skipping_part(balance: Balance) -> Balance:
    """Thresholds, or their histograms, by stage, block name and sub-layer."""
    found = {
        stage: {block: parts[SKIPPING] for block, parts in blocks.items() if SKIPPING in parts}
        for stage, blocks in balance.items()
    }
    return {stage: blocks for stage, blocks in found.items() if blocks}


def with_thresholds(balance: Balance, thresholds: Balance) -> Balance:
    """The balance with these thresholds, a tree like `skipping_part`'s."""
    new = {stage: dict(blocks) for stage, blocks in balance.items()}
    for stage, blocks in thresholds.items():
        for block, values in blocks.items():
            of_stage = new.setdefault(stage, {})
            of_stage[block] = of_stage.get(block, {}) | {SKIPPING: values}
    return new


def with_loops(balance: Balance, shapes: Balance) -> Balance:
    """The balance for a model of these shapes, whose loop runs more or less often.

    Thresholds of further runs are those of the last.
    """

    def fit(x: Array, shape: jax.ShapeDtypeStruct) -> Array:
        return x[:, jnp.minimum(jnp.arange(shape.shape[1]), x.shape[1] - 1)]

    fitted = jax.tree.map(fit, skipping_part(balance), skipping_part(shapes))
    return with_thresholds(balance, fitted)


def _balance_shapes(options: ConfigDict, loops: int) -> Balance:
    """Shapes of the balance, by the kinds' own `balance_shapes`, and of the thresholds."""
    pattern, shapes = pattern_of(options), {}
    skipped = _skipping(options).sublayers
    for stage, sizes in stages_of(options, loops).items():
        for block, position in zip(sizes.block_names, sizes.positions, strict=True):
            if skipped:
                threshold = jax.ShapeDtypeStruct((sizes.repeats, sizes.loops), jnp.float32)
                shapes.setdefault(stage, {})[block] = {SKIPPING: dict.fromkeys(skipped, threshold)}
            for name, own in pattern[position].items():
                kind = kind_class(f"model.{name}", own.kind)
                if hasattr(kind, "balance_shapes"):
                    shapes.setdefault(stage, {}).setdefault(block, {})[name] = {
                        key: jax.ShapeDtypeStruct((sizes.repeats, *shape), jnp.float32)
                        for key, shape in kind.balance_shapes(own).items()
                    }
    return shapes
