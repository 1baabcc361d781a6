"""Bits per byte of a model on whole documents, with the taps measured on the way.

The divisor is the UTF-8 bytes of the original text, so that models with different tokenizers
compare. The beginning-of-document token is not text: predicting it costs nothing here.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nag_jax.data.pipeline import Batch, evaluation_batches
from nag_jax.models.transformer import LanguageModel
from nag_jax.sharding import rules

# A sub-layer whose mean gate on validation text is below this hardly writes: its gate is dead.
DEAD_GATE = 0.01


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What a model scored on a set of documents.

    Attributes:
        document_names: Name of each document.
        document_nats: Negative log-likelihood of each document's text, in nats, float64.
        document_bytes: UTF-8 bytes of each document's original text.
        tokens: Number of targets, beginning-of-document tokens included.
        loss: Mean nats per target.
        accuracy: Share of targets that were the most likely token.
        taps: Mean of each tap over targets, by sub-layer.
    """

    document_names: tuple[str, ...]
    document_nats: np.ndarray
    document_bytes: np.ndarray
    tokens: int
    loss: float
    accuracy: float
    taps: dict[str, list[float]]

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte over all documents."""
        return float(self.document_nats.sum() / self.document_bytes.sum() / math.log(2))

    @property
    def dead_gate_share(self) -> float | None:
        """Share of sub-layers with a dead gate; None for models without gates."""
        if "gate" not in self.taps:
            return None
        return float(np.mean(np.asarray(self.taps["gate"]) < DEAD_GATE))

    def metrics(self) -> dict[str, float]:
        """Flat metrics for the log: totals, and every tap by sub-layer."""
        flat = {
            "validation/bits_per_byte": self.bits_per_byte,
            "validation/loss": self.loss,
            "validation/accuracy": self.accuracy,
            "validation/tokens": float(self.tokens),
        }
        if self.dead_gate_share is not None:
            flat["validation/dead_gate_share"] = self.dead_gate_share
        for name, values in self.taps.items():
            flat |= {f"validation/taps/{name}/{i:03d}": value for i, value in enumerate(values)}
        return flat


def placed_batches(
    rows: Any, batch_size: int, mesh: Mesh
) -> Iterator[tuple[Batch, dict[str, jax.Array]]]:
    """Every row once, in order, in batches: as they are, and on the mesh without their documents.

    Args:
        rows: From `nag_jax.data.store`, with documents.
        batch_size: Rows per batch, rounded up to what the mesh divides; fewer where there are no
            more rows.
        mesh: Where to put them.
    """
    sharding = rules.batch_sharding(mesh)
    for batch in evaluation_batches(rows, padded_size(min(batch_size, len(rows)), mesh)):
        placed = {
            name: jax.make_array_from_callback(
                x.shape, sharding, lambda index, x=x: np.asarray(x)[index]
            )
            for name, x in batch.items()
            if name != "documents"
        }
        yield batch, placed


def padded_size(batch_size: int, mesh: Mesh) -> int:
    """Rows of a batch, rounded up to what the mesh divides."""
    return -(-batch_size // mesh.size) * mesh.size


def score_program(model: LanguageModel, mesh: Mesh) -> Callable:
    """The jitted function that the evaluator runs on each batch.

    It takes (params, balance, batch, step) as `LanguageModel.evaluate_batch` does and returns the
    nats of each target, how many targets were the most likely token, and the summed taps.
    """

    def score(params, balance, batch, step):
        out = model.evaluate_batch(params, batch, step, True, balance)
        return out["nats"], jnp.sum(out["correct"]), out["taps"]

    return jax.jit(score, out_shardings=NamedSharding(mesh, P()))


def make_evaluator(
    model: LanguageModel, mesh: Mesh, batch_size: int
) -> Callable[[Any, Any, Any, int], Evaluation]:
    """Builds a function that scores rows; it compiles once per row length.

    Args:
        model: The model.
        mesh: Where the parameters live.
        batch_size: Rows per batch, as in `placed_batches`; no result depends on it.

    Returns:
        (params, balance, rows, step) -> Evaluation, where rows come from `nag_jax.data.store` and
        step is the number of optimizer steps behind the parameters.
    """
    score = score_program(model, mesh)

    def evaluate(params: Any, balance: Any, rows: Any, step: int) -> Evaluation:
        nats = np.zeros(len(rows.document_names), np.float64)
        tokens, total, correct, taps = 0, 0.0, 0.0, None
        for batch, placed in placed_batches(rows, batch_size, mesh):
            documents = batch["documents"][:, 1:]
            with jax.set_mesh(mesh):
                scored = score(params, balance, placed, jnp.asarray(step, jnp.int32))
            batch_nats, batch_correct, batch_taps = jax.device_get(scored)
            valid = np.asarray(batch["valid"])[:, 1:]
            text = valid & (np.asarray(batch["tokens"])[:, 1:] != rows.bos_id)
            np.add.at(nats, documents[text], batch_nats[text].astype(np.float64))
            tokens += int(valid.sum())
            total += float(batch_nats.sum(dtype=np.float64))
            correct += float(batch_correct)
            batch_taps = jax.tree.map(lambda x: x.astype(np.float64), batch_taps)
            taps = batch_taps if taps is None else jax.tree.map(np.add, taps, batch_taps)
        return Evaluation(
            document_names=tuple(rows.document_names),
            document_nats=nats,
            document_bytes=np.asarray(rows.document_bytes, np.int64),
            tokens=tokens,
            loss=total / max(tokens, 1),
            accuracy=correct / max(tokens, 1),
            taps={name: (x / max(tokens, 1)).tolist() for name, x in (taps or {}).items()},
        )

    return evaluate
