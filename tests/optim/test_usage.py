"""The optimizers as others use them: in optax and Flax code, on any tree, with patterns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nag_jax.errors import UserError
from nag_jax.optim import AdamW, kl_shampoo, muon, shampoo, sign_descent, soap, spectral_descent

PATTERNS = {
    "blocks/**/kernel": "stacked_matrix",
    "**/query": ((1,), (2, 3)),
    "**/out": ((2,), (3,)),
    "embed/*": "adamw",
}
STATIC = {
    muon: ("newton_schulz_steps",),
    soap: ("refresh_every", "block_size", "max_side", "stagger"),
    shampoo: ("refresh_every", "block_size", "max_side", "stagger", "trace_scaling"),
    kl_shampoo: ("refresh_every", "block_size", "max_side", "stagger"),
    spectral_descent: ("newton_schulz_steps",),
}


def params(dtype):
    rng = np.random.default_rng(0)
    shapes = {
        "blocks": {"up": {"kernel": (3, 4, 5)}},
        "attention": {"query": (2, 4, 2, 3), "out": (2, 2, 3, 4)},
        "embed": {"table": (9, 4)},
        "bias": (3,),
    }
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@pytest.mark.parametrize("make", STATIC, ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_injected_hyperparameters(make, dtype):
    """A schedule among them; two steps, so that the second differs by the rate."""
    transform = optax.inject_hyperparams(
        make, static_args=(*STATIC[make], "matrices", "others"), hyperparam_dtype=jnp.float32
    )(
        learning_rate=optax.linear_schedule(1e-2, 0.0, 2),
        matrices=PATTERNS,
        others=AdamW(learning_rate=1e-3),
    )
    weights = params(dtype)
    state = transform.init(weights)
    update = jax.jit(transform.update)
    for _ in range(2):
        updates, state = update(weights, state, weights)
        assert jax.tree.map(lambda x: x.dtype, updates) == jax.tree.map(lambda x: x.dtype, weights)
    assert float(state.hyperparams["learning_rate"]) == pytest.approx(5e-3)
    assert all(np.any(np.asarray(x, np.float32)) for x in jax.tree.leaves(updates))
    # Adam's step on a constant gradient is its own rate.
    np.testing.assert_allclose(np.abs(np.asarray(updates["bias"], float)), 1e-3, rtol=1e-2)


def test_sign_descent_with_an_injected_momentum():
    transform = optax.inject_hyperparams(sign_descent)(learning_rate=0.5, momentum=0.5)
    weights = {"w": jnp.asarray([3.0, -2.0])}
    updates, _ = transform.update(weights, transform.init(weights), weights)
    np.testing.assert_array_equal(updates["w"], [-0.5, 0.5])


@pytest.mark.parametrize("make, moves", [(soap, False), (kl_shampoo, False), (shampoo, True)])
def test_a_first_gradient_that_only_teaches_does_not_decay_either(make, moves):
    """SOAP and KL-Shampoo leave matrices as they are, and decay them from the second one on."""
    weights = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(4, 5)), jnp.float32)}
    still = {"w": jnp.zeros((4, 5))}
    transform = make(0.1, 0.5)
    state = transform.init(weights)
    first, state = transform.update(still, state, weights)
    second, state = transform.update(still, state, weights)
    np.testing.assert_array_equal(first["w"], (-0.05 if moves else -0.0) * weights["w"])
    np.testing.assert_allclose(second["w"], -0.05 * weights["w"], rtol=1e-6)


def test_a_flax_optimizer():
    model = nnx.Linear(4, 5, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, soap(1e-2, refresh_every=1), wrt=nnx.Param)
    before = float(jnp.sum(model(jnp.ones((2, 4))) ** 2))
    for _ in range(3):
        gradient = nnx.grad(lambda model: jnp.sum(model(jnp.ones((2, 4))) ** 2))(model)
        optimizer.update(model, gradient)
    assert float(jnp.sum(model(jnp.ones((2, 4))) ** 2)) < before


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        ({"bias": "matrix"}, r"parameter bias of shape \(3,\) is no matrix: that has two axes"),
        ({"blocks/*": "matrix"}, r"is no matrix: that has two axes$"),
        ({"blocks/*": "adam"}, "says 'adam'; it must be axes, None, or one of matrix, stacked"),
        ({"nothing/*": "matrix"}, "pattern 'nothing/\\*' matches no parameter"),
    ],
)
def test_patterns_that_cannot_be_are_refused(patterns, words):
    with pytest.raises(UserError, match=words):
        soap(1e-3, matrices=patterns).init(params(jnp.float32))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: soap(1e-3, refresh_every=0), "refresh_every is 0; it must be at least 1"),
        (lambda: soap(1e-3, block_size=-1), "block_size is -1; it must be at least 1"),
        (lambda: shampoo(1e-3, grafting="sgd"), "grafting is 'sgd'; it must be adam or none"),
        (lambda: muon(1e-3, coefficients="new"), "are 'new'; they must be classic or polar_expr"),
    ],
)
def test_options_that_cannot_be_are_refused(call, words):
    with pytest.raises(UserError, match=words):
        call()
