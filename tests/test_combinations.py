"""The table of combinations covers every pair; `tests/slow` has what each must do."""

import itertools
import math

import numpy as np
from combinations import (
    COMBINATIONS,
    FACTORS,
    LEARNT,
    REFUSED,
    Combination,
    batch,
)

from nag_jax import contracts
from nag_jax.kinds import REGISTRY
from nag_jax.validation import REMAT_POLICIES


def test_every_two_values_of_every_two_factors_meet():
    for row in COMBINATIONS:
        assert all(value in FACTORS[factor] for factor, value in row._asdict().items())
    for first, second in itertools.combinations(Combination._fields, 2):
        wanted = set(itertools.product(FACTORS[first], FACTORS[second])) - REFUSED
        assert wanted == {(getattr(row, first), getattr(row, second)) for row in COMBINATIONS}


def test_factors_hold_every_kind():
    for part in ("connection", "feedforward", "initialisation", "skipping"):
        assert set(FACTORS[part]) == set(REGISTRY[f"model.{part}"])
    kinds = {row.config().model.attention.kind for row in COMBINATIONS}
    assert kinds == set(REGISTRY["model.attention"])
    assert set(FACTORS["remat"]) == set(REMAT_POLICIES)


def test_the_previous_token_alone_does_not_teach_the_batch():
    """The lowest loss of a model that sees one token is above what counts as learnt by heart."""
    counts = np.zeros((contracts.VOCABULARY, contracts.VOCABULARY))
    valid = batch()["valid"][:, 1:]
    previous, following = batch()["tokens"][:, :-1][valid], batch()["tokens"][:, 1:][valid]
    np.add.at(counts, (previous, following), 1)
    pairs = counts[previous, following]
    nats = np.mean(np.log(counts.sum(axis=1)[previous] / pairs))
    # No model starts at a loss as high as one and a half times a uniform guess.
    assert nats > LEARNT * 1.5 * math.log(contracts.VOCABULARY)
