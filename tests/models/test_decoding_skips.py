"""Decoding with tokens that skip: the decisions and logits of whole rows, and work left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import quick_compilation, random_params, small_model

from nag_jax.models import attention as attention_lib
from nag_jax.models import feedforward as feedforward_lib
from nag_jax.models import rows as rows_lib
from nag_jax.models import skipping as skipping_lib
from nag_jax.models.skipping import ThresholdSkipping
from nag_jax.models.transformer import skipping_part, with_thresholds

NEAR = 1e-5  # decisions of scores that lie nearer to the threshold may differ by rounding
ADDED = 5
CASES = {
    "nag, gqa, swiglu": ((1, 2, 6), {}),
}
MORE = {
    "gated pre-norm, ccgqa, moe, executed keys": (
        (3,),
        {
            "connection__kind": "gated_prenorm",
            "attention__kind": "ccgqa",
            "feedforward__kind": "moe",
            "skipping__keys_values": "executed",
        },
    ),
    "nag, gqa, executed keys, in a loop": (
        (1, 2, 6),
        {"skipping__keys_values": "executed", "num_blocks": 3, "coda_blocks": 1, "loops": 2},
    ),
    "nag, ccgqa, moe": (
        (1, 2, 6),
        {"attention__kind": "ccgqa", "feedforward__kind": "moe_zaya", "num_blocks": 3},
    ),
    "gated pre-norm, gqa, mlp, batch of one": (
        (4,),
        {"connection__kind": "gated_prenorm", "feedforward__kind": "mlp"},
    ),
}
PARAMETERS = [
    pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in MORE))
    for name, case in (CASES | MORE).items()
]


@pytest.fixture
def decided(monkeypatch, few_rungs):
    """Every decision that is made: (keep, score minus threshold) by order of layers."""
    found = []
    decide = ThresholdSkipping.decide

    def watched(self, gate, score, threshold):
        keep, m = decide(self, gate, score, threshold)
        jax.debug.callback(
            lambda *x: found.append([np.asarray(part) for part in x]),
            keep,
            score - threshold,
            ordered=True,
        )
        return keep, m

    monkeypatch.setattr(ThresholdSkipping, "decide", watched)

    def take():
        jax.effects_barrier()
        taken, found[:] = list(found), []
        return taken

    return take


def calibrated(model, params, tokens):
    """A balance under which about 40 % of these tokens skip, by quantiles of each layer."""
    balance = model.initial_balance()
    batch = {
        "tokens": jnp.asarray(tokens),
        "segment_ids": jnp.ones_like(tokens),
        "valid": jnp.ones(tokens.shape, bool),
    }
    step = model.warmup_steps
    evaluate = jax.jit(lambda b: model.evaluate_batch(params, batch, step, False, b)["statistics"])
    for _ in range(2):  # what a layer skips moves the scores of those behind it
        counts = skipping_part(evaluate(balance))
        balance = with_thresholds(balance, skipping_lib.quantiles(counts, jnp.float32(0.4)))
    return balance


@pytest.mark.parametrize(("prompts", "keys"), PARAMETERS)
def test_decisions_and_logits_are_those_of_whole_rows(prompts, keys, decided):
    """Prefill and every token added; rows are padded on the left."""
    model = small_model(skipping__kind="threshold", **keys)
    params, step = random_params(model), model.warmup_steps
    rows, columns = np.arange(len(prompts)), max(prompts) + 1
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, (len(prompts), 12), np.int32)
    padded = np.zeros((len(prompts), columns), np.int32)
    for row, length in enumerate(prompts):
        padded[row, columns - length :] = tokens[row, :length]
    start = columns - np.array(prompts, np.int32)
    with quick_compilation():
        balance = calibrated(model, params, tokens)
        decided()
        whole = jax.jit(model.logits)(params, tokens, None, step, balance)
        of_rows = decided()
        logits, state = jax.jit(model.prefill, static_argnums=3)(
            params, padded, start, columns + ADDED, step, balance
        )
        calls = [(start, decided())]
        advance, got = jax.jit(model.decode_step), [logits]
        for added in range(ADDED):
            token = tokens[rows, np.array(prompts) + added]
            logits, state = advance(params, token, state, step, balance)
            got.append(logits)
            calls.append((-np.array(prompts) - added, decided()))

    skipped = near = count = 0
    for first, layers in calls:
        assert len(layers) == len(of_rows)
        for (keep, _), (wanted, margin) in zip(layers, of_rows, strict=True):
            for row in rows:
                # The columns of the call that hold the row's tokens, and where the row has them.
                inside = np.arange(max(first[row], 0), keep.shape[1])
                at = inside - first[row]
                clear = np.abs(margin[row, at]) > NEAR
                np.testing.assert_array_equal(keep[row, inside][clear], wanted[row, at][clear])
                near, count = near + np.sum(~clear), count + len(at)
                skipped += np.sum(~keep[row, inside])
    assert near == 0 and 0.2 < skipped / count < 0.7
    for added, logits in enumerate(got):
        expected = np.asarray(whole)[rows, np.array(prompts) + added - 1]
        np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(whole).max())


@pytest.mark.parametrize(
    ("feedforward", "batch", "own"),
    [
        ("swiglu", 1, 3 * ["contract"]),
        pytest.param("swiglu", 2, 3 * ["contract"], marks=pytest.mark.slow),
        pytest.param("moe", 1, 3 * ["_blocks"], marks=pytest.mark.slow),
    ],
)
def test_a_token_that_skips_runs_no_branch(feedforward, batch, own, monkeypatch):
    """Neither the rows' products nor experts nor the reading of the cache."""
    ran = []

    def watch(place, name):
        function = getattr(place, name)

        def watched(*args, **options):
            jax.debug.callback(lambda: ran.append(name))
            return function(*args, **options)

        monkeypatch.setattr(place, name, watched)

    watch(attention_lib, "attend_to_cache")
    watch(attention_lib, "contract")
    watch(feedforward_lib, "contract")
    watch(rows_lib, "_blocks")
    model = small_model(skipping__kind="threshold", feedforward__kind=feedforward, num_blocks=1)
    params = random_params(model)
    start = jnp.zeros(batch, jnp.int32)
    tokens = jnp.ones((batch, 2), jnp.int32)
    balance = model.initial_balance()
    _, state = model.prefill(params, tokens, start, 4, 9, balance)
    advance = jax.jit(model.decode_step)

    def names(threshold):
        ran.clear()
        own = jax.tree.map(lambda x: jnp.full_like(x, threshold), balance)
        jax.block_until_ready(advance(params, tokens[:, 0], state, 9, own))
        jax.effects_barrier()
        return sorted(ran)

    # Keys and values are made for every token, queries and outputs for those that run.
    assert names(0.0) == sorted(["attend_to_cache"] + 4 * ["contract"] + own)
    assert names(2.0) == 2 * ["contract"]
