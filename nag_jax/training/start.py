"""How a run starts: afresh, from its own newest checkpoint, or from another run.

Also what a checkpoint holds beside arrays, since both ends must agree on it.
"""

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from nag_jax import config as config_lib
from nag_jax.errors import UserError
from nag_jax.models.transformer import LanguageModel
from nag_jax.parameters import flatten
from nag_jax.training import processes
from nag_jax.training.checkpoints import (
    AgreedReader,
    CheckpointReader,
    Checkpoints,
    find_checkpoint,
    folder_documents,
)
from nag_jax.training.state import TrainState, abstract_state, initialise

CONFIG_FILE = "config.json"
POSITION_FILE = "data.json"
MESH_FILE = "mesh.json"
# Marks a checkpoint that was made for use, without an optimizer to go on with.
WEIGHTS_ONLY_FILE = "weights_only.json"
TOKENIZER_FOLDER = "tokenizer"
ITEMS = ("params", "opt_state", "balance")
CARRIED = ("params", "opt", "balance", "data")

# Keys that change how a run is executed but neither what it computes nor in which order: a run may
# go on with other values of these.
RESUMABLE_KEYS = (
    "checkpoint.",
    "data.cache_folder",
    "data.prefetch_rows",
    "data.workers",
    "evaluation.",
    "mesh.",
    "metrics.",
    "model.attention.implementation",
    "model.attention.mixing",
    "model.attention.query_chunk",
    "model.connection.implementation",
    "model.feedforward.exchange",
    "model.feedforward.implementation",
    "model.loss_chunk",
    "model.remat",
    "model.strict_kernels",
    "train.accumulation",
    "train.log_every",
    "train.nan_policy",
    "train.optimizer_diagnostics",
    "train.peak_flops",
    "train.profile_start",
    "train.profile_steps",
    "train.taps",
)


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a run stands.

    Attributes:
        step: Optimizer steps done.
        rows_consumed: Rows of the training order consumed.
        age: Optimizer steps behind the parameters, those of runs it started from included.
    """

    step: int
    rows_consumed: int
    age: int

    def to_json(self, prepared: Any) -> str:
        """The checkpoint's document of it, with the fingerprints of the corpus it counts in."""
        corpus = {
            "fingerprint": prepared.fingerprint,
            "corpus_fingerprint": prepared.corpus_fingerprint,
        }
        return json.dumps(dataclasses.asdict(self) | corpus, indent=1)


@dataclasses.dataclass(frozen=True)
class InitFrom:
    """Another run to start from.

    Attributes:
        path: Its folder, its checkpoints folder or a step folder.
        step: The step, or None for the newest.
        carry: What to take over, from `CARRIED`; always "params".
    """

    path: str
    step: int | None
    carry: tuple[str, ...]

    @property
    def items(self) -> tuple[str, ...]:
        """The items of its checkpoint that are carried."""
        return tuple(item for item in ITEMS if item.removesuffix("_state") in self.carry)


def parse_init_from(value: str, carry: Sequence[str]) -> InitFrom | None:
    """Reads `--init_from=RUN[@step]` and `--carry=params,...`.

    Raises:
        UserError: The step is no number, or something unknown is to be carried.
    """
    unknown = [name for name in carry if name not in CARRIED]
    if unknown or "params" not in carry:
        raise UserError(
            f"--carry={','.join(carry)} must hold params and may add {', '.join(CARRIED[1:])}"
        )
    if not value:
        if tuple(carry) != ("params",):
            raise UserError("--carry says what to take from --init_from, which is not given")
        return None
    path, at, step = value.rpartition("@")
    if "/" in step:  # the @ is part of a folder's name
        at = ""
    if at and not step.isdigit():
        raise UserError(f"--init_from={value}: after @ comes a step, such as {path}@1000")
    return InitFrom(path if at else value, int(step) if at else None, tuple(carry))


def checkpoint_documents(config: ConfigDict, prepared: Any, mesh: Mesh) -> dict[str, str | bytes]:
    """The documents that stay the same while a run is on: config, mesh and tokenizer."""
    return {
        CONFIG_FILE: config_lib.to_json(config),
        MESH_FILE: json.dumps(dict(mesh.shape)),
        **_tokenizer_documents(prepared.tokenizer),
    }


def _tokenizer_documents(tokenizer: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return folder_documents(folder, TOKENIZER_FOLDER)


def check_start(
    checkpoints: CheckpointReader, config: ConfigDict, init_from: InitFrom | None
) -> None:
    """Refuses to start from what is not there, or to go on under a config of another run.

    `--init_from` counts only while there is no checkpoint yet, so that the same command, started
    again, goes on.

    Raises:
        UserError: The config differs in a key that matters (the differences are listed), no
            checkpoint is intact, what is there has no optimizer state, or there is none where
            `--init_from` points.
    """
    if checkpoints.is_empty():
        if init_from is not None:
            _source(init_from)
        return
    # The arrays are left for the restore to check: they may be large.
    documents = checkpoints.read_documents(checkpoints.newest())
    if WEIGHTS_ONLY_FILE in documents:
        raise UserError(
            f"{checkpoints.folder} holds weights that were saved for use, without the optimizer's "
            "state: use another --workdir, with --init_from to start from them"
        )
    saved = _saved_config(documents, config)
    different = [
        line for line in config_lib.diff(saved, config) if not line.startswith(RESUMABLE_KEYS)
    ]
    if different:
        raise UserError(
            f"{checkpoints.folder} holds a run with another config (saved -> asked): "
            + "; ".join(different)
            + ". Use another --workdir, with --init_from to start from this run's weights"
        )


def check_rows(
    checkpoints: CheckpointReader, config: ConfigDict, init_from: InitFrom | None, prepared: Any
) -> None:
    """Refuses to go on in the order of rows that are not those of the checkpoint.

    Raises:
        UserError: The corpus or, for `--carry=data`, the seed differs.
    """
    if not checkpoints.is_empty():
        step = checkpoints.newest()
        where = f"step {step} of {checkpoints.folder}"
        _read_position(checkpoints.read_documents(step), prepared, where)
    elif init_from is not None and "data" in init_from.carry:
        source, step = _source(init_from)
        step = source.newest() if step is None else step
        where, documents = f"step {step} of {source.folder}", source.read_documents(step)
        seed = json.loads(documents[CONFIG_FILE])["seed"]
        if seed != config.seed:
            raise UserError(
                f"--carry=data goes on in the order of the rows of {where}, which its seed {seed} "
                f"decides, but seed={config.seed}: give the same seed, or do not carry data"
            )
        _read_position(documents, prepared, where)


def _saved_config(documents: dict[str, bytes], config: ConfigDict) -> ConfigDict:
    """A checkpoint's config; classes of a user's own are imported only if `config` names them."""
    text = documents[CONFIG_FILE].decode()
    asked = _kinds(config.to_dict())
    own = all(kind in asked for kind in _kinds(json.loads(text)) if ":" in kind)
    return config_lib.from_json(text, allow_user_kinds=own)


def _kinds(tree: dict[str, Any]) -> set[str]:
    return {value for path, value in flatten(tree).items() if path.split("/")[-1] == "kind"}


def start_state(
    checkpoints: Checkpoints,
    config: ConfigDict,
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    prepared: Any,
    init_from: InitFrom | None,
) -> tuple[TrainState, Position]:
    """The state and position that a run starts from, saying which.

    Raises:
        UserError: A checkpoint cannot be used, or was trained on another corpus.
    """
    if not checkpoints.is_empty():
        return _resume(checkpoints, config, model, optimizer, mesh, prepared)
    state = initialise(model, optimizer, config.seed, mesh)
    if init_from is None:
        return state, Position(0, 0, 0)
    return _branch(state, init_from, prepared)


def _resume(checkpoints, config, model, optimizer, mesh, prepared):
    abstract = abstract_state(model, optimizer, mesh)
    step, arrays = checkpoints.restore(None, {item: getattr(abstract, item) for item in ITEMS})
    documents = checkpoints.read_documents(step)
    position = _read_position(documents, prepared, f"step {step} of {checkpoints.folder}")
    print(f"Going on from step {step} of {config.train.steps} in {checkpoints.folder}.")
    changed = config_lib.diff(_saved_config(documents, config), config)
    meshes = [
        ", ".join(f"{axis} {length}" for axis, length in shape.items() if length > 1) or "one"
        for shape in (json.loads(documents[MESH_FILE]), dict(mesh.shape))
    ]
    if meshes[0] != meshes[1]:
        changed.append(f"devices: {meshes[0]} -> {meshes[1]}")
    if changed:
        print(
            f"Changed since it was saved: {'; '.join(changed)}. The rows and their order stay the "
            "same, and results up to rounding."
        )
    return TrainState(**arrays, **_counters(position, abstract)), position


def _branch(state: TrainState, init_from: InitFrom, prepared: Any) -> tuple[TrainState, Position]:
    source, step = _source(init_from)
    values = {item: getattr(state, item) for item in init_from.items}
    step, arrays, carried = source.restore_matching(step, values)
    documents = source.read_documents(step)
    where = f"step {step} of {source.folder}"
    print(f"Starting from {where}, carrying {', '.join(init_from.carry)}:")
    for words, paths in (
        ("kept", carried.kept),
        ("new, as initialised", carried.new),
        ("dropped, without a place here", carried.dropped),
    ):
        print(f"  {words}: {_listed(paths)}")
    if not any(path.startswith("params/") for path in carried.kept):
        raise UserError(f"no parameter of {where} fits this config's model")
    tokenizer = {name: x for name, x in documents.items() if name.startswith(TOKENIZER_FOLDER)}
    if tokenizer != _tokenizer_documents(prepared.tokenizer):
        print("  NOTE: that run had another tokenizer, so its embeddings belong to other tokens")
    if state.balance and "balance" not in arrays:
        print(
            "  NOTE: the balance (of routers, of skipping) starts anew; "
            "--carry=params,balance takes it over"
        )
    if "opt_state" in arrays:
        arrays["opt_state"] = _rewind_schedules(arrays["opt_state"])
    saved = _position(documents)
    rows = saved.rows_consumed if "data" in init_from.carry else 0
    position = Position(0, rows, saved.age)
    return dataclasses.replace(state, **arrays, **_counters(position, state)), position


def _source(init_from: InitFrom) -> tuple[CheckpointReader, int | None]:
    """The reader of the other run's checkpoints, and the step asked for."""
    folder, step_in_path = processes.agreed(lambda: find_checkpoint(init_from.path))
    source = AgreedReader(folder)
    if None not in (init_from.step, step_in_path) and init_from.step != step_in_path:
        raise UserError(
            f"--init_from asks for step {init_from.step}, but {init_from.path} is step "
            f"{step_in_path}"
        )
    step = init_from.step if init_from.step is not None else step_in_path
    if step is not None:
        source.read_documents(step)
    return source, step


def _listed(paths: Sequence[str]) -> str:
    """Paths in words: parameters one by one, the optimizer's many arrays as a number."""
    named = [path for path in paths if not path.startswith("opt_state/")]
    others = len(paths) - len(named)
    if others:
        named.append(f"{others} arrays of the optimizer's state")
    return ", ".join(named) or "none"


def _rewind_schedules(opt_state: Any) -> Any:
    """Sets the schedules' step counts to 0: the new run has a schedule of its own."""

    def is_schedule(node):
        return isinstance(node, optax.ScaleByScheduleState)

    return jax.tree.map(
        lambda node: node._replace(count=_placed(0, node.count)) if is_schedule(node) else node,
        opt_state,
        is_leaf=is_schedule,
    )


def _read_position(documents: dict[str, bytes], prepared: Any, where: str) -> Position:
    fingerprint = read_fingerprints(documents)[0]
    if fingerprint != prepared.fingerprint:
        raise UserError(
            f"the corpus has changed since {where} was saved (fingerprint {fingerprint} then, "
            f"{prepared.fingerprint} now), and its rows would not be the same: restore the files, "
            "or start a new run with --init_from that does not carry data"
        )
    return _position(documents)


def _position(documents: dict[str, bytes]) -> Position:
    saved = json.loads(documents[POSITION_FILE])
    return Position(**{field.name: saved[field.name] for field in dataclasses.fields(Position)})


def _counters(position: Position, like: TrainState) -> dict[str, jax.Array]:
    """The counters of a state at a position, placed as those of `like`."""
    return {name: _placed(getattr(position, name), getattr(like, name)) for name in ("step", "age")}


def _placed(value: int, like: Any) -> jax.Array:
    """A whole number with the dtype and the place of another array, on every process alike."""
    return jax.make_array_from_callback((), like.sharding, lambda _: np.asarray(value, like.dtype))


def restore_folder(documents: dict[str, bytes], prefix: str, folder: epath.Path) -> None:
    """Writes the documents under `prefix` as files in a folder."""
    for name, content in documents.items():
        if name.startswith(f"{prefix}/"):
            path = folder / name.removeprefix(f"{prefix}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def read_fingerprints(documents: dict[str, bytes]) -> tuple[str, str]:
    """Fingerprints of a checkpoint's rows, and of the texts alone that they came from."""
    saved = json.loads(documents[POSITION_FILE])
    return saved["fingerprint"], saved["corpus_fingerprint"]


def read_age(documents: dict[str, bytes]) -> int:
    """Optimizer steps behind a checkpoint's parameters."""
    return _position(documents).age
