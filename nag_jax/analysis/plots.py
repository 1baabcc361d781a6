"""The report's figures: loss against tokens, and what each sub-layer did to the stream, by depth.

Figures are made without pyplot, so nothing global is touched and no display is needed.
"""

import io
import string
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from nag_jax.analysis.comparison import Comparison
from nag_jax.evals.bits_per_byte import DEAD_GATE

# Okabe and Ito's palette without its yellow: told apart by every kind of eye, and on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
COST_LABELS = {
    "steps": "steps",
    "tokens": "training tokens",
    "flops": "FLOPs of the model",
    "time": "seconds",
}
_BASELINE_STYLES = ("--", ":", "-.")
_MARKERS = ("o", "s", "^", "D")
_STYLE = {"dpi": 110, "facecolor": "white", "layout": "constrained"}


def loss_figure(
    curves: Mapping[str, tuple[Sequence[tuple[float, float]], Sequence[tuple[float, float]]]],
    baselines: Mapping[str, float],
) -> Figure:
    """Training loss and validation bits per byte of each run, against training tokens.

    Args:
        curves: By run, (tokens, nats per token) points of training and (tokens, bits per byte)
            points of validation.
        baselines: Bits per byte of each yardstick, drawn as a level line.
    """
    figure = Figure(figsize=(11, 4.4), **_STYLE)
    left, right = figure.subplots(1, 2)
    for colour, (name, (training, validation)) in zip(_COLOURS, curves.items(), strict=False):
        tokens, loss = _columns(training)
        left.plot(tokens, loss, color=colour, alpha=0.3, linewidth=1)
        left.plot(tokens, _smooth(loss), color=colour, linewidth=1.8, label=name)
        tokens, bits = _columns(validation)
        right.plot(tokens, bits, "o-", color=colour, markersize=4, linewidth=1.8, label=name)
    for i, (name, bits) in enumerate(baselines.items()):
        style = _BASELINE_STYLES[i % len(_BASELINE_STYLES)]
        _level(right, bits, style, f"{name}: {bits:.3f}")
    left.set(title="Training loss", ylabel="nats per token (smoothed over thin line)")
    right.set(title="Validation", ylabel="bits per UTF-8 byte")
    for axes in (left, right):
        axes.set_xlabel("training tokens")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        _log_scale(axes)
        _finish(axes)
    return figure


def depth_figure(
    taps: Mapping[str, Mapping[str, Sequence[float]]], sublayers: Sequence[str]
) -> Figure:
    """Carried norm, realised gain, rotation and gate by depth, one line a run.

    Args:
        taps: By run, "norm", "gain", "rotation" (radians) and, where there are gates, "gate": the
            mean of each sub-layer over validation tokens.
        sublayers: Name of each sub-layer; each name has a marker of its own.
    """
    figure = Figure(figsize=(11, 7.6), **_STYLE)
    panels = figure.subplots(2, 2).flat
    for axes, name, title, label in zip(
        panels,
        ("norm", "gain", "rotation", "gate"),
        ("Carried norm", "Realised gain", "Rotation of the direction", "Gate"),
        (
            "norm of the stream / √d, after the write",
            "size of the update / size of the stream",
            "angle turned by a sub-layer (degrees)",
            "mean modulator m over tokens",
        ),
        strict=True,
    ):
        for colour, (run, values) in zip(_COLOURS, taps.items(), strict=False):
            _depth_line(axes, values.get(name), sublayers, run, colour, name)
        axes.set(title=title, ylabel=label, xlabel="sub-layer, from the input")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if name == "gate":
            _level(axes, DEAD_GATE, "--", f"dead below {DEAD_GATE}")
            axes.set_ylim(0, 1)
        elif name == "rotation":
            axes.set_ylim(bottom=0)
        else:
            _log_scale(axes)
        _finish(axes)
    kinds = dict.fromkeys(sublayers)
    figure.supxlabel(
        ",  ".join(f"{'●■▲◆'[i % 4]} {kind}" for i, kind in enumerate(kinds)), fontsize=10
    )
    return figure


def comparison_figure(comparison: Comparison) -> Figure:
    """The metric of each group against its cost, and each run's value at the budget."""
    # Labels may be long: letters stand for them in the plot, lines below it spell them out.
    lines = ["\n".join(textwrap.wrap(group.label, 120)) for group in comparison.groups]
    height = 4.4 + 0.2 * sum(line.count("\n") + 1 for line in lines)
    figure = Figure(figsize=(11, height), **_STYLE)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    letters = [string.ascii_uppercase[i % 26] * (1 + i // 26) for i in range(len(lines))]
    for i, group in enumerate(comparison.groups):
        colour = _COLOURS[i % len(_COLOURS)]
        style = ("-", *_BASELINE_STYLES)[i // len(_COLOURS) % 4]
        cost, mean = _columns(group.curve)
        left.plot(cost, mean, style, color=colour, linewidth=1.8, label=f"{letters[i]}: {lines[i]}")
        values = _finite(list(group.values.values()))
        right.plot(values, np.full(len(values), i), "o", color=colour, alpha=0.6)
        right.plot([np.mean(values)], [i], "|", color=colour, markersize=18, markeredgewidth=2)
    left.axvline(comparison.budget, color="#555555", linestyle=":", linewidth=1.2)
    left.set(xlabel=COST_LABELS[comparison.at], ylabel=comparison.metric, title="Mean over seeds")
    left.xaxis.set_major_formatter(EngFormatter(sep=" "))
    _log_scale(left)
    _finish(left)
    right.set(xlabel=comparison.metric, title=f"At {comparison.budget:,.4g} {comparison.at}")
    right.set_yticks(range(len(letters)), letters)
    right.invert_yaxis()
    right.grid(True, axis="x", color="#dddddd", linewidth=0.6)
    right.spines[["top", "right"]].set_visible(False)
    left.get_legend().remove()
    figure.legend(loc="outside lower left", frameon=False, fontsize=8)
    return figure


def png(figure: Figure) -> bytes:
    """The figure as a PNG file's bytes."""
    return _saved(figure, "png")


def pdf(figure: Figure) -> bytes:
    """The figure as a PDF file's bytes."""
    return _saved(figure, "pdf")


def _saved(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind)
    return buffer.getvalue()


def _depth_line(axes, values, sublayers, run, colour, name):
    if values is None:
        axes.plot([], [], color=colour, label=f"{run}: no gates")
        return
    values = _finite(values)
    if name == "rotation":
        values = np.degrees(values)
    if name == "gate":
        run = f"{run}: {np.mean(values < DEAD_GATE):.0%} of sub-layers dead"
    depth = np.arange(1, len(values) + 1)
    axes.plot(depth, values, color=colour, linewidth=1.4, label=run)
    for i, kind in enumerate(dict.fromkeys(sublayers)):
        chosen = np.asarray([each == kind for each in sublayers])
        marker = _MARKERS[i % len(_MARKERS)]
        axes.plot(depth[chosen], values[chosen], marker, color=colour, markersize=5)


def _columns(points):
    return _finite(points).reshape(-1, 2).T


def _finite(values) -> np.ndarray:
    """Float64 with gaps (NaN) where a value is infinite, which no axis can show."""
    values = np.asarray(values, float)
    return np.where(np.isfinite(values), values, np.nan)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving average over a twentieth of the curve; shorter windows at the ends."""
    half = len(values) // 40
    return np.asarray([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def _level(axes: Axes, height: float, style: str, label: str) -> None:
    axes.axhline(height, color="#555555", linestyle=style, linewidth=1.2, label=label)


def _log_scale(axes: Axes) -> None:
    """Logarithmic y axis with plain numbers, where the data are positive."""
    heights = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    heights = heights[~np.isnan(heights)]
    if heights.size == 0 or heights.min() <= 0:
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    if heights.max() / heights.min() > 8:  # labels of every digit would run into each other
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_minor_formatter("{x:g}")


def _finish(axes: Axes) -> None:
    axes.grid(True, which="both", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, edgecolor="none", framealpha=0.85)
