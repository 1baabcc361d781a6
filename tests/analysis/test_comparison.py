"""Tables of runs side by side, from runs that are made up, against numbers worked out apart."""

import numpy as np
import pytest

from nag_jax.analysis import plots
from nag_jax.analysis.comparison import Run, compare, interval, labels
from nag_jax.errors import UserError


def run(kind, seed, values, *, corpus="c", every=10, tokens=100.0, flops=1e6, seconds=0.5, **more):
    leaves = {"optimizer.kind": kind, "seed": seed, "train.steps": 40} | more
    points = [(every * (i + 1), value) for i, value in enumerate(values)]
    return Run(f"{kind}-{seed}", leaves, corpus, points, tokens, flops, seconds)


RUNS = [
    run("soap", 0, [4.0, 3.0, 2.0]),
    run("soap", 1, [4.2, 3.3, 2.2]),
    run("soap", 2, [4.1, 3.2, 2.6]),
    run("muon", 0, [4.0, 3.5, 3.0]),
    run("muon", 1, [4.4, 3.6, 3.1]),
    run("muon", 2, [4.3, 3.7, 3.8]),
]


def test_means_intervals_and_pairs():
    result = compare(RUNS, "loss")
    assert (result.budget, result.baseline) == (30, "optimizer.kind=soap")
    best, other = result.rows()
    values, others = np.asarray([2.0, 2.2, 2.6]), np.asarray([3.0, 3.1, 3.8])
    t = 4.302652729749462  # Student's t, 97.5 %, two degrees of freedom
    assert best["mean"] == pytest.approx(values.mean())
    assert best["half_width"] == pytest.approx(t * values.std(ddof=1) / np.sqrt(3))
    pairs = others - values
    assert other["difference"] == pytest.approx(pairs.mean())
    assert other["difference_half_width"] == pytest.approx(t * pairs.std(ddof=1) / np.sqrt(3))
    assert (best["pairs"], other["pairs"]) == (3, 3)
    assert "| optimizer.kind=muon | 3 | 3.3000 ± 1.0828 | +1.0333 ± 0.3795 | 3 |" in (
        result.markdown()
    )
    assert result.csv().startswith("metric,at,budget,run,seeds,mean,half_width,pairs,")


def test_only_seeds_of_both_are_pairs():
    result = compare([*RUNS[:3], RUNS[4], run("muon", 9, [5, 5, 5])], "loss")
    row = result.rows()[1]
    assert (row["seeds"], row["pairs"]) == (2, 1)
    assert row["difference"] == pytest.approx(3.1 - 2.2)
    assert np.isnan(row["difference_half_width"])


@pytest.mark.parametrize(
    ("at", "budget", "slow", "fast"),
    [
        ("steps", 20, 3.0, 3.5),
        ("tokens", 2000, 3.0, 3.5),
        ("flops", 20e6, 3.0, 3.75),  # twice the FLOPs a step: half of the steps
        ("time", 10.0, 3.0, 3.625),  # 13.33 steps of 0.75 s
    ],
)
def test_equal_costs(at, budget, slow, fast):
    """Two steps' costs; the second run goes farther and is read between its measurements."""
    runs = [run("a", 0, [4.0, 3.0]), run("b", 0, [3.75, 3.5, 3.0], flops=2e6, seconds=0.75)]
    if at == "time":
        fast = float(np.interp(10 / 0.75, [10, 20], [3.75, 3.5]))
    result = compare(runs, "loss", at)
    assert result.budget == budget
    assert [group.values[0] for group in result.groups] == pytest.approx([slow, fast])


def test_labels_leave_out_what_follows_from_a_kind():
    runs = [
        run("soap", 0, [1], **{"optimizer.b1": 0.9, "model.connection.kind": "nag"}),
        run("muon", 0, [1], **{"optimizer.momentum": 0.9, "model.connection.kind": "nag"}),
        run("muon", 0, [1], **{"optimizer.momentum": 0.8, "model.connection.kind": "nag"}),
    ]
    assert labels(runs) == [
        "optimizer.kind=soap",
        "optimizer.kind=muon, optimizer.momentum=0.9",
        "optimizer.kind=muon, optimizer.momentum=0.8",
    ]


@pytest.mark.parametrize(
    ("runs", "options", "words"),
    [
        ([RUNS[0], run("muon", 0, [1], corpus="d")], {}, "different corpora .*soap-0 .*muon-0"),
        (RUNS[:3], {}, "nothing but the seed"),
        ([*RUNS, run("soap", 0, [1, 1, 1])], {}, "two runs are alike, seed 0 included"),
        (RUNS, {"baseline": "optimizer.kind=adam"}, "names none of the groups"),
        ([RUNS[0], run("muon", 0, [1], every=50)], {}, "first measured after 30 steps"),
        ([RUNS[0], run("muon", 0, [1], flops=np.nan)], {"at": "flops"}, "has not logged"),
    ],
)
def test_what_cannot_be_compared(runs, options, words):
    with pytest.raises(UserError, match=words):
        compare(runs, "loss", **options)


def test_a_chosen_baseline():
    result = compare(RUNS, "loss", baseline="optimizer.kind=m")
    assert result.baseline == "optimizer.kind=muon"
    assert result.rows()[0]["difference"] < 0


def test_an_interval_of_one_value_is_unknown():
    assert np.isnan(interval([3.0])[1])


def test_the_figure_has_a_line_and_points_for_each_group():
    figure = plots.comparison_figure(compare(RUNS, "loss", "tokens"))
    left, right = figure.axes
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "A: optimizer.kind=soap",
        "B: optimizer.kind=muon",
    ]
    assert [text.get_text() for text in right.get_yticklabels()] == ["A", "B"]
    np.testing.assert_allclose(left.lines[0].get_xdata(), [1000, 2000, 3000])
    np.testing.assert_allclose(left.lines[0].get_ydata(), [4.1, 9.5 / 3, 6.8 / 3])
    np.testing.assert_allclose(right.lines[2].get_xdata(), [3.0, 3.1, 3.8])
    assert plots.png(figure)[:4] == b"\x89PNG" and plots.pdf(figure)[:4] == b"%PDF"
