"""Runs beside one another: at equal steps, tokens, FLOPs or time, paired by seed, with intervals.

Runs that differ in no key but the seed are one group. Runs on different corpora are not compared.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from scipy import stats

from nag_jax.dotted import flatten
from nag_jax.errors import UserError
from nag_jax.tables import csv_table, markdown_table
from nag_jax.training.checkpoints import CheckpointReader
from nag_jax.training.metrics import read_metrics

CONFIDENCE = 0.95

# Keys that say where and how a run is made, not what it is.
_NOT_COMPARED = ("seed", "metrics.", "checkpoint.", "data.cache_folder", "data.workers")


class Run(NamedTuple):
    """What is known of a run.

    Attributes:
        name: Its folder's name.
        leaves: Its config by dotted path.
        corpus: Fingerprint of its corpus.
        points: (step, value) of the compared metric, ascending.
        tokens: Tokens of a step.
        flops: Model FLOPs of a step, the optimizer's not counted; NaN where none were logged.
        seconds: Median seconds of a step; NaN likewise.
    """

    name: str
    leaves: dict[str, Any]
    corpus: str
    points: list[tuple[float, float]]
    tokens: float
    flops: float
    seconds: float


# What a step costs, by the word that --at takes.
COSTS: dict[str, Callable[[Run], float]] = {
    "steps": lambda run: 1.0,
    "tokens": lambda run: run.tokens,
    "flops": lambda run: run.flops,
    "time": lambda run: run.seconds,
}


class Group(NamedTuple):
    """Runs that differ in the seed alone.

    Attributes:
        label: What tells it from the other groups, "key=value, ...".
        values: The value of each run, by seed.
        curve: (cost, mean over seeds) points.
    """

    label: str
    values: dict[int, float]
    curve: list[tuple[float, float]]


class Comparison(NamedTuple):
    """Groups at an equal cost.

    Attributes:
        metric: Name of the metric.
        at: "steps", "tokens", "flops" or "time" (seconds).
        budget: The cost all groups are compared at: what the shortest run reached.
        groups: From the lowest mean value on.
        baseline: Label of the group that others are paired with.
    """

    metric: str
    at: str
    budget: float
    groups: list[Group]
    baseline: str

    def rows(self) -> list[dict[str, Any]]:
        """One dict a group: label, seeds, mean, half width of its interval, paired difference."""
        base = next(group for group in self.groups if group.label == self.baseline)
        rows = []
        for group in self.groups:
            mean, half = interval(list(group.values.values()))
            pairs = sorted(group.values.keys() & base.values.keys())
            difference = half_difference = float("nan")
            if group is not base and pairs:
                difference, half_difference = interval(
                    [group.values[seed] - base.values[seed] for seed in pairs]
                )
            rows.append(
                {
                    "run": group.label,
                    "seeds": len(group.values),
                    "mean": mean,
                    "half_width": half,
                    "pairs": len(pairs),
                    "difference": difference,
                    "difference_half_width": half_difference,
                }
            )
        return rows

    def markdown(self) -> str:
        """The table, with a line that says what it is."""
        told = (
            f"{self.metric} at {self.budget:,.6g} {_UNITS[self.at]}; ± is half of a "
            f"{CONFIDENCE:.0%} confidence interval (Student's t over seeds); differences are "
            f"paired by seed with {self.baseline}.\n\n"
        )
        cells = []
        for row in self.rows():
            difference = (
                ""
                if np.isnan(row["difference"])
                else _told(row["difference"], row["difference_half_width"], "+")
            )
            mean = _told(row["mean"], row["half_width"], "")
            cells.append((row["run"], row["seeds"], mean, difference, row["pairs"]))
        return told + markdown_table(("run", "seeds", "mean", "difference", "pairs"), cells)

    def csv(self) -> str:
        """The table as CSV, with the budget in every row."""
        shared = {"metric": self.metric, "at": self.at, "budget": self.budget}
        return csv_table([shared | row for row in self.rows()])


_UNITS = {"steps": "steps", "tokens": "tokens", "flops": "FLOPs", "time": "seconds"}


def read_run(folder: epath.Path, metric: str) -> Run:
    """Reads what is compared of a run.

    Raises:
        UserError: There is no run, or its metrics never name `metric`.
    """
    lines = read_metrics(folder)
    points = [(float(line["step"]), line[metric]) for line in lines if metric in line]
    if not points:
        names = sorted({name for line in lines for name in line if "/" in name})
        near = [name for name in names if name.split("/")[0] == metric.split("/")[0]] or names
        raise UserError(f"{folder} has no metric {metric}; it has {', '.join(near[:12])}")
    reader = CheckpointReader(folder / "checkpoints", checksums=False)
    leaves = flatten(json.loads(reader.read_documents(reader.newest())["config.json"]))
    timed = [line for line in lines if "throughput/seconds_per_step" in line]
    seconds = [line["throughput/seconds_per_step"] for line in timed]
    flops = [
        line["throughput/model_flops_per_second"] * line["throughput/seconds_per_step"]
        for line in timed
    ]
    return Run(
        name=folder.name,
        leaves=leaves,
        corpus=next((line["corpus"] for line in lines if "corpus" in line), ""),
        points=points,
        tokens=float(leaves["train.batch_size"] * leaves["data.row_length"]),
        flops=float(np.median(flops)) if flops else float("nan"),
        seconds=float(np.median(seconds)) if seconds else float("nan"),
    )


def compare(
    runs: Sequence[Run], metric: str, at: str = "steps", baseline: str | None = None
) -> Comparison:
    """Groups runs and takes each one's value where the shortest of them ends.

    Values between two measurements lie on the line between them.

    Args:
        runs: Two or more.
        metric: Its name, for the table; lower is better.
        at: What is equal: a word of `COSTS`.
        baseline: Label, or the beginning of one label, of the group that others are paired with;
            by default the best.

    Raises:
        UserError: Fewer than two groups, different corpora, two runs of a group with the same seed,
            no costs of this kind in the metrics, or no such baseline.
    """
    corpora = {run.corpus: run.name for run in runs}
    if len(corpora) > 1:
        told = ", ".join(f"{name} ({corpus})" for corpus, name in corpora.items())
        raise UserError(f"runs on different corpora cannot be compared: {told}")
    if lacking := [run.name for run in runs if not np.isfinite(COSTS[at](run))]:
        raise UserError(f"{lacking[0]} has not logged what --at={at} needs")
    budget = min(run.points[-1][0] * COSTS[at](run) for run in runs)
    late = [run for run in runs if run.points[0][0] * COSTS[at](run) > budget]
    if late:
        raise UserError(
            f"{late[0].name} was first measured after {budget:.6g} {_UNITS[at]}, where the "
            "shortest run ends: evaluate more often"
        )
    members: dict[str, list[Run]] = {}
    for label, run in zip(labels(runs), runs, strict=True):
        members.setdefault(label, []).append(run)
    groups = [_group(label, each, at, budget) for label, each in members.items()]
    if len(groups) < 2:
        raise UserError("all runs differ in nothing but the seed: there is nothing to compare")
    groups.sort(key=lambda group: np.mean(list(group.values.values())))
    if baseline is None:
        chosen = groups[0].label
    else:
        found = [g.label for g in groups if g.label == baseline] or [
            g.label for g in groups if g.label.startswith(baseline)
        ]
        if len(found) != 1:
            raise UserError(
                f"--baseline={baseline} names {len(found) or 'none'} of the groups: "
                + "; ".join(g.label for g in groups)
            )
        (chosen,) = found
    return Comparison(metric, at, budget, groups, chosen)


def labels(runs: Sequence[Run]) -> list[str]:
    """What tells each run from the others but its seed: "key=value, ...", keys by their ends."""
    keys = dict.fromkeys(key for run in runs for key in run.leaves)
    varied = [
        key
        for key in keys
        if not key.startswith(_NOT_COMPARED)
        and len({str(run.leaves.get(key, _ABSENT)) for run in runs}) > 1
    ]
    # Leaves that only some kinds have follow from the kind, unless they are all that differs.
    everywhere = [key for key in varied if all(key in run.leaves for run in runs)]
    own = [key for key in varied if key not in everywhere and _differs_within_kind(runs, key)]
    return [
        ", ".join(
            f"{'.'.join(key.split('.')[-2:])}={run.leaves[key]}"
            for key in (*everywhere, *own)
            if key in run.leaves
        )
        for run in runs
    ]


_ABSENT = object()


def _differs_within_kind(runs: Sequence[Run], key: str) -> bool:
    """Whether runs that chose the same kind of part differ in a key of it."""
    kind = f"{key.rpartition('.')[0]}.kind"
    values: dict[str, set[str]] = {}
    for run in runs:
        if key in run.leaves:
            values.setdefault(str(run.leaves.get(kind)), set()).add(str(run.leaves[key]))
    return any(len(found) > 1 for found in values.values())


def _group(label: str, runs: Sequence[Run], at: str, budget: float) -> Group:
    values: dict[int, float] = {}
    for run in runs:
        seed = run.leaves["seed"]
        if seed in values:
            raise UserError(f"two runs are alike, seed {seed} included: {label or run.name}")
        values[seed] = value_at(run, at, budget)
    steps = sorted({step for run in runs for step, _ in run.points})
    shared = [s for s in steps if all(s <= run.points[-1][0] for run in runs)]
    shared = [s for s in shared if all(s >= run.points[0][0] for run in runs)]
    curve = [
        (
            float(np.mean([COSTS[at](run) for run in runs])) * step,
            float(np.mean([value_at(run, "steps", step) for run in runs])),
        )
        for step in shared
    ]
    return Group(label, values, curve)


def value_at(run: Run, at: str, cost: float) -> float:
    """The metric where a run has cost that much, between measurements on the line."""
    steps, values = zip(*run.points, strict=True)
    return float(np.interp(cost / COSTS[at](run), steps, values))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of its confidence interval by Student's t; NaN for a single value."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, float("nan")
    error = float(np.std(values, ddof=1)) / np.sqrt(len(values))
    return mean, float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * error)


def _told(value: float, half: float, sign: str) -> str:
    return f"{value:{sign}.4f}" + ("" if np.isnan(half) else f" ± {half:.4f}")
