"""Decodes on eight simulated devices and on one; started by `test_step_on_devices`."""

import jax
import numpy as np
from ml_collections import ConfigDict
from small_models import quick_compilation, random_params, small_model

from nag_jax.sharding import rules
from nag_jax.sharding.mesh import make_mesh

ROWS, PROMPT, STEPS = 8, 6, 3


def logits_of(model, params, tokens):
    """Logits after the prompt and after each further token, [STEPS + 1, ROWS, V]."""
    balance = model.initial_balance()
    start = np.arange(ROWS) % 3
    out, state = jax.jit(model.prefill, static_argnums=3)(
        params, tokens[:, :PROMPT], start, PROMPT + STEPS, 0, balance
    )
    found, step = [out], jax.jit(model.decode_step)
    for i in range(STEPS):
        out, state = step(params, tokens[:, PROMPT + i], state, 0, balance)
        found.append(out)
    return np.stack(found)


def main():
    model = small_model(
        attention__kind="ccgqa",
        attention__num_heads=4,
        attention__num_kv_heads=2,
        feedforward__kind="moe",
        feedforward__num_experts=(4,),
        feedforward__top_k=(2,),
        feedforward__hidden=16,
        d_model=32,
        vocab_multiple=8,
    )
    params = random_params(model)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (ROWS, PROMPT + STEPS))
    expected = logits_of(model, params, tokens)
    for shape in ((1, 1, 4, 2),):
        options = ConfigDict(dict(zip(rules.MESH_AXES, shape, strict=True)))
        mesh = make_mesh(options, jax.devices())
        with jax.set_mesh(mesh):
            placed = jax.device_put(params, rules.parameter_shardings(model.infos, mesh))
            found = logits_of(model, placed, tokens)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
        print("decodes:", shape)


if __name__ == "__main__":
    with quick_compilation():
        main()
