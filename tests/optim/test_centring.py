"""Rows of a centred table stay centred; other parameters are left alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_examples import config, info, model_infos, random_like

from nag_jax.errors import UserError
from nag_jax.optim import build_optimizer
from nag_jax.optim.centring import centre_updates, centred_axes


def test_row_means_stay_zero_over_fifty_steps_with_decay():
    infos = model_infos()
    settings = config(embedding_decay=0.1, learning_rate=0.02)
    transform, _ = build_optimizer(settings, 50, infos)
    params = random_like(infos, 0)
    params["table"] -= params["table"].mean(-1, keepdims=True)
    start, state = params["table"], transform.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for i in range(50):
        params, state = step(params, state, random_like(infos, i + 1))
    assert float(jnp.abs(params["table"] - start).max()) > 0.1
    assert float(jnp.abs(params["table"].mean(-1)).max()) < 1e-6


def test_the_mean_is_taken_along_embed_wherever_it_is():
    infos = {
        "table": info(("embed", "vocabulary"), "embedding", (3, 5), centred=True),
        "free": info(("embed", "vocabulary"), "embedding", (3, 5)),
    }
    updates = random_like(infos, 1)
    transform = centre_updates(centred_axes(infos))
    centred, _ = transform.update(updates, transform.init(updates))
    np.testing.assert_allclose(
        centred["table"], updates["table"] - updates["table"].mean(0), atol=1e-7
    )
    np.testing.assert_array_equal(centred["free"], updates["free"])


def test_a_centred_parameter_needs_an_embed_axis():
    infos = {"table": info(("vocabulary", "hidden"), "embedding", (3, 5), centred=True)}
    with pytest.raises(UserError, match="table is marked centred but has no axis named embed"):
        centred_axes(infos)
