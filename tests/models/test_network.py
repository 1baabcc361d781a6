"""Whole tiny networks against float64 NumPy: logits, losses, taps and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_network import Network
from small_models import VOCAB, as_float64, packed_batch, random_params, small_config

from nag_jax.models.transformer import build_model
from nag_jax.parameters import flatten

STEP = 1  # of 4 warm-up steps: every NAG gain is halved
CASES = {
    "nag": {},
    "nag, fixed beta, qk-norm, multi-query, mlp": {
        "connection__beta_trainable": False,
        "connection__beta_init": 1.7,
        "attention__qk_norm": True,
        "attention__num_kv_heads": 1,
        "feedforward__kind": "mlp",
    },
    "prenorm, tied head, qk-norm, multi-head": {
        "connection__kind": "prenorm",
        "attention__qk_norm": True,
        "attention__num_kv_heads": 4,
    },
    "residual-free, free head, mlp": {
        "connection__kind": "residual_free",
        "connection__head": "free",
        "feedforward__kind": "mlp",
    },
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request, x64):
    """(model, parameters, batch, the network in NumPy, warm-up factor), all in float64."""
    config = small_config(compute_dtype="float64", **request.param)
    model = build_model(config, VOCAB)
    params = as_float64(random_params(model, seed=3))
    batch = packed_batch([[5, 4], [1, 7]], 8)
    warmup = 0.5 if config.model.connection.kind == "nag" else 1.0
    return model, params, batch, Network(config.model, VOCAB, params), warmup


def test_values_and_gradients(case):
    """Losses, logits, taps and the gradient of every leaf along a random direction."""
    model, params, batch, network, warmup = case
    rng = np.random.default_rng(0)
    weights = rng.normal(size=batch["valid"][:, 1:].shape)

    def loss(p):
        out = model.evaluate_batch(p, batch, STEP, taps=True)
        logits = model.logits(p, batch["tokens"], batch["segment_ids"], STEP)
        return jnp.sum(out["nats"] * weights), (out, logits)

    gradients, (out, logits) = jax.jit(jax.grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(out["nats"], network.nats(batch, warmup), rtol=1e-8, atol=1e-10)
    for name, values in network.summed_taps(batch, warmup).items():
        np.testing.assert_allclose(out["taps"][name], values, rtol=1e-6, err_msg=name)
    for row, tokens in enumerate(batch["tokens"]):
        expected = network.logits(tokens, batch["segment_ids"][row], warmup)
        np.testing.assert_allclose(logits[row], expected, rtol=1e-8, atol=1e-9)
        correct = np.argmax(expected[:-1], axis=-1) == tokens[1:]
        np.testing.assert_array_equal(out["correct"][row], correct & batch["valid"][row, 1:])

    gradients = flatten(gradients)
    for path, leaf in flatten(params).items():
        direction = rng.normal(size=leaf.shape) * (np.std(leaf) or 1.0)
        expected = finite_difference(network, leaf, direction, batch, weights, warmup)
        actual = np.sum(np.asarray(gradients[path]) * direction)
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7, err_msg=path)


def finite_difference(network, leaf, direction, batch, weights, warmup, size=1e-5):
    """Central difference of the weighted loss; `leaf` is changed in place and restored."""
    original = leaf.copy()
    values = []
    for sign in (1, -1):
        leaf[...] = original + sign * size * direction
        values.append(np.sum(network.nats(batch, warmup) * weights))
    leaf[...] = original
    return (values[0] - values[1]) / (2 * size)
