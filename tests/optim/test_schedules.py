"""Values of the schedules, step by step, and the configs they refuse."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nag_jax.errors import UserError
from nag_jax.optim.schedules import Constant, Cosine, WarmupStableDecay

KINDS = [Constant, Cosine, WarmupStableDecay]


def values(kind, total, peak=2.0, **keys):
    schedule = kind.build({**kind.defaults(), **keys}, peak, total)
    return np.array([schedule(step) for step in range(total + 3)])


def test_constant():
    rates = values(Constant, 10, warmup_steps=4)
    np.testing.assert_allclose(rates, [0.5, 1.0, 1.5] + [2.0] * 10, rtol=1e-6)


def test_cosine():
    rates = values(Cosine, 12, warmup_steps=4, final_share=0.1)
    expected = [0.5, 1.0, 1.5, 2.0]
    expected += [0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8)]
    expected += [0.2] * 3  # held after the end
    np.testing.assert_allclose(rates, expected, rtol=1e-5)


def test_warmup_stable_decay():
    rates = values(WarmupStableDecay, 10, warmup_steps=2, decay_steps=4, final_share=0.25)
    expected = [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.625, 1.25, 0.875, 0.5, 0.5, 0.5]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_moves(kind):
    """With a final share of 0 too; and without warm-up the first step has the peak rate."""
    shares = {"final_share": 0.0} if "final_share" in kind.defaults() else {}
    assert (values(kind, 200, warmup_steps=20, **shares)[:200] > 0).all()
    assert values(kind, 200, warmup_steps=0, **shares)[0] == 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_traced_steps_give_float32(kind):
    schedule = kind.build(kind.defaults(), 3e-3, 300)
    rate = jax.jit(schedule)(jnp.int32(7))
    assert rate.dtype == jnp.float32 and rate.shape == ()
    np.testing.assert_allclose(rate, 3e-3 * 8 / 20, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [-1, 51])
def test_a_warmup_that_does_not_fit_is_refused(kind, warmup):
    with pytest.raises(UserError, match=rf"optimizer.schedule.warmup_steps = {warmup} .*50 steps"):
        kind.build({**kind.defaults(), "decay_steps": 10, "warmup_steps": warmup}, 1.0, 50)


def test_a_decay_that_does_not_fit_is_refused():
    node = {"warmup_steps": 5, "decay_steps": 51, "final_share": 0.0}
    with pytest.raises(UserError, match="optimizer.schedule.decay_steps = 51"):
        WarmupStableDecay.build(node, 1.0, 50)
    with pytest.raises(UserError, match="warmup_steps = 5 and .*decay_steps = 46 are together"):
        WarmupStableDecay.build({**node, "decay_steps": 46}, 1.0, 50)
    WarmupStableDecay.build({**node, "decay_steps": 45}, 1.0, 50)


@pytest.mark.parametrize("kind", [Cosine, WarmupStableDecay])
@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_final_share_out_of_range_is_refused(kind, share):
    with pytest.raises(UserError, match="optimizer.schedule.final_share"):
        kind.build({**kind.defaults(), "final_share": share}, 1.0, 300)
