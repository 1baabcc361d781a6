"""Decoding over a cache gives the logits of whole rows: every attention with every connection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import quick_compilation, random_params, small_model

from nag_jax.models import attention as attention_lib

PROMPTS = (1, 2, 3, 17)  # tokens, in one batch, padded on the left
COLUMNS, ADDED = 20, 8
LOOP = {"num_blocks": 4, "prelude_blocks": 1, "coda_blocks": 1, "loops": 3}
ATTENTION = {
    "gqa": {"attention__temperature_base": 1.1},
    "mha": {"attention__num_kv_heads": 4, "attention__qk_norm": True},
    "mqa": {"attention__num_kv_heads": 1, "attention__rope_fraction": 0.0},
    "ccgqa": {"attention__kind": "ccgqa", "attention__grouped_kernel": 3},
    "without a cache of its own": {"attention__kind": "user_parts.parts:Cacheless"},
}


def apart(keys):
    """Largest difference over the largest logit, after each prompt and each token added to it."""
    model = small_model(**keys)
    params = random_params(model)
    step = model.warmup_steps
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, model.vocab_size, (len(PROMPTS), max(PROMPTS) + ADDED), np.int32)
    padded = rng.integers(0, model.vocab_size, (len(PROMPTS), COLUMNS), np.int32)  # never zeros
    for row, length in enumerate(PROMPTS):
        padded[row, COLUMNS - length :] = tokens[row, :length]
    start = jnp.asarray(COLUMNS - np.array(PROMPTS), jnp.int32)
    with quick_compilation():
        whole = np.asarray(jax.jit(model.logits)(params, tokens, None, step))
        logits, state = jax.jit(model.prefill, static_argnums=3)(
            params, padded, start, COLUMNS + ADDED, step
        )
        advance = jax.jit(model.decode_step, donate_argnums=2)
        differences = []
        rows = np.arange(len(PROMPTS))
        for added in range(ADDED + 1):
            last = np.array(PROMPTS) + added - 1
            differences.append(np.abs(np.asarray(logits) - whole[rows, last]).max())
            if added < ADDED:
                logits, state = advance(params, tokens[rows, last + 1], state, step)
    return max(differences) / np.abs(whole).max()


@pytest.mark.parametrize(
    ("connection", "attention"),
    [
        *(("nag", attention) for attention in ATTENTION),
        ("residual_free", "gqa"),
        *(
            pytest.param(connection, attention, marks=pytest.mark.slow)
            for connection in ("prenorm", "residual_free")
            for attention in ATTENTION
            if (connection, attention) != ("residual_free", "gqa")
        ),
    ],
)
def test_cached_logits_are_those_of_whole_rows(attention, connection):
    assert apart({"connection__kind": connection} | ATTENTION[attention]) < 1e-5


@pytest.mark.parametrize(
    ("attention", "connection"),
    [
        ("gqa", "nag"),
        pytest.param("ccgqa", "residual_free", marks=pytest.mark.slow),
        pytest.param("without a cache of its own", "prenorm", marks=pytest.mark.slow),
    ],
)
def test_in_a_loop(attention, connection):
    assert apart({"connection__kind": connection} | ATTENTION[attention] | LOOP) < 1e-5


def test_in_pieces_of_the_cache(monkeypatch):
    """Pieces that do not divide the 28 columns; padding fills whole ones."""
    monkeypatch.setattr(attention_lib, "CACHE_COLUMNS", 5)
    assert apart({"connection__kind": "nag"} | ATTENTION["gqa"]) < 1e-5


def test_a_cache_that_is_not_returned_is_an_error():
    with pytest.raises(ValueError, match="Forgetful has cache_shapes, but its output holds no"):
        apart({"attention__kind": "user_parts.parts:Forgetful"})
