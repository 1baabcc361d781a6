"""Plans where the compiler refuses, and what a report says of memory, loops and hours."""

import jax
import pytest

from nag_jax import config as configs
from nag_jax.planning.plans import Plan, Target, estimate, make_plan
from nag_jax.planning.report import print_report
from nag_jax.planning.steps import DecodingStep, TrainingStep
from nag_jax.sharding.collectives import Collective
from nag_jax.sharding.hardware import CHIPS

VOCAB = 257


@pytest.fixture(scope="module")
def step():
    overrides = ("model.d_model=16", "model.num_blocks=2", "train.batch_size=4")
    return TrainingStep.of(configs.resolve({}, overrides), VOCAB)


def target(chip):
    return Target(f"{chip}:1", jax.devices()[:1], CHIPS[chip])


class Refused:
    """A step that its compiler refuses."""

    def __init__(self, step, words):
        self.config, self.words = step.config, words

    def lower(self, mesh):
        return self

    def compile(self):
        raise RuntimeError(self.words)


@pytest.mark.parametrize(
    "words, fits", [("RESOURCE_EXHAUSTED: Ran out\nof memory", False), ("INTERNAL: no\nway", None)]
)
def test_a_compiler_that_refuses(step, words, fits):
    plan = make_plan(Refused(step, words), target("v5e"))
    assert (plan.fits, plan.memory, plan.estimate) == (fits, None, None)
    assert plan.why_not == " ".join(words.split())


def sent(times, conditional=False):
    return Collective("all-gather", 4, 10**9, times, conditional, "", "a/b")


def test_links_carry_what_always_runs(step):
    """A loop of unknown length is in no number, and told apart."""
    on = target("v5e")
    mesh = on.mesh(step.config)
    found = estimate(step, mesh, on, (sent(2), sent(None), sent(5, True)))
    assert found.work.link_bytes == 2e9 and found.links == pytest.approx(0.02)


@pytest.mark.parametrize(
    "chip, size, fits, words",
    [
        ("h200", 100e9, True, "105.8 GB: fits"),
        ("h200", 120e9, False, "XLA_PYTHON_CLIENT_MEM_FRACTION=0.87"),
        ("v5e", 17e9, False, "16.9 GB: DOES NOT FIT"),
    ],
)
def test_a_report(step, chip, size, fits, words, capsys):
    on = target(chip)
    mesh = on.mesh(step.config)
    gathers = (sent(2), sent(None), sent(5, True))
    found = estimate(step, mesh, on, gathers)
    plan = Plan(step, mesh, found, {"temporaries": int(size)}, fits, "", gathers, {"k": 3}, 1.0)
    print_report(plan, on, 1000)
    out = capsys.readouterr().out
    for part in (words, "2.0 GB received in 2", "5.0 GB received in 5", "kernel k", "device-hours"):
        assert part in out, (part, out)
    assert "all-gather, not counted" in out and "a/b" in out
    assert ("FRACTION" in out) == ("FRACTION" in words)


def test_a_token_costs_what_its_row_is_long(step):
    """The last position sees all of the context, and the cache is read once."""
    mesh = target("v5e").mesh(step.config)
    short, long = (
        DecodingStep(step.config, step.model, 4, context).work(mesh, 0.0) for context in (64, 128)
    )
    attention = step.config.model.attention
    numbers = attention.num_heads * attention.head_dim * 2  # blocks
    assert long.model_flops - short.model_flops == pytest.approx(4 * 4 * numbers * 64)
    cached = 2 * attention.num_kv_heads * attention.head_dim * 2
    assert long.memory_bytes - short.memory_bytes == pytest.approx(4 * 4 * cached * 64)
    assert long.tokens == short.tokens == 4
