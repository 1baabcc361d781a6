"""Start and decode of the norm-agnostic stream: the table's scale, cosine logits, temperature."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy_network import rms
from small_models import VOCAB, as_float64, packed_batch, random_params, small_model

from nag_jax.models.context import Context, positions_in_document


def context_of(batch):
    segment_ids = jnp.asarray(batch["segment_ids"][:, :-1])
    return Context(
        segment_ids,
        positions_in_document(segment_ids),
        jnp.asarray(batch["valid"][:, 1:]),
        jnp.ones(()),
        False,
    )


def test_start(x64):
    """R_0 = sqrt(d) e/|e| and s_0 = log(G |e|/sqrt(d)), with G = exp of its stored logarithm."""
    model = small_model(compute_dtype="float64")
    params = as_float64(random_params(model))
    params["ends"]["log_encode_gain"] = np.asarray(0.7)
    module = model.module(params)
    tokens = np.arange(VOCAB)[None]
    direction, log_norm = module.ends.start(module.table(jnp.asarray(tokens)))
    e = params["table"]["rows"][tokens]
    norm = np.linalg.norm(e, axis=-1)
    np.testing.assert_allclose(direction, 4 * e / norm[..., None], rtol=1e-12)
    np.testing.assert_allclose(log_norm, np.log(np.exp(0.7) * norm / 4), rtol=1e-12)


def test_decode_is_inverse_temperature_times_cosine(x64):
    model = small_model(compute_dtype="float64")
    params = as_float64(random_params(model))
    module = model.module(params)
    rng = np.random.default_rng(0)
    r = rng.normal(size=(2, 5, 16))
    r = r / rms(r)
    s = rng.normal(size=(2, 5))
    logits = module.logits_of()(jnp.asarray(r), jnp.asarray(s))[..., :VOCAB]
    table = params["table"]["rows"][:VOCAB]
    cosine = np.einsum("btd,vd->btv", r, table) / (
        np.linalg.norm(r, axis=-1)[..., None] * np.linalg.norm(table, axis=-1)
    )
    np.testing.assert_allclose(logits, np.exp(s)[..., None] * cosine, rtol=1e-12)


def test_encode_gain_is_an_inverse_temperature(x64):
    """Doubling G doubles every logit and changes no direction."""
    model = small_model(compute_dtype="float64")
    params = as_float64(random_params(model))
    tokens = packed_batch([[9], [9]], 8)["tokens"]
    logits = jax.jit(model.logits)
    before = logits(params, tokens)
    params["ends"]["log_encode_gain"] = params["ends"]["log_encode_gain"] + np.log(2)
    np.testing.assert_allclose(logits(params, tokens), 2 * before, rtol=1e-12)


def test_the_scale_of_the_embedding_moves_only_the_log_norm(x64):
    """The whole network's direction stays and s shifts by the scale's logarithm (log-norm, 16)."""
    model = small_model(compute_dtype="float64")
    params = as_float64(random_params(model))
    batch = packed_batch([[5, 4], [9]], 8)

    @jax.jit
    def hidden(params):
        out = model.module(params)(jnp.asarray(batch["tokens"][:, :-1]), context_of(batch), {})
        return out.hidden, out.log_scale, out.taps

    direction, log_norm, _ = hidden(params)
    for scale in (1e-3, 1e3):
        table = params["table"] | {"rows": params["table"]["rows"] * scale}
        scaled_direction, scaled_log_norm, _ = hidden(params | {"table": table})
        np.testing.assert_allclose(scaled_direction, direction, atol=1e-10)
        np.testing.assert_allclose(scaled_log_norm, log_norm + np.log(scale), rtol=1e-10)


def test_gradients_of_unused_rows_are_zero_and_finite():
    """Padding rows are all zero: their norm must not poison the gradient."""
    model = small_model(vocab_multiple=32)
    params = random_params(model)
    params["table"]["rows"][VOCAB:] = 0
    batch = packed_batch([[9], [9]], 8)

    def loss(p):
        return model.evaluate_batch(p, batch, 0, False)["nats"].sum()

    gradient = jax.jit(jax.grad(loss))(params)
    rows = np.asarray(gradient["table"]["rows"])
    np.testing.assert_array_equal(rows[VOCAB:], 0)
    assert np.all(np.isfinite(rows)) and np.all(np.any(rows[:VOCAB] != 0, axis=1))
