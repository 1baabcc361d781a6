"""A folder that shows what runs did: PNG figures and one HTML page that needs nothing else.

The words are made from the numbers, whichever way they fall; nothing here trains or evaluates.
"""

import base64
import dataclasses
import html
import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from nag_jax.analysis import plots

PAGE = "index.html"

_PACKAGES = ("nag-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #1a1a1a; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #ddd;
         vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; height: auto; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; white-space: pre-wrap; }
pre b { color: #0072B2; }
figcaption, .small { color: #555; font-size: .9rem; }
"""


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """One finished run, as the report shows it.

    Attributes:
        name: What to call it, such as "NAG".
        metrics: Rows of its metrics file, with "step" and names such as "train/loss".
        tokens_per_step: Training tokens of one optimizer step.
        bits_per_byte: Final validation bits per UTF-8 byte.
        taps: Mean of each tap over validation tokens, by sub-layer: "norm", "gain", "rotation"
            (radians) and, for models with gates, "gate".
        sublayers: Name of each sub-layer, in the order of the taps.
        dead_gate_share: Share of sub-layers with a dead gate; None without gates.
        parameters: Number of parameters.
        seconds: Wall-clock seconds of training and its evaluations; None where not measured.
        config: The complete config, as nested dicts.
    """

    name: str
    metrics: Sequence[Mapping[str, float]]
    tokens_per_step: int
    bits_per_byte: float
    taps: Mapping[str, Sequence[float]]
    sublayers: Sequence[str]
    dead_gate_share: float | None
    parameters: int
    seconds: float | None
    config: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        """Tokens trained on in all."""
        return self.tokens_per_step * max(int(row["step"]) for row in self.metrics)

    def curve(self, metric: str) -> list[tuple[float, float]]:
        """(tokens, value) points of a metric."""
        return [
            (row["step"] * self.tokens_per_step, row[metric])
            for row in self.metrics
            if metric in row
        ]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A continuation to show: which run wrote it, the prompt, and what came after."""

    run: str
    prompt: str
    continuation: str


def verdict(runs: Sequence[RunSummary], baselines: Mapping[str, float]) -> str:
    """Says in plain sentences which run is ahead, and where the yardsticks lie.

    Args:
        runs: The runs, at least one.
        baselines: Bits per byte of each yardstick.
    """
    ranked = sorted(runs, key=lambda run: run.bits_per_byte)
    sentences = []
    if len(ranked) > 1:
        best, second = ranked[:2]
        gap = second.bits_per_byte / best.bits_per_byte - 1
        if f"{best.bits_per_byte:.3f}" == f"{second.bits_per_byte:.3f}":
            sentences.append(
                f"{best.name} and {second.name} end level at {best.bits_per_byte:.3f} bits per byte"
            )
        else:
            sentences.append(
                f"{best.name} ends ahead: {best.bits_per_byte:.3f} bits per byte against "
                f"{second.bits_per_byte:.3f} of {second.name}, which is {gap:.1%} more"
            )
        equal = len({run.tokens for run in runs}) == 1
        sentences[-1] += (
            f", after {ranked[0].tokens:,} training tokens each."
            if equal
            else "; they were not trained on equally many tokens."
        )
        sentences.append(
            "This is one small, short run of each with one seed: it says little about larger "
            "models, and another seed can turn a small difference around."
        )
    for name, bits in baselines.items():
        below = [run.name for run in ranked if run.bits_per_byte < bits]
        above = [run.name for run in ranked if run.bits_per_byte >= bits]
        clauses = []
        if below:
            clauses.append(f"{_join(below)} {_verb(below, 'beats', 'beat')} it")
        if above:
            verb = _verb(above, "does", "do")
            clauses.append(f"{_join(above)} {verb} not" + ("" if below else " beat it"))
        sentences.append(
            f"For comparison, {name} needs {bits:.3f} bits per byte: {', '.join(clauses)}."
        )
    for run in runs:
        if run.dead_gate_share is not None:
            sentences.append(f"{run.dead_gate_share:.0%} of the gates of {run.name} are dead.")
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def write_report(
    folder: epath.PathLike,
    runs: Sequence[RunSummary],
    baselines: Mapping[str, float],
    sample: Sample,
    notes: Mapping[str, str],
) -> epath.Path:
    """Writes loss.png, depth.png and index.html, which holds the figures itself.

    Args:
        folder: Where to; made if it is not there.
        runs: The runs, at least one, with the same sub-layers.
        baselines: Bits per byte of each yardstick, by the name to show.
        sample: A continuation.
        notes: Facts to list, such as the corpus and its fingerprint.

    Returns:
        Path of the page.
    """
    folder = epath.Path(folder).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    curves = {
        run.name: (run.curve("train/loss"), run.curve("validation/bits_per_byte")) for run in runs
    }
    figures = {
        "loss": plots.loss_figure(curves, baselines),
        "depth": plots.depth_figure({run.name: run.taps for run in runs}, runs[0].sublayers),
    }
    images = {name: plots.png(figure) for name, figure in figures.items()}
    for name, image in images.items():
        (folder / f"{name}.png").write_bytes(image)
    page = folder / PAGE
    page.write_text(_page(runs, baselines, sample, notes, images))
    return page


def _page(runs, baselines, sample, notes, images) -> str:
    escape = html.escape
    configs = "".join(
        f"<details><summary>{escape(run.name)}</summary>"
        f"<pre>{escape(json.dumps(run.config, indent=2))}</pre></details>"
        for run in runs
    )
    facts = dict(notes) | {
        "versions": ", ".join(f"{name} {version}" for name, version in _versions().items())
    }
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(" and ".join(run.name for run in runs))}</title>
<style>{_CSS}</style>
</head>
<body>
<h1>{escape(" and ".join(run.name for run in runs))}, trained on the same text</h1>
<p>{escape(verdict(runs, baselines))}</p>
{_results_table(runs, baselines)}
<h2>Loss</h2>
{_image("Training loss and validation bits per byte against tokens", images["loss"])}
<h2>The stream by depth</h2>
{_image("Carried norm, realised gain, rotation and gate of each sub-layer", images["depth"])}
<p class="small">Means over the validation tokens. The carried norm is what the stream has grown to;
a norm-agnostic stream keeps it apart from the direction that sub-layers read. Its realised gain is
alpha times the gate's modulator; that of an additive stream is the size of the branch's output over
the size of the stream. A gate is dead when its mean is below {plots.DEAD_GATE}.</p>
<h2>A continuation by {escape(sample.run)}</h2>
<pre><b>{escape(sample.prompt)}</b>{escape(sample.continuation)}</pre>
<p class="small">The prompt is in bold.</p>
<h2>What was run</h2>
{_table([(key, value) for key, value in facts.items()])}
<h3>Configs</h3>
{configs}
</body>
</html>
"""


def _results_table(runs, baselines) -> str:
    header = ("", "bits per byte", "parameters", "training tokens", "seconds", "dead gates")
    rows = [
        (
            run.name,
            f"{run.bits_per_byte:.4f}",
            f"{run.parameters:,}",
            f"{run.tokens:,}",
            "" if run.seconds is None else f"{run.seconds:.0f}",
            "no gates" if run.dead_gate_share is None else f"{run.dead_gate_share:.0%}",
        )
        for run in runs
    ]
    rows += [(name, f"{bits:.4f}", "", "", "", "") for name, bits in baselines.items()]
    return _table(rows, header)


def _table(rows, header=()) -> str:
    """Cells after the first are numbers where there is a header."""
    numeric = ' class="number"' if header else ""

    def line(cells, tag):
        first, *rest = map(html.escape, cells)
        return (
            f"<tr><th>{first}</th>"
            + "".join(f"<{tag}{numeric}>{cell}</{tag}>" for cell in rest)
            + "</tr>"
        )

    head = line(header, "th") if header else ""
    return f"<table>{head}{''.join(line(row, 'td') for row in rows)}</table>"


def _image(description: str, data: bytes) -> str:
    encoded = base64.b64encode(data).decode("ascii")
    return (
        f'<figure><img alt="{html.escape(description)}" src="data:image/png;base64,{encoded}">'
        f"<figcaption>{html.escape(description)}.</figcaption></figure>"
    )


def _versions() -> dict[str, str]:
    versions = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from a checkout, not installed
            continue
    return versions


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _verb(names: Sequence[str], singular: str, plural: str) -> str:
    return singular if len(names) == 1 else plural
