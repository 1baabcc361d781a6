"""The norm modulator, alpha's start and the warm-up of gains against the equations."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_network import GATE_FLOOR, modulator, softplus
from small_models import small_config, small_model

from nag_jax.models.connections import NormAgnostic
from nag_jax.models.context import BranchOut, Context
from nag_jax.models.gates import Gate, NormModulator
from nag_jax.models.linear import Numerics

WIDTH = 24


def make(directions=5, beta=1.0, trainable=True, dtype="float32", scale=1.0):
    return NormModulator(
        WIDTH, directions, scale, beta, trainable, Numerics(dtype), nnx.Rngs(params=0)
    )


def directions_of_norm(seed=0, tokens=6):
    r = np.random.default_rng(seed).normal(size=(1, tokens, WIDTH))
    return r / np.sqrt(np.mean(r * r, axis=-1, keepdims=True))


@pytest.mark.parametrize("beta", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("directions", [1, 8, 32])
def test_equation_13(directions, trainable, beta):
    """With every parameter away from its start."""
    rng = np.random.default_rng(1)
    gate = make(directions, beta, trainable)
    for name in ("weight", "bias", "mixture_logits"):
        variable = getattr(gate, name)
        variable[...] = jnp.asarray(rng.normal(size=variable.shape), jnp.float32)
    if trainable:
        gate.beta_raw[...] = jnp.asarray(0.2, jnp.float32)
        beta = softplus(0.2)
    r = directions_of_norm()
    w = {n: np.asarray(getattr(gate, n)[...], np.float64) for n in ("weight", "bias")}
    w["mixture_logits"] = np.asarray(gate.mixture_logits[...], np.float64)
    out = gate(jnp.asarray(r, jnp.float32))
    np.testing.assert_allclose(out.m, modulator(r, w, beta), rtol=2e-5)
    assert out.keep is None
    np.testing.assert_array_equal(out.floored, 0)


def test_start():
    """m is near 1/2 with pre-activations of standard deviation `gate_init_scale`."""
    gate = make(32)
    np.testing.assert_array_equal(gate.bias[...], 0)
    np.testing.assert_array_equal(gate.mixture_logits[...], 0)
    np.testing.assert_allclose(gate.beta_raw[...], 0.5413, atol=1e-4)
    for scale in (1.0, 0.5):
        weight = np.asarray(make(400, scale=scale).weight[...])
        np.testing.assert_allclose(np.std(weight), scale / math.sqrt(WIDTH), rtol=0.03)
    for beta in (0.3, 2.5):
        np.testing.assert_allclose(softplus(float(make(beta=beta).beta_raw[...])), beta, rtol=1e-6)
    assert not hasattr(make(trainable=False), "beta_raw")


def test_zero_gate_is_half_to_the_beta():
    gate = make(7, beta=2.0, scale=0.0)
    np.testing.assert_allclose(gate(jnp.asarray(directions_of_norm())).m, 0.25, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [-200.0, -13.0, 200.0])
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_saturated_gates_have_finite_values_and_gradients(beta, bias, dtype):
    """The floor holds m at 1e-6^beta, says so, and keeps the power's gradient finite."""
    definition, state = nnx.split(make(4, beta, dtype=dtype))
    state = nnx.to_pure_dict(state)
    state["bias"] = jnp.full(4, bias)
    r = jnp.asarray(directions_of_norm(), dtype)

    def total(state, r):
        out = nnx.merge(definition, state)(r)
        return jnp.sum(out.m), (out.m, out.floored)

    (_, (m, floored)), gradients = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(state, r)
    assert m.dtype == jnp.float32
    expected = max(1 / (1 + math.exp(-bias)), GATE_FLOOR) ** beta
    assert np.all(np.isfinite(m))
    if abs(bias) == 200:
        np.testing.assert_allclose(m, expected, rtol=1e-4)
        np.testing.assert_array_equal(floored, float(bias < 0))
    for leaf in jax.tree.leaves(gradients):
        assert np.all(np.isfinite(np.asarray(leaf, np.float32)))


def test_statistics_are_float32_in_a_bfloat16_model():
    """The gate is read in float32 from the bfloat16 direction."""
    r = jnp.asarray(directions_of_norm(), jnp.bfloat16)
    np.testing.assert_array_equal(make(dtype="bfloat16")(r).m, make()(r.astype(jnp.float32)).m)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_alpha_starts_at_a_power_of_the_index(exponent):
    options = small_config(connection__alpha_exponent=exponent).model.connection
    for index in (1, 2, 7):
        connection = NormAgnostic(options, WIDTH, index, Numerics(), nnx.Rngs(params=0))
        np.testing.assert_allclose(connection.alpha[...], index**-exponent, rtol=1e-6)


def test_gain_warmup():
    """(step + 1)/W up to 1; no warm-up for W = 0 and for other connections."""
    model = small_model(connection__alpha_warmup_steps=4)
    factors = [float(model.gain_warmup(step)) for step in (0, 1, 2, 3, 4, 1000)]
    np.testing.assert_allclose(factors, [0.25, 0.5, 0.75, 1, 1, 1])
    assert float(small_model(connection__alpha_warmup_steps=0).gain_warmup(0)) == 1
    assert float(small_model(connection__kind="prenorm").gain_warmup(0)) == 1


def test_gain_is_alpha_times_warmup_times_modulator_times_weight():
    """As `write` reports it, and as the stream feels it."""
    options = small_config(connection__alpha_exponent=1.0).model.connection
    connection = NormAgnostic(options, WIDTH, 3, Numerics(), nnx.Rngs(params=0))
    r = jnp.asarray(directions_of_norm(), jnp.float32)
    y = jnp.asarray(directions_of_norm(seed=1), jnp.float32)
    m, weight = jnp.full((1, 6), 0.6), jnp.linspace(0.1, 1, 6)[None]
    context = Context(None, None, None, jnp.asarray(0.5), False)
    written = connection.write(
        (r, jnp.zeros((1, 6))), BranchOut(y, weight), Gate(m, 0 * m), context
    )
    expected = (1 / 3) * 0.5 * 0.6 * np.linspace(0.1, 1, 6)[None]
    np.testing.assert_allclose(written.gain, expected, rtol=1e-6)
    np.testing.assert_allclose(written.stream[1], 0.5 * np.log1p(expected**2), rtol=1e-4)
