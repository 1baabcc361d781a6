"""What a config builds, in a form that two configs can be compared by.

Each probe takes a complete config and returns text or numbers that are equal exactly where the two
configs build the same. `test_overrides` says which probe shows which leaf.
"""

import contextlib
import dataclasses
import functools
import io
import json
import pathlib
import sys
import tempfile
import types
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval
from ml_collections import ConfigDict
from run_helpers import results, saved_steps
from tokenizer_files import CORPUS

from nag_jax.config import validate_devices
from nag_jax.data import building, store
from nag_jax.data import encoding as encoding_lib
from nag_jax.errors import UserError
from nag_jax.evals.bits_per_byte import Evaluation
from nag_jax.kinds import kind_class
from nag_jax.models.transformer import build_model
from nag_jax.optim import build_optimizer
from nag_jax.sharding.mesh import mesh_shape
from nag_jax.training import header, loop, start
from nag_jax.training.state import abstract_state

VOCAB = 30


# --- the model ---


@functools.lru_cache(maxsize=32)
def _model(node: str):
    return build_model(ConfigDict({"model": json.loads(node)}), VOCAB)


def model_of(config):
    """The model for a small vocabulary; one object for equal configs."""
    return _model(json.dumps(config.model.to_dict()))


def _program(function, *args) -> str:
    """The traced program without what its outputs do not need, and its small constants."""
    closed = jax.make_jaxpr(function)(*args)
    jaxpr = closed.jaxpr
    constants = [np.asarray(x).tolist() for x in closed.consts if np.size(x) < 100]
    needed = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
    return f"{needed} {constants}"


def _batch(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    dtypes = {"tokens": jnp.int32, "segment_ids": jnp.int32, "valid": bool}
    return {name: jax.ShapeDtypeStruct((rows, length + 1), dtype) for name, dtype in dtypes.items()}


def _abstract(model):
    return jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), model.infos)


def model(config) -> Any:
    """Parameters with their records, the program that makes them, and the forward program."""
    built = model_of(config)
    return (
        str(built.infos),
        _program(built.init, jax.random.key(0)),
        _program(
            lambda params, batch, step, balance: built.evaluate_batch(
                params, batch, step, True, balance
            ),
            _abstract(built),
            _batch(2, 12),
            jax.ShapeDtypeStruct((), jnp.int32),
            built.balance_shapes,
        ),
        _program(
            built.update_balance,
            built.balance_shapes,
            statistics_of(built),
            jax.ShapeDtypeStruct((), jnp.float32),
        ),
    )


def statistics_of(built) -> Any:
    """Shapes of what a forward pass measures for the balance."""
    return jax.eval_shape(
        lambda params, batch, balance: built.evaluate_batch(params, batch, 0, False, balance)[
            "statistics"
        ],
        _abstract(built),
        _batch(2, 12),
        built.balance_shapes,
    )


def implementations(config) -> Any:
    """What the header of a run says of implementations, or the refusal."""
    try:
        return header.implementations(config)
    except UserError as error:
        return str(error)


def gradient(config) -> str:
    """The program of the loss's gradient."""
    built = model_of(config)

    def loss(params, batch):
        out = built.evaluate_batch(params, batch, 0, False, built.initial_balance())
        return jnp.sum(out["nats"])

    return _program(jax.grad(loss), _abstract(built), _batch(2, 12))


# --- the optimizer ---


def optimizer(config) -> str:
    """The programs of the state's start and of an update."""
    built = model_of(config)
    transform, _ = build_optimizer(config.optimizer, config.train.steps, built.infos)
    params = _abstract(built)
    state = jax.eval_shape(transform.init, params)
    return _program(transform.init, params) + _program(transform.update, params, state, params)


def schedule(config) -> list[float]:
    """The learning rate of every step."""
    steps = config.train.steps
    _, rate = build_optimizer(config.optimizer, steps, {})
    return [float(rate(step)) for step in range(steps)]


# --- the data ---


class Hub(types.ModuleType):
    """The `datasets` library with one data set, and what was asked of it."""

    def __init__(self):
        super().__init__("datasets")

    def load_dataset(self, *args, **options):
        asked = f"{args} {options}"
        return [{"text": asked, "body": "other field"}] * 3


def source(config) -> Any:
    """The source's class, what it lists, and its first documents."""
    node = config.data.source
    built = kind_class("data.source", node.kind)(node)
    documents = [] if node.kind == "python_stdlib" else [*built.documents()]
    return type(built).__name__, built.listing(), documents


def tokenizer(config) -> Any:
    """The tokenizer's class and fingerprint."""
    node = config.data.tokenizer
    built = kind_class("data.tokenizer", node.kind).from_config(node, CORPUS)
    return type(built).__name__, built.fingerprint


def rows(config) -> Any:
    """The prepared rows and their folder."""
    prepared = store.prepare(config.data, progress=False)
    return prepared.fingerprint, str(prepared.folder), prepared.summary


def encoding(config) -> list[int]:
    """How many processes are asked to tokenise; none are started."""
    asked = []

    def encode_in_order(texts, tokenizer, workers, folder):
        asked.append(workers)
        return encoding_lib.encode_in_order(texts, tokenizer, 1, folder)

    config = config.copy_and_resolve_references()
    with (
        tempfile.TemporaryDirectory() as config.data.cache_folder,  # prepared anew
        mock.patch.object(building, "encode_in_order", encode_in_order),
    ):
        store.prepare(config.data, progress=False)
    return asked


# --- the mesh ---


def mesh(config) -> tuple[int, ...]:
    """The mesh of eight devices."""
    validate_devices(config, 8)
    return mesh_shape(config.mesh, 8)


# --- the loop ---


@dataclasses.dataclass
class Watched:
    """What a run did, apart from the work itself, which is left out."""

    done: list[Any] = dataclasses.field(default_factory=list)

    def note(self, *what):
        self.done.append(what)


def run(config, folder: pathlib.Path, trace: bool = False) -> Any:
    """A whole run with its step and evaluation replaced by nothing: what it did, when, and where.

    Args:
        config: The config.
        folder: The workdir.
        trace: Whether to add the program of its real training step.
    """
    watched = Watched()
    real_step, real_stream = loop.configured_step, loop.pipeline.TrainingStream

    def configured_step(config, model, optimizer, schedule):
        if trace:
            state = abstract_state(model, optimizer, loop.make_mesh(config.mesh, jax.devices()))
            function = real_step(config, model, optimizer, schedule)
            batch = _batch(config.train.batch_size, config.data.row_length)
            watched.note("step", _program(function, state, batch))

        def step(state, batch):
            tokens = jnp.sum(batch["tokens"])
            metrics = {"loss": 1.0 * tokens, "tokens": tokens, "finite": 1.0, "taps": {}}
            return dataclasses.replace(state, step=state.step + 1), metrics

        return step

    def initialise(model, optimizer, seed, mesh):
        watched.note("initialise", seed)
        return jax.tree.map(jnp.zeros_like, abstract_state(model, optimizer, mesh))

    def make_evaluator(model, mesh, batch_size):
        watched.note("evaluator", batch_size)

        def evaluate(params, balance, rows, step):
            watched.note("evaluate", step)
            nats = np.array([abs(step - 2.5)])  # best in the middle
            return Evaluation(("a",), nats, np.array([1]), 1, 1.0, 0.0, {})

        return evaluate

    def stream(*args, **options):
        watched.note("stream", *(np.asarray(arg).tolist() for arg in args[1:]), options)
        return real_stream(*args, **options)

    def progress(total_steps, **options):
        watched.note("progress", total_steps, options["peak_flops"])
        return mock.MagicMock(update=lambda step, **numbers: {})

    wandb = types.SimpleNamespace(
        init=lambda **options: watched.note("wandb", options["project"]) or mock.MagicMock()
    )
    with contextlib.ExitStack() as stack:
        for target, replacement in (
            (loop, {"configured_step": configured_step, "make_evaluator": make_evaluator}),
            (loop, {"Progress": progress, "print_model": lambda *args: None}),
            (loop, {"print_implementations": lambda *args: None}),
            (loop, {"measure_matmul_peak": lambda dtype: 1.0}),
            (loop.pipeline, {"TrainingStream": stream}),
            (start, {"initialise": initialise}),
            (jax.profiler, {"start_trace": lambda path: watched.note("profile begins")}),
            (jax.profiler, {"stop_trace": lambda: watched.note("profile ends")}),
        ):
            stack.enter_context(mock.patch.multiple(target, **replacement))
        stack.enter_context(mock.patch.dict(sys.modules, {"wandb": wandb}))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        loop.train(config, folder)
    files = sorted(path.name for path in folder.iterdir())
    return watched.done, files, saved_steps(folder), results(folder)
