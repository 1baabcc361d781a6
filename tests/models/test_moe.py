"""Mixtures of experts in whole networks: values, gradients, balance, and the router's gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_moe import mixture
from numpy_network import Network
from small_models import VOCAB, as_float64, packed_batch, random_params, small_config

from nag_jax.models.stages import pattern_of, stages_of
from nag_jax.models.transformer import build_model
from nag_jax.parameters import flatten

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
                return jax.tree.map(lambda leaf: leaf[repeat], blocks)
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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
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
