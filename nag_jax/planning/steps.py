"""The programs that a plan can be made of: a training step, a batch of evaluation, a token.

Each is lowered as the code that runs it jits it, for abstract arguments on a mesh, and says by
formula what one device does in it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from nag_jax.analysis import flops
from nag_jax.analysis.optimizer_flops import update_flops
from nag_jax.analysis.roofline import Work, training_bytes
from nag_jax.evals.bits_per_byte import padded_size, score_program
from nag_jax.evals.generate import bucket, decode_programs, padded_count
from nag_jax.models.transformer import LanguageModel, build_model
from nag_jax.optim import build_optimizer
from nag_jax.parameters import flatten
from nag_jax.sharding import rules
from nag_jax.training.state import abstract_balance, abstract_params, abstract_state
from nag_jax.training.step import configured_step, jit_train_step


class Step(Protocol):
    """A program to plan.

    Attributes:
        name: Its name, a key of `roofline.ASSUMPTIONS`.
        config: The complete config.
        model: The model.
        optimizer: The optimizer; None where none is run.
    """

    name: str
    config: ConfigDict
    model: LanguageModel
    optimizer: optax.GradientTransformation | None

    def title(self, mesh: Mesh) -> str:
        """What it is, in words."""
        ...

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        """The program for a mesh, with that mesh set."""
        ...

    def work(self, mesh: Mesh, link_bytes: float) -> Work:
        """What one device does in it, given what it receives from others."""
        ...


@dataclasses.dataclass(frozen=True)
class TrainingStep:
    """One optimizer step, all micro-batches of it."""

    config: ConfigDict
    model: LanguageModel
    optimizer: optax.GradientTransformation
    schedule: Callable
    optimizer_state: Any  # shapes alone, which no mesh changes
    name = "train"

    @classmethod
    def of(cls, config: ConfigDict, vocab_size: int) -> "TrainingStep":
        """The step of a complete config."""
        model = build_model(config, vocab_size)
        optimizer, schedule = build_optimizer(config.optimizer, config.train.steps, model.infos)
        params = jax.tree.map(
            lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), model.infos
        )
        return cls(config, model, optimizer, schedule, jax.eval_shape(optimizer.init, params))

    def title(self, mesh: Mesh) -> str:
        """What it is, in words."""
        del mesh
        rows, parts = self.config.train.batch_size, self.config.train.accumulation
        return f"training step of {rows:,} rows in {parts} micro-batches"

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        """The program for a mesh, with that mesh set."""
        function = configured_step(self.config, self.model, self.optimizer, self.schedule)
        step = jit_train_step(function, self.model, self.optimizer, mesh)
        state = abstract_state(self.model, self.optimizer, mesh)
        return step.lower(state, _batch(self.config.train.batch_size, self.config, mesh))

    def work(self, mesh: Mesh, link_bytes: float) -> Work:
        """What one device does in it, given what it receives from others."""
        config, infos, devices = self.config, self.model.infos, mesh.size
        tokens = config.train.batch_size * config.data.row_length
        parts = flops.forward_flops(infos, config, self.model.vocab_size)
        forward = sum(parts.values())
        # The decode is computed again in any case, to keep no logits.
        again = forward if config.model.remat == "nothing_saveable" else parts["decode"]
        update = update_flops(config.optimizer, infos)
        dtype = jnp.dtype(config.model.compute_dtype)
        weights = dtype.itemsize * _weights_in_use(infos, mesh)
        return Work(
            model_flops=flops.TRAINING_FACTOR * forward * tokens / devices,
            again_flops=again * tokens / devices,
            optimizer_flops=update.shared / devices
            + update.repeated * mesh.shape["data"] / devices,
            memory_bytes=training_bytes(
                self.memory_estimate(mesh), weights, config.train.accumulation
            ),
            link_bytes=link_bytes,
            tokens=tokens,
            devices=devices,
            float32=dtype.itemsize > 2,
            optimizer_float32=config.optimizer.get("newton_schulz_dtype") != "bfloat16",
        )

    def memory_estimate(self, mesh: Mesh) -> dict[str, float]:
        """The formula's bytes on a device, by purpose."""
        return flops.memory_estimate(self.model.infos, self.config, self.optimizer_state, mesh)


@dataclasses.dataclass(frozen=True)
class EvaluationStep:
    """One batch of the evaluator."""

    config: ConfigDict
    model: LanguageModel
    optimizer = None
    name = "evaluate"

    def rows(self, mesh: Mesh) -> int:
        """Rows of a batch."""
        return padded_size(self.config.evaluation.batch_size, mesh)

    def title(self, mesh: Mesh) -> str:
        """What it is, in words."""
        return f"evaluation of {self.rows(mesh):,} rows"

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        """The program for a mesh, with that mesh set."""
        params, balance = _variables(self.model, mesh)
        batch = _batch(self.rows(mesh), self.config, mesh)
        step = _whole((), jnp.int32, mesh)
        return score_program(self.model, mesh).lower(params, balance, batch, step)

    def work(self, mesh: Mesh, link_bytes: float) -> Work:
        """What one device does in it, given what it receives from others."""
        length = self.config.data.row_length
        tokens = self.rows(mesh) * length
        infos = self.model.infos
        return _forward_work(self.config, self.model, infos, mesh, tokens, length, 0, link_bytes)


@dataclasses.dataclass(frozen=True)
class DecodingStep:
    """One token for each of some rows, whose cache holds `context` columns.

    Attributes:
        batch_size: Rows that are wanted; those that run are as many as `generate` runs for them.
        context: Tokens of a row up to the new one, which it sees too.
    """

    config: ConfigDict
    model: LanguageModel
    batch_size: int
    context: int
    optimizer = None
    name = "decode"

    def rows(self, mesh: Mesh) -> int:
        """Rows that run."""
        return padded_count(self.batch_size, mesh)

    def title(self, mesh: Mesh) -> str:
        """What it is, in words."""
        return f"decoding a token for {self.rows(mesh):,} rows, each at {self.context:,}"

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        """The program for a mesh, with that mesh set."""
        programs, rows = decode_programs(self.model), self.rows(mesh)
        params, balance = _variables(self.model, mesh)
        params = jax.tree.map(
            lambda leaf, info: jax.ShapeDtypeStruct(leaf.shape, info.dtype, sharding=leaf.sharding),
            params,
            self.model.decoding_infos,
        )
        variables = params, balance
        one_each = _whole((rows,), jnp.int32, mesh)
        step = _whole((), jnp.int32, mesh)
        keys = jax.eval_shape(jax.vmap(jax.random.key), one_each)
        keys = _whole((rows,), keys.dtype, mesh)
        settings = tuple(_whole((), dtype, mesh) for dtype in (jnp.float32, jnp.int32, jnp.float32))
        first = functools.partial(programs.first, length=bucket(self.context))
        prompt = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
        _, state = jax.eval_shape(
            first, variables, prompt, one_each, step=step, keys=keys, settings=settings
        )
        placed = jax.tree.map(lambda leaf: _whole(leaf.shape, leaf.dtype, mesh), state)
        split = NamedSharding(mesh, P(None, rules.BATCH_AXES))  # as the model pins it
        placed["cache"] = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split),
            state["cache"],
        )
        return programs.advance.lower(variables, placed, one_each, step, keys, settings)

    def work(self, mesh: Mesh, link_bytes: float) -> Work:
        """What one device does in it, given what it receives from others."""
        rows = self.rows(mesh)
        cache = self.model.cache_shapes(rows, bucket(self.context))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
        # A row of so many columns has, on average, as many to see as this token.
        length = 2 * self.context - 1
        infos, read = self.model.decoding_infos, size / rules.batch_shards(mesh)
        return _forward_work(self.config, self.model, infos, mesh, rows, length, read, link_bytes)


def _forward_work(config, model, infos, mesh, tokens, length, read, link_bytes) -> Work:
    """A forward pass of `tokens`, by causal rows of `length`, that reads so much beside weights."""
    forward = sum(flops.forward_flops(infos, config, model.vocab_size, length).values())
    return Work(
        model_flops=forward * tokens / mesh.size,
        again_flops=0.0,
        optimizer_flops=0.0,
        memory_bytes=flops.weight_traffic(infos, config, tokens, mesh) + read,
        link_bytes=link_bytes,
        tokens=tokens,
        devices=mesh.size,
        float32=jnp.dtype(config.model.compute_dtype).itemsize > 2,
        optimizer_float32=False,
    )


def _whole(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """An array that is whole on every device."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))


def _variables(model: LanguageModel, mesh: Mesh) -> tuple[Any, Any]:
    return abstract_params(model, mesh), abstract_balance(model, mesh)


def _batch(rows: int, config: ConfigDict, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    shape, sharding = (rows, config.data.row_length + 1), rules.batch_sharding(mesh)
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for name, dtype in (("tokens", "int32"), ("segment_ids", "int32"), ("valid", "bool"))
    }


def _weights_in_use(infos: dict[str, Any], mesh: Mesh) -> int:
    """Numbers in the weights that a device multiplies with, gathered along the width."""
    return sum(
        math.prod(
            NamedSharding(mesh, rules.use_spec(info.axes, info.shape, mesh)).shard_shape(info.shape)
        )
        for info in flatten(infos).values()
    )
