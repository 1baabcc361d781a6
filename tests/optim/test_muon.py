"""Muon's mathematics, against float64 NumPy and optax's own Muon, and the optimizer made of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_examples import ReferenceAdam, ReferenceMuon, reference_newton_schulz

from nag_jax.errors import UserError
from nag_jax.optim import AdamW, muon, scale_by_muon
from nag_jax.optim.muon import newton_schulz

SHAPES = {"tall": (12, 5), "wide": (5, 12), "square": (7, 7)}


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_newton_schulz_equals_reference_in_float64(shape):
    x = normal(0, *shape)
    with jax.enable_x64(True):
        y = newton_schulz(jnp.asarray(x), dtype=jnp.float64)
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, reference_newton_schulz(x), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_newton_schulz_brings_singular_values_near_one(dtype):
    x = normal(1, 3, 64, 32)
    y = np.asarray(newton_schulz(jnp.asarray(x, jnp.float32), dtype=dtype), np.float64)
    values = np.linalg.svd(y, compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.3


def test_newton_schulz_does_not_depend_on_scale_or_orientation():
    x = jnp.asarray(normal(2, 9, 4), jnp.float32)
    y = newton_schulz(x)
    np.testing.assert_allclose(newton_schulz(1e4 * x), y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(newton_schulz(x.T).T, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scaling", ["moonshot", "keller"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_directions_equal_reference(shape, scaling, nesterov):
    transform = scale_by_muon(
        scaling=scaling,
        nesterov=nesterov,
        newton_schulz_dtype=jnp.float64,
        momentum_dtype=jnp.float64,
    )
    reference = ReferenceMuon(shape, scaling, nesterov=nesterov)
    with jax.enable_x64(True):
        state = transform.init({"w": jnp.zeros(shape)})
        for step in range(4):
            g = normal(step, *shape)
            direction, state = transform.update({"w": jnp.asarray(g)}, state)
            np.testing.assert_allclose(direction["w"], reference(g), rtol=1e-10, atol=1e-11)
    np.testing.assert_allclose(state.momentum["w"], reference.m, rtol=1e-12)


# optax corrects the bias of its momentum, which changes a Nesterov direction after the first step
# (and nothing else: Newton-Schulz divides by the norm).
@pytest.mark.parametrize(("nesterov", "steps"), [(True, 1), (False, 5)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("scaling", ["moonshot", "keller"])
def test_optimizer_equals_optax_on_a_plain_matrix(shape, scaling, nesterov, steps):
    ours = muon(1e-2, weight_decay=0.1, scaling=scaling, nesterov=nesterov)
    theirs = optax.contrib.muon(
        1e-2,
        weight_decay=0.1,
        nesterov=nesterov,
        consistent_rms=0.2 if scaling == "moonshot" else None,
    )
    params = {"w": jnp.asarray(normal(9, *shape), jnp.float32)}
    our_state, their_state = ours.init(params), theirs.init(params)
    for step in range(steps):
        g = {"w": jnp.asarray(normal(step, *shape), jnp.float32)}
        our_update, our_state = jax.jit(ours.update)(g, our_state, params)
        their_update, their_state = jax.jit(theirs.update)(g, their_state, params)
        np.testing.assert_allclose(our_update["w"], their_update["w"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scaling", ["moonshot", "keller"])
def test_a_stack_equals_a_loop_over_it(scaling):
    g = jnp.asarray(normal(3, 2, 3, 6, 10), jnp.float32)
    stacked = scale_by_muon(scaling=scaling, matrices={"w": ((2,), (3,))})
    single = scale_by_muon(scaling=scaling)
    together, _ = stacked.update({"w": g}, stacked.init({"w": g}))
    for i in range(2):
        for j in range(3):
            alone, _ = single.update({"w": g[i, j]}, single.init({"w": g[i, j]}))
            np.testing.assert_allclose(together["w"][i, j], alone["w"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scaling", ["moonshot", "keller"])
@pytest.mark.parametrize(
    ("shape", "rows", "columns", "order"),
    [
        ((3, 8, 2, 6), (1,), (2, 3), (0, 1, 2, 3)),  # query: embed to heads x head_dim
        ((3, 2, 6, 8), (1, 2), (3,), (0, 1, 2, 3)),  # output: heads x head_dim to embed
        ((2, 8, 3, 6), (3, 0), (1,), (2, 3, 0, 1)),  # a batch axis in the middle, rows out of order
    ],
)
def test_several_axes_equal_the_reshaped_matrix(scaling, shape, rows, columns, order):
    g = jnp.asarray(normal(4, *shape), jnp.float32)
    transform = scale_by_muon(scaling=scaling, matrices={"w": (rows, columns)})
    flat = scale_by_muon(scaling=scaling, matrices={"w": ((1,), (2,))})
    direction, state = transform.update({"w": g}, transform.init({"w": g}))

    moved = g.transpose(order)
    size_in = np.prod([shape[i] for i in rows])
    matrices = moved.reshape(moved.shape[0], size_in, -1)
    expected, _ = flat.update({"w": matrices}, flat.init({"w": matrices}))
    expected = expected["w"].reshape(moved.shape).transpose(np.argsort(order))
    np.testing.assert_allclose(direction["w"], expected, rtol=1e-5, atol=1e-6)
    assert state.momentum["w"].shape == shape


def test_keller_factor_reads_the_flax_layout():
    """[in, out] with out > in is scaled up, in > out is not."""
    for shape, factor in (((4, 16), 2.0), ((16, 4), 1.0)):
        g = {"w": jnp.asarray(normal(5, *shape), jnp.float32)}
        transform = scale_by_muon(scaling="keller")
        direction, _ = transform.update(g, transform.init(g))
        np.testing.assert_allclose(direction["w"], factor * newton_schulz(g["w"]), rtol=1e-4)


def test_moonshot_updates_are_about_as_large_as_adams():
    g = {"w": jnp.asarray(normal(6, 48, 96), jnp.float32)}
    transform = scale_by_muon()
    direction, _ = transform.update(g, transform.init(g))
    assert 0.15 < float(jnp.sqrt(jnp.mean(direction["w"] ** 2))) < 0.25


def test_bfloat16_iteration_is_close_to_float32():
    g = {"w": jnp.asarray(normal(7, 32, 64), jnp.float32)}
    a, b = (
        transform.update(g, transform.init(g))[0]["w"]
        for transform in (scale_by_muon(), scale_by_muon(newton_schulz_dtype=jnp.bfloat16))
    )
    assert a.dtype == b.dtype == jnp.float32
    assert 0 < float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a)) < 0.1


@pytest.mark.parametrize(
    ("momentum_dtype", "expected"), [(jnp.float32, jnp.float32), (None, jnp.bfloat16)]
)
def test_state_is_one_tree_in_the_dtype_asked_for(momentum_dtype, expected):
    params = {"w": jnp.ones((4, 6), jnp.bfloat16)}
    transform = scale_by_muon(momentum_dtype=momentum_dtype)
    state = transform.init(params)
    direction, new_state = transform.update(params, state)
    for s in (state, new_state):
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(s)] == [((4, 6), expected)]
    assert direction["w"].dtype == jnp.bfloat16


def test_other_leaves_get_adamw():
    params = {
        "bias": jnp.asarray(normal(10, 6), jnp.float32),
        "stack": jnp.asarray(normal(11, 3, 4, 6), jnp.float32),
        "table": jnp.asarray(normal(12, 9, 4), jnp.float32),
    }
    rate = 0.01
    transform = muon(
        rate,
        weight_decay=0.2,
        others=AdamW(lambda count: 0.02 / (1.0 + count), weight_decay=0.3),
        matrices={"table": None, "st*": ((1,), (2,))},
    )
    adams = {name: ReferenceAdam(params[name].shape) for name in ("bias", "table")}
    muons = [ReferenceMuon((4, 6), "moonshot") for _ in range(3)]
    state = transform.init(params)
    for step in range(3):
        g = {k: jnp.asarray(normal(20 + step, *p.shape), jnp.float32) for k, p in params.items()}
        updates, state = jax.jit(transform.update)(g, state, params)
        for name, adam in adams.items():
            expected = -0.02 / (1.0 + step) * (adam(g[name]) + 0.3 * np.asarray(params[name]))
            np.testing.assert_allclose(updates[name], expected, rtol=2e-5, atol=1e-8)
        for i, reference in enumerate(muons):
            expected = -rate * (reference(g["stack"][i]) + 0.2 * np.asarray(params["stack"][i]))
            np.testing.assert_allclose(updates["stack"][i], expected, rtol=1e-3, atol=1e-6)
        params = optax.apply_updates(params, updates)


def test_a_leaf_that_is_no_matrix_is_refused_by_path():
    with pytest.raises(UserError, match=r"inner/bias of shape \(4,\)"):
        scale_by_muon().init({"inner": {"bias": jnp.ones(4)}})


@pytest.mark.parametrize("make", [scale_by_muon, lambda **kw: muon(1e-3, **kw)])
def test_a_pattern_without_a_match_is_refused(make):
    with pytest.raises(UserError, match=r"'qeury\*' matches no parameter"):
        make(matrices={"qeury*": ((0,), (1,))}).init({"query": jnp.ones((4, 4))})


def test_an_unknown_scaling_is_refused():
    with pytest.raises(UserError, match="moonshot or keller"):
        scale_by_muon(scaling="moonshoot")


def test_polar_express_comes_closer_than_the_classic_coefficients():
    """Singular values from a thousandth of the norm on, after six steps."""
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.normal(size=(40, 40)))[0] for _ in range(2))
    values = np.geomspace(2e-3, 1, 40)
    x = jnp.asarray(u * (values / np.linalg.norm(values)) @ v, jnp.float32)
    spread = {}
    for name in ("classic", "polar_express"):
        found = np.linalg.svd(newton_schulz(x, 6, coefficients=name), compute_uv=False)
        spread[name] = np.abs(found - 1).max()
    assert spread["polar_express"] < 0.015 < 0.2 < spread["classic"]
