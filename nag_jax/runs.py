"""A trained run in Python: everything a checkpoint holds, with no other argument."""

import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from nag_jax import config as config_lib
from nag_jax.data import store, tokenizers
from nag_jax.errors import UserError
from nag_jax.evals import generate as generation
from nag_jax.evals import skipping
from nag_jax.evals.bits_per_byte import Evaluation, make_evaluator
from nag_jax.evals.loglikelihood import Scored, score_pairs
from nag_jax.kinds import is_registered, kind_class
from nag_jax.models.stages import MAX_LOOPS
from nag_jax.models.transformer import LanguageModel, build_model, with_loops
from nag_jax.parameters import flatten
from nag_jax.sharding.mesh import single_device_mesh
from nag_jax.training import start
from nag_jax.training.checkpoints import (
    FOLDER_NAME,
    CheckpointReader,
    Checkpoints,
    absolute,
    find_checkpoint,
)
from nag_jax.training.state import abstract_balance, abstract_params
from nag_jax.training.workdir import require_possible

# The document that says how a checkpoint's thresholds were found after training.
CALIBRATION_FILE = "calibration.json"


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as it stood at one checkpoint.

    Attributes:
        config: The complete config it was trained with.
        model: The model, as pure functions of parameters.
        params: Parameters on the mesh.
        balance: State that is neither parameter nor optimizer, where the model has any.
        tokenizer: The run's tokenizer.
        step: Optimizer steps of the run at this checkpoint.
        age: Optimizer steps behind the parameters, those of runs it started from included.
        mesh: Where the parameters live.
        fingerprint: Fingerprint of the rows it was trained on (texts, tokenizer, length, split).
        corpus_fingerprint: Fingerprint of the texts alone, to compare across tokenizers.
        documents: The checkpoint's small files, by name.
    """

    config: ConfigDict
    model: LanguageModel
    params: dict[str, Any]
    balance: dict[str, Any]
    tokenizer: Any
    step: int
    age: int
    mesh: Mesh
    fingerprint: str
    corpus_fingerprint: str
    documents: dict[str, bytes] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def calibration(self) -> dict[str, Any] | None:
        """How the thresholds of skipping were found after training; None where they were not.

        A dict of rate (the target), sublayers, data, tokens, passes, and skipped: the share of
        these tokens that skipped each sub-layer, by kind.
        """
        content = self.documents.get(CALIBRATION_FILE)
        return None if content is None else json.loads(content)

    def logits(self, tokens: Any, segment_ids: Any = None) -> jax.Array:
        """Next-token logits.

        Args:
            tokens: int [T] or [B, T], beginning with `tokenizer.bos_id` as in training.
            segment_ids: Document of each position, [B, T]; one document a row by default.

        Returns:
            float32 [T, V] or [B, T, V] over the true vocabulary.
        """
        tokens = jnp.asarray(tokens, jnp.int32)
        batched = jnp.atleast_2d(tokens)
        if segment_ids is not None:
            segment_ids = jnp.asarray(segment_ids, jnp.int32)
        with jax.set_mesh(self.mesh):
            out = _logits(self.model)(self.params, batched, segment_ids, self.age, self.balance)
        return out[0] if tokens.ndim == 1 else out

    def evaluate(self, documents: Iterable[tuple[str, str]], batch_size: int = 16) -> Evaluation:
        """Scores named texts, packed into rows of the length used in training.

        Args:
            documents: (name, text) pairs.
            batch_size: Rows per forward pass; no result depends on it.

        Returns:
            Bits per byte in all and by document, loss, accuracy and taps.

        Raises:
            UserError: There is no text.
        """
        return self.score(self.pack(documents), batch_size)

    def evaluate_validation(self, batch_size: int = 16) -> Evaluation:
        """Scores the validation set the run was trained beside, preparing its corpus if need be.

        Raises:
            UserError: The corpus is not the one it was.
        """
        return self.score(self.validation_rows(), batch_size)

    def pack(self, documents: Iterable[tuple[str, str]]) -> store.MemoryRows:
        """Named texts as rows for `score`; arguments and errors as in `evaluate`."""
        rows = store.pack(documents, self.tokenizer, self.config.data.row_length)
        if not rows.document_names:
            raise UserError("the texts hold no token")
        return rows

    def validation_rows(self) -> store.StoredRows:
        """The run's validation set as rows for `score`; errors as in `evaluate_validation`."""
        prepared = self._corpus()
        if not prepared.validation.document_names:
            raise UserError("the run has no validation documents (data.validation_share)")
        return prepared.validation

    def _corpus(self) -> store.PreparedData:
        prepared = store.prepare(self.config.data)
        if prepared.fingerprint != self.fingerprint:
            raise UserError(
                f"the run's corpus has changed since it was trained (fingerprint "
                f"{self.fingerprint} then, {prepared.fingerprint} now)"
            )
        return prepared

    def score(self, rows: Any, batch_size: int = 16) -> Evaluation:
        """Scores rows from `pack` or `validation_rows`, as `evaluate` does."""
        evaluate = _evaluator(self.model, self.mesh, batch_size)
        return evaluate(self.params, self.balance, rows, self.age)

    def bits_per_byte(self, texts: Iterable[str]) -> float:
        """Bits per byte of some texts, taken together."""
        return self.evaluate((str(i), text) for i, text in enumerate(texts)).bits_per_byte

    def calibration_rows(self, calibration: str) -> skipping.CalibrationRows:
        """Text for `with_skipping`.

        Args:
            calibration: `train:1M` is the first million tokens that the run was trained on, as far
                as there are so many different ones; `validation:200k` the like of its validation
                set; anything else names UTF-8 text files, or is a pattern of them.

        Raises:
            UserError: There is no such text, or the corpus is not the one it was.
        """
        split = skipping.parse_split(calibration)
        if split is not None:
            rows = skipping.rows_of_split(self._corpus(), *split, self.config.seed)
            return skipping.CalibrationRows(calibration, rows)
        try:
            source = kind_class("data.source", "text")(ConfigDict({"paths": (calibration,)}))
        except UserError as error:
            text = str(error).replace("data.source.paths", "calibration")
            raise UserError(text) from error
        documents = ((document.name, document.text) for document in source.documents())
        return skipping.CalibrationRows(calibration, self.pack(documents))

    def with_skipping(
        self,
        rate: float,
        sublayers: str | None = None,
        calibration: str | skipping.CalibrationRows = "train:1M",
        batch_size: int = 16,
    ) -> "Run":
        """The same weights with thresholds at which this share of tokens skips; none move later.

        Args:
            rate: Target share of tokens that skip each sub-layer, below 1; 0 is the plain model.
            sublayers: "both", "attention" or "feedforward"; by default those of the run, and both
                for a run that was trained without skipping.
            calibration: What thresholds are found on, as in `calibration_rows`; several rates can
                share what that returns. See `nag_jax.evals.skipping.calibrate`.
            batch_size: Rows per forward pass; no result depends on it.

        Returns:
            A run that skips, whose `calibration` says which rates were reached.

        Raises:
            UserError: The run's connection has no gate to skip by, or an argument is not allowed.
        """
        sublayers = sublayers or skipping.own_sublayers(self.config)
        config = skipping.skipping_config(self.config, rate, sublayers)
        if rate == 0 and self.config.model.skipping.kind == "none":
            return self
        documents = {k: v for k, v in self.documents.items() if k != CALIBRATION_FILE}
        documents[start.CONFIG_FILE] = config_lib.to_json(config).encode()
        # One model for all rates above 0: thresholds are data, so what is compiled serves them all.
        model = _rebuilt(
            config_lib.to_json(skipping.skipping_config(self.config, rate and 0.5, sublayers)),
            self.tokenizer.vocab_size,
            self.model.loops,
        )
        balance = _fitted(self.balance, abstract_balance(model, self.mesh))
        run = dataclasses.replace(
            self, config=config, model=model, balance=balance, documents=documents
        )
        if rate == 0:
            return run
        skipping.require_gate(self.model, self.params, config.model.connection.kind)
        if isinstance(calibration, str):
            calibration = self.calibration_rows(calibration)
        found = skipping.calibrate(
            model,
            self.params,
            balance,
            calibration.rows,
            rate,
            step=self.age,
            mesh=self.mesh,
            batch_size=batch_size,
        )
        told = {
            "rate": rate,
            "sublayers": sublayers,
            "data": calibration.name,
            "tokens": found.tokens,
            "passes": found.passes,
            "skipped": found.skipped,
        }
        documents[CALIBRATION_FILE] = json.dumps(told, indent=1).encode()
        return dataclasses.replace(run, balance=found.balance, documents=documents)

    def save(self, folder: epath.PathLike) -> None:
        """Saves the run as it is now, such as with thresholds found after training.

        What is written is a run's folder with one checkpoint of the same step: config, weights,
        balance and tokenizer, without the optimizer's state. Everything that uses a run opens it,
        and `--init_from` may start from it; training does not go on in it.

        Args:
            folder: Where to; made if it is not there.

        Raises:
            UserError: It holds a run, cannot be written, or the loop runs another number of times
                than the config says.
            SaveFailed: The checkpoint could not be written.
        """
        folder = absolute(folder)
        require_no_run(folder)
        if self.model.loops != self.config.model.loops:
            raise UserError(
                f"a run whose loop runs {self.model.loops} times instead of "
                f"{self.config.model.loops} cannot be saved: load it without loops"
            )
        checkpoints = Checkpoints(folder / FOLDER_NAME, keep_last=1)
        arrays = {"params": self.params, "opt_state": {}, "balance": self.balance}
        try:
            checkpoints.save(self.step, arrays, self.documents | {start.WEIGHTS_ONLY_FILE: "{}"})
        finally:
            checkpoints.close()

    def loglikelihood(
        self, pairs: Iterable[tuple[str, str]], batch_size: int = 16, progress: bool = True
    ) -> list[Scored]:
        """Scores continuations given their contexts; see `nag_jax.evals.loglikelihood`.

        Args:
            pairs: (context, continuation) pairs; an empty context leaves BOS alone.
            batch_size: Rows per forward pass; no result depends on it.
            progress: Whether to show on stderr how far it is.

        Returns:
            Log-likelihood in nats, whether greedy decoding gives the continuation, and counts of
            tokens, in the order of the pairs.

        Raises:
            UserError: A pair is not two strings of Unicode, or its continuation is empty or longer
                than the model's context (data.row_length).
        """
        return score_pairs(
            self.model,
            self.params,
            self.balance,
            self.tokenizer,
            pairs,
            step=self.age,
            mesh=self.mesh,
            context=self.config.data.row_length,
            batch_size=batch_size,
            progress=progress,
        )

    def generate(
        self, prompt: str, *, on_text: Callable[[str], None] | None = None, **settings: Any
    ) -> generation.Generation:
        """Continues a prompt.

        Args:
            prompt: Text to continue.
            on_text: Called with each piece of text as soon as it is whole.
            **settings: max_tokens, temperature, top_k, top_p and seed, as in
                `nag_jax.evals.generate.generate`.

        Returns:
            The continuation, and why it ended.

        Raises:
            UserError: A setting is out of range, or the prompt leaves no room in the context.
        """
        show = None if on_text is None else lambda _, piece: on_text(piece)
        return self.generate_batch([prompt], on_text=show, **settings)[0]

    def generate_batch(
        self,
        prompts: Sequence[str],
        *,
        on_text: Callable[[int, str], None] | None = None,
        **settings: Any,
    ) -> list[generation.Generation]:
        """Continues prompts of any lengths together, in their order; as `generate`.

        `on_text` is called with the prompt's number too; `batch_size` prompts run at once.
        """
        return generation.generate(
            self.model,
            self.params,
            self.balance,
            self.tokenizer,
            prompts,
            step=self.age,
            mesh=self.mesh,
            context=self.config.data.row_length,
            on_text=on_text,
            **settings,
        )


def require_no_run(folder: epath.Path, flag: str = "folder") -> None:
    """Refuses a folder that holds a run, or cannot be made or written, without making it.

    Args:
        folder: The folder.
        flag: What names it, for the message.

    Raises:
        UserError: If it does, or cannot.
    """
    require_possible(folder, flag)
    if not all(CheckpointReader(path).is_empty() for path in (folder, folder / FOLDER_NAME)):
        raise UserError(f"{flag}={folder} holds a run already: name another folder")


def _fitted(balance: dict[str, Any], abstract: dict[str, Any]) -> dict[str, Any]:
    """The balance for another model of the same weights: what is new there begins at 0."""
    own = flatten(balance)

    def fit(path, leaf):
        zeros = jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        return own.get("/".join(key.key for key in path), zeros)

    return jax.tree_util.tree_map_with_path(fit, abstract)


@functools.lru_cache(maxsize=8)
def _rebuilt(config: str, vocab_size: int, loops: int) -> LanguageModel:
    """The model of a config of which a run was loaded, so that its kinds may be imported."""
    config = config_lib.from_json(config, allow_user_kinds=True)
    return build_model(_for_any_device(config), vocab_size, loops)


# Leaves that may name what only some devices have, and the value that all of them have.
_OF_DEVICES = (
    ("attention", "implementation", "chunked"),
    ("attention", "mixing", "reference"),
    ("connection", "implementation", "reference"),
    ("feedforward", "implementation", "auto"),
    ("feedforward", "exchange", "auto"),
)


def _for_any_device(config: ConfigDict) -> ConfigDict:
    """The config, without insisting on a kernel of the devices that the run was trained on."""
    config = config.copy_and_resolve_references()
    with config.unlocked():
        for part, name, plain in _OF_DEVICES:
            node = config.model[part]
            # A kind of the user's own may mean something else by the name.
            if name in node and is_registered(f"model.{part}", node.kind) and node[name] != plain:
                node[name] = "auto"
    return config


# Kept from call to call, so that each compiles once for each shape of its input.
_evaluator = functools.lru_cache(maxsize=8)(make_evaluator)


@functools.lru_cache(maxsize=8)
def _logits(model: LanguageModel) -> Callable:
    return jax.jit(model.logits)


def load_run(
    path: epath.PathLike,
    step: int | None = None,
    mesh: Mesh | None = None,
    dtype: Any = None,
    *,
    loops: int | None = None,
    allow_user_kinds: bool = False,
) -> Run:
    """Loads a run from its folder, its checkpoints folder or one step's folder.

    Args:
        path: Where it is; relative and `~` paths too.
        step: Which step; the one that `path` names, or the newest intact one, by default.
        mesh: Where to put the parameters, whatever mesh wrote them; one device by default.
        dtype: Dtype of the parameters instead of float32, such as jnp.bfloat16.
        loops: How often the model's loop runs, if not as often as in training.
        allow_user_kinds: Whether a config that names classes of its user's own may import them.

    Returns:
        The run.

    Raises:
        UserError: There is no usable checkpoint, `path` names another step than `step`, or the
            config needs `allow_user_kinds`, or `loops` is out of range.
    """
    if loops is not None and not 1 <= loops <= MAX_LOOPS:
        raise UserError(f"loops is {loops}; it must be between 1 and {MAX_LOOPS}")
    folder, step_in_path = find_checkpoint(path)
    reader = CheckpointReader(folder)
    if None not in (step, step_in_path) and step != step_in_path:
        raise UserError(f"step {step} is asked for, but {path} is step {step_in_path}")
    step = step_in_path if step is None else step
    if step is None:
        step = reader.newest(("params", "balance"))
    documents = reader.read_documents(step)
    config = config_lib.from_json(
        documents[start.CONFIG_FILE].decode(), allow_user_kinds=allow_user_kinds
    )
    with tempfile.TemporaryDirectory() as scratch:
        start.restore_folder(documents, start.TOKENIZER_FOLDER, epath.Path(scratch))
        tokenizer = tokenizers.load(scratch, allow_user_kinds=allow_user_kinds)
    for_here = _for_any_device(config)
    model = build_model(for_here, tokenizer.vocab_size, loops)
    trained = model if loops is None else build_model(for_here, tokenizer.vocab_size)
    mesh = single_device_mesh() if mesh is None else mesh
    abstract = {
        "params": abstract_params(model, mesh, dtype),
        "balance": abstract_balance(trained, mesh),
    }
    _, arrays = reader.restore(step, abstract)
    if loops is not None:
        arrays["balance"] = with_loops(arrays["balance"], model.balance_shapes)
    fingerprint, corpus_fingerprint = start.read_fingerprints(documents)
    return Run(
        config=config,
        model=model,
        params=arrays["params"],
        balance=arrays["balance"],
        tokenizer=tokenizer,
        step=step,
        age=start.read_age(documents),
        mesh=mesh,
        fingerprint=fingerprint,
        corpus_fingerprint=corpus_fingerprint,
        documents=documents,
    )
