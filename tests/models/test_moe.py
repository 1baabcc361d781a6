"""Mixtures of experts in whole networks: values, gradients, balance, and the router's gradient."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from numpy_moe import mixture
from numpy_network import Network
from small_models import VOCAB, as_float64, packed_batch, random_params, small_config

from nag_jax.errors import UserError
from nag_jax.models.moe import MixtureOfExperts
from nag_jax.models.norms import root_mean_square
from nag_jax.models.stages import pattern_of, stages_of
from nag_jax.models.transformer import build_model
from nag_jax.optim import build_optimizer
from nag_jax.parameters import flatten
from nag_jax.training.state import initial_state
from nag_jax.training.step import train_step
from nag_jax.validation import validate

STEP = 9  # past the warm-up
MOE = {"feedforward__kind": "moe", "feedforward__hidden": 6}
LOSSES = {"feedforward__load_balance_loss": 0.7, "feedforward__router_z_loss": 0.3}


class MoeNetwork(Network):
    """The network in NumPy with experts, remembering what its routers did with the last row."""

    def __init__(self, options, vocab_size, params, balance):
        super().__init__(options, vocab_size, params)
        self.balance = balance
        self.pattern = pattern_of(options)
        self.frozen = None  # weights by call, to hold those of the unit form at their value
        self.calls = []

    def _at(self, tree, index):
        for stage, sizes in stages_of(self.options).items():
            if index < sizes.blocks:
                repeat, offset = divmod(index, len(sizes.positions))
                blocks = tree[stage][sizes.block_names[offset]]
                return jax.tree.map(lambda leaf, repeat=repeat: leaf[repeat], blocks)
            index -= sizes.blocks
        raise AssertionError

    def block_params(self, index, name):
        return self._at(self.params, index)[name]

    def weighted_branch(self, name, index, x, w, segment_ids):
        if name == "attention":
            return super().weighted_branch(name, index, x, w, segment_ids)
        options = self.pattern[index % len(self.pattern)][name]
        if index == 0:
            width = options.get("router_width", 1)
            self.states, self.auxiliary, self.chosen = [np.zeros(width)] * len(x), 0.0, []
        balance = self._at(self.balance, index)[name]
        y, weight, self.states, auxiliary, chosen = mixture(
            x, w, options, options.top_k[0], balance, self.states
        )
        self.auxiliary = self.auxiliary + auxiliary
        self.chosen.append(chosen)
        if self.kind == "nag" and self.options.connection.router_weight == "unit":
            self.calls.append(weight)
            weight = weight / (weight if self.frozen is None else self.frozen[len(self.calls) - 1])
        return y, weight

    def weighted_loss(self, batch, weights):
        """Weighted nats, and the auxiliary loss of valid tokens."""
        total, self.calls = 0.0, []
        for row in range(len(weights)):
            one = {name: x[row : row + 1] for name, x in batch.items()}
            total += np.sum(self.nats(one) * weights[row])
            total += np.sum(np.where(one["valid"][0, 1:], self.auxiliary, 0))
        return total


def build(**keys):
    """(model, parameters, balance, NumPy network) in float64; no balance is zero."""
    config = small_config(compute_dtype="float64", **MOE | keys)
    model = build_model(config, VOCAB)
    params = as_float64(random_params(model, seed=3))
    rng = np.random.default_rng(4)
    balance = jax.tree.map(
        lambda leaf: rng.uniform(0, 0.2, leaf.shape).astype(np.float32), model.balance_shapes
    )
    return model, params, balance, MoeNetwork(config.model, VOCAB, params, balance)


CASES = {
    "nag, top-1, unit weight": {"connection__router_weight": "unit"} | LOSSES,
    "nag, top-1, plain weight, one and three experts in turn": {
        "connection__router_weight": "plain",
        "num_blocks": 3,
        "feedforward__num_experts": (1, 3),
    },
    "prenorm, top-2, shared, zaya": {
        "connection__kind": "prenorm",
        "feedforward__kind": "moe_zaya",
        "feedforward__router_width": 5,
        "feedforward__shared_hidden": 4,
        "feedforward__num_experts": (4,),
        "feedforward__top_k": (2,),
    },
    "residual-free, all of three": {
        "connection__kind": "residual_free",
        "feedforward__num_experts": (3,),
        "feedforward__top_k": (3,),
    },
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] * ("nag" in name))
        for name, case in CASES.items()
    ],
)
def test_values_gradients_and_loads(case, x64):
    """Losses, loads and each leaf's gradient along a random direction, against float64 NumPy."""
    model, params, balance, network = build(**case)
    batch = packed_batch([[5, 4], [1, 4]], 8)
    rng = np.random.default_rng(0)
    weights = rng.normal(size=batch["valid"][:, 1:].shape)

    def loss(p):
        out = model.evaluate_batch(p, batch, STEP, True, balance)
        return jnp.sum(out["nats"] * weights) + out["auxiliary_loss"], out

    (value, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(out["nats"], network.nats(batch), rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(value, network.weighted_loss(batch, weights), rtol=1e-6)

    loads = [jnp.zeros(part["feedforward"].num_experts[0]) for part in pattern_of(model.options)]
    for row in range(2):
        network.nats({name: x[row : row + 1] for name, x in batch.items()})
        for index, tokens in enumerate(network.chosen):
            for valid, chosen in zip(batch["valid"][row, 1:], tokens, strict=True):
                if valid:
                    loads[index % len(loads)] = loads[index % len(loads)].at[chosen].add(1)
    measured = [0.0] * len(loads)
    for stage, sizes in stages_of(model.options).items():
        for name, position in zip(sizes.block_names, sizes.positions, strict=True):
            load = out["statistics"][stage][name]["feedforward"]["load"]
            measured[position] = measured[position] + load.sum(axis=0)
    for position, load in enumerate(loads):
        np.testing.assert_array_equal(measured[position], load)

    network.weighted_loss(batch, weights)
    network.frozen = network.calls
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


FORMS = {
    "nag, plain": {"connection__router_weight": "plain"},
    "nag, unit": {"connection__router_weight": "unit"},
    "residual-free, top-2": {"connection__kind": "residual_free", "feedforward__top_k": (2,)},
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_the_routers_gradient_is_no_artefact_of_an_epsilon(form, x64, monkeypatch):
    """With every floor of a norm at 1e-30 a top-1 router's gradient is not 1000 times smaller.

    Were the weight on the branch's output, which the write normalises, only the floors would let a
    gradient through.
    """
    batch = packed_batch([[9], [4, 4]], 8)

    def size(floors):
        keys = form | ({"connection__norm_epsilon": 1e-30} if floors and "nag" not in name else {})
        model, params, balance, _ = build(**keys, num_blocks=1)

        def loss(p):
            return model.evaluate_batch(p, batch, STEP, False, balance)["nats"].sum()

        gradient = jax.jit(jax.grad(loss))(params)
        router = gradient["stage_0"]["blocks"]["feedforward"]["branch"]["router"]["weight"]
        return float(np.linalg.norm(router))

    name = next(n for n, keys in FORMS.items() if keys is form)
    default = size(floors=False)
    monkeypatch.setattr(root_mean_square, "__defaults__", (1e-30,))
    reference = importlib.import_module("pallas_kernels.nag_update.reference")
    for floor in ("ABSOLUTE_FLOOR", "RELATIVE_FLOOR"):
        monkeypatch.setattr(reference, floor, 1e-30)
    assert size(floors=True) > 1e-3 * default
    assert default > 1e-6


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"feedforward__top_k": (9,)}, "top_k=9 of model.feedforward.num_experts=8"),
        ({"feedforward__num_experts": (2, 4, 8)}, "has 3 entries, .* only model.num_blocks=2"),
        ({"connection__kind": "residual_free"}, "the router would get no gradient: set"),
        ({"feedforward__num_experts": ()}, "num_experts is .*; it must be one number"),
    ],
)
def test_what_cannot_work_is_refused(keys, words):
    with pytest.raises(UserError, match=words):
        validate(small_config(**MOE | keys))


def test_a_loop_is_a_whole_number_of_patterns():
    config = small_config(
        **MOE, feedforward__num_experts=(2, 3), num_blocks=4, prelude_blocks=1, loops=2
    )
    with pytest.raises(UserError, match="loop's 3 blocks .* such as 2 or 4"):
        validate(config)


def balances_after(steps, batch, **options):
    """The balance and metrics after some steps, from one start."""
    config = small_config(
        {
            "optimizer.kind": "adamw",
            "optimizer.schedule.kind": "constant",
            "optimizer.schedule.warmup_steps": 0,
            "train.steps": steps,
        },
        **MOE,
        feedforward__balance_rate=0.1,
        feedforward__load_balance_loss=0.1,
        remat=options.pop("remat", "none"),
    )
    model = build_model(config, VOCAB)
    optimizer, schedule = build_optimizer(config.optimizer, steps, model.infos)
    step = jax.jit(
        train_step(
            model, optimizer, schedule, steps=10, taps=True, skip_not_finite=False, **options
        )
    )
    state, told = initial_state(model, optimizer, 0), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        told.append(jax.device_get(metrics["balance"]))
    return jax.device_get(state.balance), told


@pytest.mark.slow
def test_balance_does_not_depend_on_how_a_step_is_run():
    """Bit for bit the same with and without remat and accumulation."""
    batch = packed_batch([[9], [4, 4], [2, 2, 2], [7, 2]], 8)
    expected, told = balances_after(3, batch, accumulation=1)
    bias = expected["stage_0"]["blocks"]["feedforward"]["bias"]
    assert bias.shape == (2, 8)
    assert np.unique(np.abs(bias).round(5)).tolist() != [0.0]
    load = expected["stage_0"]["blocks"]["feedforward"]["load"]
    np.testing.assert_allclose(load.sum(axis=-1), 1, rtol=1e-6)
    assert set(told[0]) == {"feedforward_load_over_mean", "feedforward_idle_experts"}
    assert all(values.shape == (2,) for values in told[0].values())
    found, _ = balances_after(3, batch, accumulation=4, remat="nothing_saveable")
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_model_with_a_balance_insists_on_it():
    model = build_model(small_config(**MOE), VOCAB)
    with pytest.raises(ValueError, match="pass it"):
        model.evaluate_batch(random_params(model), packed_batch([[9]], 8), 0, False)


def test_the_bias_follows_the_sign_of_the_load():
    """A step by hand: b_e moves by the rate towards the mean load, f is the share."""
    options = ConfigDict({"balance_rate": 0.25})
    balance = {"bias": jnp.array([0.5, 0.0, -1.0, 0.0]), "load": jnp.zeros(4)}
    load = jnp.array([6.0, 2.0, 0.0, 0.0])
    new, told = MixtureOfExperts.update_balance(options, balance, {"load": load})
    np.testing.assert_allclose(new["bias"], [0.25, 0.0, -0.75, 0.25])
    np.testing.assert_allclose(new["load"], [0.75, 0.25, 0.0, 0.0])
    assert told == {"load_over_mean": 3.0, "idle_experts": 0.5}


def test_cached_decoding():
    """Every next token's logits, with a memo, layers that differ and a loop."""
    keys = {"feedforward__kind": "moe_zaya", "feedforward__num_experts": (2, 4), "num_blocks": 4}
    model = build_model(small_config(**MOE | keys, loops=2), VOCAB)
    params, balance = random_params(model), model.initial_balance()
    rng = np.random.default_rng(1)
    rows = rng.integers(0, VOCAB, (2, 7)).astype(np.int32)
    start = np.array([0, 2], np.int32)
    prompt = np.zeros((2, 4), np.int32)
    for row, first in enumerate(start):
        prompt[row, first:] = rows[row, : 4 - first]
    prefill = jax.jit(model.prefill, static_argnums=3)
    logits, state = prefill(params, prompt, start, 8, STEP, balance)
    whole = np.asarray(jax.jit(lambda p: model.logits(p, rows, None, STEP, balance))(params))
    step = jax.jit(model.decode_step)
    for added in range(3):
        places = 3 - start + added
        expected = whole[np.arange(2), places]
        np.testing.assert_allclose(logits, expected, atol=3e-5 * np.abs(whole).max())
        logits, state = step(params, rows[np.arange(2), places + 1], state, STEP, balance)


@pytest.mark.parametrize(
    "form", [{"feedforward__top_k": (2,)}, {"connection__router_weight": "unit"}]
)
def test_experts_of_vanishing_probability(form):
    """The bias may choose experts whose probability underflows: gradients stay finite."""
    model = build_model(small_config(**MOE | form, num_blocks=1), VOCAB)
    params, batch = random_params(model), packed_batch([[9]], 8)
    branch = params["stage_0"]["blocks"]["feedforward"]["branch"]
    router = branch["router"]["weight"]
    first_token = params["table"]["rows"][batch["tokens"][0, 0]]
    balance = model.initial_balance()
    bias = balance["stage_0"]["blocks"]["feedforward"]["bias"]
    balance["stage_0"]["blocks"]["feedforward"]["bias"] = bias.at[:, 3:].set(5.0)

    def loss(p):
        return model.evaluate_batch(p, batch, STEP, False, balance)["nats"].sum()

    gradient = jax.jit(jax.grad(loss))
    for gap in (50.0, 300.0):
        steep = np.zeros_like(router)
        steep[0, :, 0] = np.sign(first_token) * gap
        branch["router"]["weight"] = steep
        for leaf in jax.tree.leaves(gradient(params)):
            assert np.isfinite(leaf).all()
