"""What a trained model scores at several rates of skipping, and what that saves: one table.

Rates are those realised on the text that is scored. Thresholds are found by `skipping.py`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nag_jax.analysis.isoflop import LONG_ROW, skip_costs
from nag_jax.evals.skipping import TOLERANCE, by_sublayer, own_sublayers
from nag_jax.models.stages import SUBLAYERS
from nag_jax.tables import markdown_table

if TYPE_CHECKING:
    from nag_jax.runs import Run

STORED = "as stored"


@dataclasses.dataclass(frozen=True)
class SkippingTable:
    """Results by rate.

    Attributes:
        sublayers: As `model.skipping.sublayers`.
        calibration: Name of the text that thresholds were calibrated on.
        row_length: T, for which savings are counted.
        before: Result of the run as it was loaded, with the thresholds stored in training, if any.
        results: Results by target rate, in the order asked for; see `measure`.
        last: The run at the last rate above 0; None where there is none.
    """

    sublayers: str
    calibration: str
    row_length: int
    before: dict[str, Any]
    results: list[dict[str, Any]]
    last: "Run | None"

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        return {
            "sublayers": self.sublayers,
            "calibration": self.calibration,
            "row_length": self.row_length,
            "before_calibration": self.before,
            "rates": self.results,
        }

    def header(self) -> list[str]:
        """Names of the columns of `cells`."""
        return [
            "target",
            *(f"{_name(name)} skipped" for name in SUBLAYERS),
            "loss",
            "bits per byte",
            f"saved, T={self.row_length:,}",
            "saved, long rows",
        ]

    def cells(self) -> list[list[str]]:
        """A row for each result; that of the stored thresholds is first where tokens skip by it."""
        stored = [(STORED, self.before)] if any(self.before["skipped"].values()) else []
        rows = [*stored, *((_percent(result["rate"]), result) for result in self.results)]
        return [
            [
                name,
                *(_rates(values) for values in result["skipped_by_layer"].values()),
                f"{result['loss']:.4f}",
                f"{result['bits_per_byte']:.4f}",
                _percent(result["saved"]["row_length"]),
                _percent(result["saved"]["long_rows"]),
            ]
            for name, result in rows
        ]

    def notes(self) -> list[str]:
        """Sentences to read the table by."""
        before = self.before["skipped"]
        skipped = (
            "attention and feed-forward" if self.sublayers == "both" else _name(self.sublayers)
        )
        tokens = [result["calibration"]["tokens"] for result in self.results if result["rate"]]
        told = f" calibrated on {self.calibration} ({tokens[0]:,} tokens)" if tokens else ""
        notes = [
            f"Tokens skip {skipped} by thresholds{told}; skipped shares are means over layers "
            "(lowest to highest layer) on the text that is scored.",
            "Before calibration "
            + " and ".join(f"{_percent(rate)} skip {_name(name)}" for name, rate in before.items())
            + ".",
            "Saved are FLOPs, at the realised rates: in rows of T tokens, and in the limit of long "
            "rows, where attention is all; the same share in training and in decoding.",
        ]
        for result in self.results:
            found = result["calibration"]
            if found is None:
                continue
            off = {
                name: np.mean(values)
                for name, values in found["skipped"].items()
                if found["sublayers"] in ("both", name)
                and abs(np.mean(values) - found["rate"]) > TOLERANCE
            }
            if off:
                reached = " and ".join(f"{_percent(x)} of {_name(n)}" for n, x in off.items())
                notes.append(
                    f"At {_percent(found['rate'])} the calibration text itself came to {reached} "
                    f"after {found['passes']} passes: equal scores are not divided."
                )
        return notes

    def markdown(self, title: str) -> str:
        """The table under a title, with its notes."""
        notes = "".join(f"{note}\n\n" for note in self.notes())
        return f"# {title}\n\n{notes}{markdown_table(self.header(), self.cells(), '---:')}"


def measure(run: "Run", rows: Any, batch_size: int) -> dict[str, Any]:
    """Scores a run, with the share that skipped and what that saves.

    Returns:
        rate (the target), loss in nats, bits_per_byte, accuracy, tokens, skipped by kind of
        sub-layer and skipped_by_layer in order of execution, saved (a share of forward FLOPs, by
        row_length and long_rows), FLOPs per token of forward and training at the run's row length,
        and how the run was calibrated.
    """
    evaluation = run.score(rows, batch_size)
    none = [0.0] * len(run.model.sublayer_names)
    layers = by_sublayer(run.model, evaluation.taps.get("skipped", none))
    rates = {name: float(np.mean(values)) for name, values in layers.items()}
    config = run.config.copy_and_resolve_references()
    with config.unlocked():
        config.model.loops = run.model.loops
    costs = {
        name: skip_costs(run.model.infos, config, run.model.vocab_size, length)
        for name, length in (("row_length", None), ("long_rows", LONG_ROW))
    }
    return {
        "rate": config.model.skipping.get("rate", 0.0),
        "loss": evaluation.loss,
        "bits_per_byte": evaluation.bits_per_byte,
        "accuracy": evaluation.accuracy,
        "tokens": evaluation.tokens,
        "skipped": rates,
        "skipped_by_layer": layers,
        "saved": {name: cost.saving(rates) for name, cost in costs.items()},
        "forward_flops_per_token": costs["row_length"].forward(rates),
        "training_flops_per_token": costs["row_length"].training(rates),
        "calibration": run.calibration,
    }


def skipping_table(
    run: "Run",
    rates: Sequence[float],
    sublayers: str | None,
    calibration: str,
    rows: Any,
    batch_size: int,
    tell: Callable[[str], None] = lambda text: None,
) -> SkippingTable:
    """Calibrates a run at each rate, and scores it on other text.

    Args:
        run: The run.
        rates: Target rates; 0 is the plain model.
        sublayers: What tokens skip, as in `Run.with_skipping`.
        calibration: What thresholds are found on, as in `Run.calibration_rows`.
        rows: What is scored, from `Run.pack` or `Run.validation_rows`.
        batch_size: Rows per forward pass.
        tell: Called with a sentence on each rate that is done.

    Raises:
        UserError: As in `Run.with_skipping`.
    """
    before = measure(run, rows, batch_size)
    text = run.calibration_rows(calibration) if any(rates) else calibration
    results, last = [], None
    for rate in rates:
        at_rate = run.with_skipping(rate, sublayers, text, batch_size)
        results.append(before if at_rate is run else measure(at_rate, rows, batch_size))
        last = at_rate if rate else last
        tell(f"rate {rate:g}: {results[-1]['bits_per_byte']:.4f} bits per byte")
    return SkippingTable(
        sublayers=sublayers or own_sublayers(run.config),
        calibration=calibration,
        row_length=run.config.data.row_length,
        before=before,
        results=results,
        last=last,
    )


def _name(sublayer: str) -> str:
    return {"feedforward": "feed-forward"}.get(sublayer, sublayer)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _rates(layers: Sequence[float]) -> str:
    """The mean over layers, with the range where they differ."""
    mean, low, high = (100 * float(x) for x in (np.mean(layers), min(layers), max(layers)))
    return f"{mean:.1f} %" + (f" ({low:.1f} to {high:.1f})" if high - low > 0.05 else "")
