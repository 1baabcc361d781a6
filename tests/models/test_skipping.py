"""Tokens that skip: thresholds over many steps, whole networks, streams that pass unchanged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_skipping import SkippingNetwork, histogram, quantile
from small_models import (
    VOCAB,
    as_float64,
    packed_batch,
    random_params,
    small_config,
    small_model,
)

from nag_jax.models import skipping as skipping_lib
from nag_jax.models.context import Context, positions_in_document
from nag_jax.models.stages import SUBLAYERS, stages_of
from nag_jax.models.transformer import build_model, skipping_part, with_loops, with_thresholds
from nag_jax.optim import build_optimizer
from nag_jax.parameters import flatten
from nag_jax.training.state import initial_state
from nag_jax.training.step import train_step

STEP = 9  # past the warm-up
SKIP = {"skipping__kind": "threshold"}


# --- thresholds ---


@pytest.mark.parametrize("rate", [0.05, 0.4])
def test_thresholds_over_many_steps(rate):
    """Local ones by layer and iteration, one for all attention, against float64 NumPy."""
    model = small_model(
        **SKIP, skipping__rate=rate, num_blocks=4, prelude_blocks=1, coda_blocks=1, loops=2
    )
    steps, rng = 100, np.random.default_rng(0)
    balance = model.initial_balance()
    shapes = {path: leaf.shape for path, leaf in flatten(balance).items()}
    assert sorted(set(shapes.values())) == [(1, 1), (2, 2)]
    assert all(path.split("/")[2] == "skipping" for path in shapes) and len(shapes) == 6
    expected = {path: np.zeros(shape) for path, shape in shapes.items()}
    update = jax.jit(model.update_balance)
    zeros = steady = 0
    for step in range(steps):
        # Gates that drift, closer together than a bin at first and far apart later.
        counts = {}
        for place, (path, shape) in enumerate(shapes.items()):
            logits = rng.normal(place / 3 + step / 50, 0.01 + step / 40, (*shape, 53))  # no ties
            scores = 1 / (1 + np.exp(-logits))
            counts[path] = np.apply_along_axis(histogram, -1, scores)
        statistics = nested({path: x.astype(np.float32) for path, x in counts.items()})
        balance, told = update(balance, statistics, step / steps)
        assert set(told) == {"attention_threshold", "feedforward_threshold"}
        assert all(values.shape == (6,) for values in told.values())

        share = rate * min(max((step / steps - 0.05) / 0.1, 0), 1)
        zeros, steady = zeros + (share == 0), steady + (share > 0.999 * rate)
        pooled = sum(x.sum((0, 1)) for path, x in counts.items() if path.endswith("attention"))
        for path, own in expected.items():
            for index in np.ndindex(own.shape):
                if share == 0:
                    continue
                found = pooled if path.endswith("attention") else counts[path][index]
                found = quantile(found, share)
                own[index] = found if own[index] == 0 else 0.95 * own[index] + 0.05 * found
            np.testing.assert_allclose(flatten(balance)[path], own, rtol=1e-5, err_msg=step)
    assert zeros == 6 and steady == 85  # of 5 % and 15 % of the steps


def nested(flat):
    """Nested dicts of paths."""
    tree = {}
    for path, value in flat.items():
        *above, last = path.split("/")
        node = tree
        for name in above:
            node = node.setdefault(name, {})
        node[last] = value
    return tree


def test_histogram_and_quantile():
    """Counted scores alone, beyond the ends too; the quantile is a bin's width from NumPy's."""
    rng = np.random.default_rng(1)
    scores = 1 / (1 + np.exp(-rng.normal(0, 3, (3, 400))))
    counted = rng.random(scores.shape) < 0.7
    with jax.enable_x64(True):
        counts = skipping_lib.histogram(jnp.asarray(scores), jnp.asarray(counted))
    np.testing.assert_array_equal(counts, histogram(scores[counted]))
    ends = jnp.asarray([[1e-30, 0.0, 1.0, 1 - 1e-7]], jnp.float32)
    counts_of_ends = skipping_lib.histogram(ends, jnp.ones(ends.shape, bool))
    assert counts_of_ends[0] == 2 and counts_of_ends.sum() == 4
    assert counts_of_ends[skipping_lib.BINS - 2 :].sum() >= 1
    for share in (0.01, 0.2, 0.5, 0.99, 1.0):
        got = float(skipping_lib.quantile(counts, share))
        np.testing.assert_allclose(got, quantile(np.asarray(counts), share), rtol=1e-5)
        wanted = np.quantile(scores[counted], share)
        logits = [np.log(x / (1 - x)) for x in (got, wanted)]
        assert abs(logits[0] - logits[1]) < 0.2
    # A batch without any token leaves a number.
    assert np.isfinite(skipping_lib.quantile(jnp.zeros(skipping_lib.BINS), 0.3))


# --- whole networks ---

CASES = {
    "nag, gqa, swiglu": {"connection__kind": "nag"},
    "gated pre-norm, ccgqa, moe, executed keys": {
        "connection__kind": "gated_prenorm",
        "attention__kind": "ccgqa",
        "attention__head_dim": 4,
        "feedforward__kind": "moe",
        "feedforward__hidden": 6,
        "feedforward__num_experts": (3,),
        "feedforward__load_balance_loss": 0.7,
        "feedforward__router_z_loss": 0.3,
        "skipping__keys_values": "executed",
    },
    "gated pre-norm, gqa, mlp, executed keys": {
        "connection__kind": "gated_prenorm",
        "attention__qk_norm": True,
        "feedforward__kind": "mlp",
        "skipping__keys_values": "executed",
    },
    "nag, ccgqa, moe": {
        "connection__kind": "nag",
        "attention__kind": "ccgqa",
        "attention__head_dim": 4,
        "feedforward__kind": "moe_zaya",
        "feedforward__hidden": 6,
        "feedforward__router_width": 5,
        "feedforward__shared_hidden": 4,
        "feedforward__num_experts": (2, 3),
        "feedforward__top_k": (2,),
    },
    "nag, executed keys": {"connection__kind": "nag", "skipping__keys_values": "executed"},
    "nag, continuous": {"connection__kind": "nag", "skipping__hard": False},
    "gated pre-norm, continuous": {
        "connection__kind": "gated_prenorm",
        "skipping__hard": False,
    },
    "nag, by rotation": {"connection__kind": "nag", "skipping__score": "rotation"},
    "attention alone": {"skipping__sublayers": "attention"},
    "feed-forward alone, fixed beta": {
        "skipping__sublayers": "feedforward",
        "connection__beta_trainable": False,
        "connection__beta_init": 1.7,
        "skipping__hard": False,
    },
}
PARAMETERS = [
    pytest.param(case, id=name, marks=[pytest.mark.slow] * (number > 0))
    for number, (name, case) in enumerate(CASES.items())
]


@pytest.mark.parametrize("case", PARAMETERS)
def test_networks(case, x64, few_rungs):
    """Losses, taps, histograms and each leaf's gradient, against float64 NumPy of all rows."""
    config = small_config(compute_dtype="float64", **{"connection__kind": "nag"} | SKIP | case)
    model = build_model(config, VOCAB)
    params = as_float64(random_params(model, seed=3))
    batch = packed_batch([[5, 4], [1, 7], [9]], 8)
    balance = model.initial_balance()
    network = SkippingNetwork(config.model, VOCAB, params, balance, {})
    counted = threshold_by_threshold(network, batch, model.skipping.sublayers)
    balance = with_thresholds(balance, placed(model, network.thresholds))
    rng = np.random.default_rng(0)
    weights = rng.normal(size=batch["valid"][:, 1:].shape)

    def loss(p):
        out = model.evaluate_batch(p, batch, STEP, True, balance)
        total = jnp.sum(out["nats"] * weights)
        return total + (0 if out["auxiliary_loss"] is None else out["auxiliary_loss"]), out

    (value, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(out["nats"], network.nats(batch), rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(value, network.weighted_loss(batch, weights), rtol=1e-6)
    for name, values in network.summed_taps(batch).items():
        np.testing.assert_allclose(out["taps"][name], values, rtol=1e-6, atol=1e-7, err_msg=name)

    found = flatten(skipping_part(out["statistics"]))
    wanted = flatten(placed(model, {key: histogram(x) for key, x in counted.items()}))
    assert found.keys() == wanted.keys()
    for path, counts in wanted.items():
        np.testing.assert_array_equal(found[path], counts, err_msg=path)
    skipped = [np.sum(counted[key] < t) for key, t in sorted(network.thresholds.items())]
    told = np.asarray(out["taps"]["skipped"])
    assert sorted(told[told > 0]) == sorted(skipped)

    gradients = flatten(gradients)
    for path, leaf in flatten(params).items():
        direction = rng.normal(size=leaf.shape) * (np.std(leaf) or 1.0)
        original, values, size = leaf.copy(), [], 1e-5
        for sign in (1, -1):
            leaf[...] = original + sign * size * direction
            values.append(network.weighted_loss(batch, weights))
        leaf[...] = original
        actual = np.sum(np.asarray(gradients[path]) * direction)
        expected = (values[0] - values[1]) / (2 * size)
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7, err_msg=path)


def threshold_by_threshold(network, batch, sublayers):
    """Gives each layer a threshold that some tokens are below and none is near.

    Returns:
        The scores of valid tokens by layer.
    """
    counted = {}
    for index in range(network.options.num_blocks):
        for name in SUBLAYERS:
            scores, valid = [], batch["valid"][:, 1:]
            for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
                network.hidden(tokens[:-1], segments[:-1], 1.0)
                scores.append(network.scores[index, name])
            if name not in sublayers:
                continue
            counted[index, name] = np.array(scores)[valid]
            ascending = np.sort(np.ravel(scores))
            part = ascending[len(ascending) // 4 : len(ascending) * 2 // 3]
            at = np.argmax(np.diff(part))
            assert part[at + 1] - part[at] > 1e-3
            network.thresholds[index, name] = (part[at] + part[at + 1]) / 2
    return counted


def placed(model, values):
    """Values by (block, sub-layer) where the model has them, each [repeats, 1, ...]."""
    tree = {}
    for stage, sizes in stages_of(model.options).items():
        for offset, block in enumerate(sizes.block_names):
            for name in SUBLAYERS:
                own = [
                    values.get((sizes.first_index + len(sizes.positions) * repeat + offset, name))
                    for repeat in range(sizes.repeats)
                ]
                if own[0] is not None:
                    stacked = jnp.asarray(np.stack(own)[:, None], jnp.float64)
                    tree.setdefault(stage, {}).setdefault(block, {})[name] = stacked
    return tree


# --- what passes unchanged ---


def hidden_states(model, params, tokens, balance):
    """Final hidden states and log-scales, as compiled."""
    segment_ids = jnp.ones_like(tokens)
    context = Context(
        segment_ids=segment_ids,
        positions=positions_in_document(segment_ids),
        valid=segment_ids > 0,
        gain_warmup=jnp.ones(()),
        taps=False,
    )
    out = model.module(params)(tokens, context, balance)
    return out.hidden, out.log_scale, skipping_part(out.statistics)


def with_all(model, value):
    """The initial balance with these thresholds everywhere, or by sub-layer."""
    values = dict.fromkeys(SUBLAYERS, value) if isinstance(value, float) else value
    balance = model.initial_balance()
    thresholds = {
        stage: {
            block: {name: jnp.full_like(x, values[name]) for name, x in part.items()}
            for block, part in blocks.items()
        }
        for stage, blocks in skipping_part(balance).items()
    }
    return with_thresholds(balance, thresholds)


@pytest.mark.parametrize("connection", ["nag", "gated_prenorm"])
def test_skipped_tokens_pass_bit_for_bit(connection, few_rungs):
    """Tokens below the threshold leave one block as they came, whatever the others do."""
    model = small_model(**SKIP, connection__kind=connection, num_blocks=1)
    params = random_params(model)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, VOCAB, (2, 9)), jnp.int32)
    run = functools.partial(jax.jit(functools.partial(hidden_states, model)), params)
    *untouched, counts = run(tokens, with_all(model, 2.0))
    (counts,) = counts["stage_0"].values()
    threshold = float(skipping_lib.quantile(counts["feedforward"][0, 0], 0.5))
    *got, _ = run(tokens, with_all(model, {"attention": 2.0, "feedforward": threshold}))
    same = [np.asarray(x == y).reshape(18, -1) for x, y in zip(got, untouched, strict=True)]
    assert 4 < np.sum(np.all(np.concatenate(same, axis=1), axis=1)) < 14

    @jax.jit
    def ends(params, tokens):
        module = model.module(params)
        return module.ends.finish(module.ends.start(module.table(tokens)))

    for got, wanted in zip(untouched, ends(params, tokens), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.slow
def test_where_nothing_runs_nothing_learns(few_rungs):
    """With all tokens skipped neither branches nor gates have a gradient."""
    model = small_model(**SKIP, num_blocks=1)
    params, batch = random_params(model), packed_batch([[9], [4, 4]], 8)

    def loss(p):
        return model.evaluate_batch(p, batch, STEP, False, with_all(model, 2.0))["nats"].sum()

    gradients = flatten(jax.jit(jax.grad(loss))(params))
    for path, gradient in gradients.items():
        assert np.any(gradient) == (not path.startswith("stage_0")), path


def test_a_rate_of_zero_builds_no_skipping():
    """The same program as without skipping, but for the names."""

    def program(**keys):
        model = small_model(**keys)
        batch = packed_batch([[9], [4, 4]], 8)

        def loss(p, balance):
            out = model.evaluate_batch(p, batch, STEP, True, balance)
            return jnp.sum(out["nats"]), out

        balance = model.balance_shapes
        made = jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(random_params(model), balance)
        return flatten(balance), str(made)

    assert program(**SKIP, skipping__rate=0.0) == program()


@pytest.mark.slow
@pytest.mark.parametrize("connection", ["nag", "gated_prenorm"])
def test_thresholds_of_zero_skip_nothing(connection, few_rungs):
    """Values and gradients are those without skipping, to rounding."""
    batch = packed_batch([[9], [4, 4]], 8)

    def run(**keys):
        model = small_model(**keys, connection__kind=connection)
        balance = model.initial_balance()

        def loss(p):
            out = model.evaluate_batch(p, batch, STEP, False, balance)
            return jnp.sum(out["nats"])

        return flatten(jax.jit(jax.grad(loss))(random_params(model)))

    got, wanted = run(**SKIP), run()
    for path, gradient in wanted.items():
        size = np.abs(gradient).max()
        np.testing.assert_allclose(got[path], gradient, atol=1e-5 * size, err_msg=path)


@pytest.mark.slow
def test_a_loop_whose_second_iteration_is_skipped_is_no_loop(few_rungs):
    """Each iteration reads its own thresholds; those of a new iteration are the last one's."""
    model = small_model(**SKIP, loops=2, num_blocks=3, coda_blocks=1)
    params = random_params(model)
    tokens = np.random.default_rng(2).integers(0, VOCAB, (2, 9)).astype(np.int32)
    balance = with_all(model, 0.5)
    (part,) = skipping_part(balance)["stage_0"].values()
    for name in SUBLAYERS:
        part[name] = part[name].at[:, 1].set(2.0)
    once = build_model(small_config(**SKIP, loops=2, num_blocks=3, coda_blocks=1), VOCAB, 1)
    own = with_loops(balance, once.balance_shapes)
    assert flatten(own)["stage_0/blocks/skipping/attention"].shape == (2, 1)
    got = jax.jit(lambda p: model.logits(p, tokens, None, STEP, balance))(params)
    wanted = jax.jit(lambda p: once.logits(p, tokens, None, STEP, own))(params)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    again = flatten(with_loops(own, model.balance_shapes))
    np.testing.assert_array_equal(again["stage_0/blocks/skipping/attention"], 0.5)


# --- training ---


def steps_of_training(steps, batch, **options):
    """The thresholds after each step of a run, from one start."""
    config = small_config(
        {
            "optimizer.kind": "adamw",
            "optimizer.schedule.kind": "constant",
            "optimizer.schedule.warmup_steps": 0,
            "train.steps": steps,
        },
        **SKIP,
        skipping__rate=0.5,
        skipping__ramp_start=0.0,
        skipping__ramp_end=0.1,
        feedforward__kind="mlp",
        remat=options.pop("remat", "none"),
    )
    model = build_model(config, VOCAB)
    optimizer, schedule = build_optimizer(config.optimizer, steps, model.infos)
    step = jax.jit(
        train_step(
            model, optimizer, schedule, steps=steps, taps=True, skip_not_finite=False, **options
        )
    )
    state, found = initial_state(model, optimizer, 0), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        found.append(jax.device_get((flatten(state.balance), metrics["taps"]["skipped"])))
    return found


@pytest.mark.slow
def test_thresholds_do_not_depend_on_how_a_step_is_run(few_rungs):
    """Bit for bit the same with and without remat and accumulation; tokens do skip."""
    batch = packed_batch([[9], [4, 4], [2, 2, 2], [7, 2]], 8)
    expected = steps_of_training(4, batch, accumulation=1)
    found = steps_of_training(4, batch, accumulation=4, remat="nothing_saveable")
    for step, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        for path, threshold in wanted[0].items():
            np.testing.assert_array_equal(got[0][path], threshold)
            assert np.all((threshold > 0) == (step > 0))
        np.testing.assert_array_equal(got[1], wanted[1])
    # The first two steps skip nothing: the target is 0, then there is no threshold yet.
    assert not np.any(expected[0][1]) and not np.any(expected[1][1])
    assert np.all(expected[2][1][1::2] > 0.2)
