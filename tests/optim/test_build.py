"""The whole chain of a run: rates, decay, clip and centring by role, against float64 NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
from optimizer_examples import (
    ReferenceAdam,
    ReferenceMuon,
    config,
    info,
    model_infos,
    random_like,
)

from nag_jax.errors import UserError
from nag_jax.optim import build_optimizer
from nag_jax.parameters import flatten

TOTAL = 40


class ReferenceOptimizer:
    """Clip, direction, decoupled decay, rate and row centring, on flat dicts of float64 arrays."""

    def __init__(self, config, infos, rate):
        self.config, self.infos, self.rate, self.step = config, flatten(infos), rate, 0
        self.directions = {path: self.direction(i) for path, i in self.infos.items()}

    def direction(self, info):
        if info.role != "matrix" or self.config["kind"] == "adamw":
            return ReferenceAdam(info.shape)
        rows = int(np.prod([info.shape[i] for i in info.rows]))
        columns = int(np.prod([info.shape[i] for i in info.columns]))
        stack = [ReferenceMuon((rows, columns), "moonshot") for _ in range(info.shape[0])]

        def matrices(g):  # the example's matrices have one stack axis in front, axes in order
            blocks = g.reshape(-1, rows, columns)
            return np.stack([m(x) for m, x in zip(stack, blocks, strict=True)]).reshape(info.shape)

        return matrices

    def update(self, grads, params):
        norm = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
        clip = self.config["clip_norm"]
        factor = clip / norm if clip and norm > clip else 1.0
        decay = {"matrix": self.config["weight_decay"], "embedding": self.config["embedding_decay"]}
        updates = {}
        for path, g in grads.items():
            role = self.infos[path].role
            rate = self.rate(self.step) * self.config["rate_multiplier"].get(role, 1.0)
            u = self.directions[path](factor * g) + decay.get(role, 0.0) * params[path]
            updates[path] = -rate * u
            if self.infos[path].centred:
                updates[path] -= updates[path].mean(-1, keepdims=True)
        self.step += 1
        return updates


def cosine_rate(step, peak=3e-3, warmup=5, final=0.1):
    done = np.clip((step - warmup) / (TOTAL - warmup), 0, 1)
    return (
        peak
        * min(1, (step + 1) / warmup)
        * (final + (1 - final) * 0.5 * (1 + np.cos(np.pi * done)))
    )


def as_float64(tree):
    return {path: np.asarray(x, np.float64) for path, x in flatten(tree).items()}


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"kind": "adamw", "embedding_decay": 0.05}, 2e-5),
        ({"kind": "adamw", "clip_norm": 0.0, "rate_multiplier__scale": 10.0}, 2e-5),
        ({"kind": "muon", "embedding_decay": 0.05, "rate_multiplier__head": 0.5}, 1e-3),
    ],
)
def test_twenty_steps_equal_the_reference(changes, tolerance):
    infos, settings = model_infos(), config(**changes)
    transform, schedule = build_optimizer(settings, TOTAL, infos)
    reference = ReferenceOptimizer(settings, infos, cosine_rate)
    params = random_like(infos, 0)
    expected = as_float64(params)
    state = transform.init(params)
    update = jax.jit(transform.update)
    for step in range(20):
        # Every third gradient is short enough not to be clipped.
        grads = random_like(infos, 100 + step, scale=0.01 if step % 3 == 0 else 1.0)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        for path, u in reference.update(as_float64(grads), expected).items():
            expected[path] = expected[path] + u
        np.testing.assert_allclose(schedule(step), cosine_rate(step), rtol=1e-5)
    moved = as_float64(jax.tree.map(jnp.subtract, params, random_like(infos, 0)))
    start = as_float64(random_like(infos, 0))
    for path, value in moved.items():
        wanted = expected[path] - start[path]
        np.testing.assert_allclose(
            value, wanted, rtol=0, atol=tolerance * np.abs(wanted).max() + 3e-7, err_msg=path
        )


def test_only_matrices_and_embeddings_decay():
    infos = model_infos()
    transform, _ = build_optimizer(config(embedding_decay=0.2), TOTAL, infos)
    params = random_like(infos, 1)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(transform.update)(zeros, transform.init(params), params)
    for path, u in flatten(updates).items():
        p, first_rate = np.asarray(flatten(params)[path]), 3e-3 / 5
        share = {"matrix": 0.1, "embedding": 0.2}.get(flatten(infos)[path].role, 0.0)
        wanted = -first_rate * share * p
        if flatten(infos)[path].centred:
            wanted -= wanted.mean(-1, keepdims=True)
        np.testing.assert_allclose(u, wanted, rtol=1e-5, atol=1e-9, err_msg=path)


def test_each_role_has_its_own_rate():
    """The first Adam update is -rate * sign(gradient), which shows the rate."""
    roles = ("embedding", "head", "gate", "scale", "bias", "conv")
    infos = {role: info(("embed",), role, (4,)) for role in roles}
    multipliers = {role: 0.5 + i for i, role in enumerate(roles)}
    transform, schedule = build_optimizer(config(rate_multiplier=multipliers), TOTAL, infos)
    params = random_like(infos, 2)
    updates, _ = transform.update(params, transform.init(params), params)
    for role in roles:
        wanted = -float(schedule(0)) * multipliers[role] * np.sign(params[role])
        np.testing.assert_allclose(updates[role], wanted, rtol=1e-4)


def test_b2_is_not_rounded_on_bfloat16_parameters():
    """bfloat16 would round 0.999 to 1; updates follow those of float32 parameters to rounding."""
    infos = model_infos()
    transform, _ = build_optimizer(config(kind="adamw", adam_b2=0.999), TOTAL, infos)
    params = random_like(infos, 3, dtype=jnp.bfloat16)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    state, wide_state = transform.init(params), transform.init(wide)
    update = jax.jit(transform.update)
    for step in range(3):
        grads = random_like(infos, 200 + step, dtype=jnp.bfloat16)
        updates, state = update(grads, state, params)
        wide_grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        wide_updates, wide_state = update(wide_grads, wide_state, wide)
        for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(wide_updates), strict=True):
            assert a.dtype == jnp.bfloat16
            a, b = (np.asarray(x, np.float32) for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-9)


def test_the_whole_gradient_is_clipped_in_float32():
    """300,000 bfloat16 ones: summed in bfloat16 their squares would stop at 256."""
    infos = {"a": info(("embed",), "bias", (300_000,)), "b": info(("embed",), "bias", (4,))}
    transform, _ = build_optimizer(config(adam_eps=1.0), TOTAL, infos)
    params = jax.tree.map(lambda i: jnp.ones(i.shape, jnp.bfloat16), infos)
    updates, _ = transform.update(params, transform.init(params), params)
    g = 1.0 / np.sqrt(300_004.0)
    np.testing.assert_allclose(
        np.asarray(updates["b"], np.float32), -(3e-3 / 5) * g / (g + 1.0), rtol=1e-2
    )


@pytest.mark.parametrize("kind", ["muon", "soap", "shampoo"])
def test_state_has_the_same_structure_without_decay_and_clip(kind):
    """So that turning one off is a change of numbers, not of the checkpoint's layout."""
    infos = model_infos()
    params = random_like(infos, 4)
    structures = [
        jax.tree.structure(
            build_optimizer(config(kind=kind, **changes), TOTAL, infos)[0].init(params)
        )
        for changes in ({}, {"weight_decay": 0.0, "clip_norm": 0.0}, {"embedding_decay": 0.1})
    ]
    assert structures[0] == structures[1] == structures[2]


def test_a_class_of_the_users_own_moves_the_matrices():
    infos = {"w": info(("embed", "hidden"), "matrix", (4, 6), (0,), (1,))}
    settings = config(kind="optimizer_examples:SignKind", weight_decay=0.0, sharpness=2.0)
    transform, schedule = build_optimizer(settings, TOTAL, infos)
    params = random_like(infos, 6)
    updates, _ = transform.update(params, transform.init(params), params)
    np.testing.assert_allclose(updates["w"], -2.0 * schedule(0) * jnp.sign(params["w"]), rtol=1e-6)


def test_a_config_dict_serves_as_config():
    infos = model_infos()
    settings = ml_collections.ConfigDict(config()).lock()
    transform, _ = build_optimizer(settings, TOTAL, infos)
    transform.init(random_like(infos, 7))


def test_an_empty_model_checks_the_config_alone():
    build_optimizer(config(), TOTAL, {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kind", "adamww"),
        ("schedule__kind", "cosin"),
        ("learning_rate", -1.0),
        ("weight_decay", -0.1),
        ("embedding_decay", -0.1),
        ("clip_norm", -1.0),
        ("adam_b1", 1.0),
        ("adam_b2", 1.5),
        ("adam_eps", 0.0),
        ("momentum", 1.0),
        ("newton_schulz_steps", 0),
        ("scaling", "moonshoot"),
        ("newton_schulz_dtype", "float16"),
        ("rate_multiplier__gate", -0.1),
        ("schedule__warmup_steps", TOTAL + 1),
    ],
)
def test_wrong_values_are_refused_by_key(key, value):
    with pytest.raises(UserError, match=f"optimizer.{key.replace('__', '.')}"):
        build_optimizer(config(**{key: value}), TOTAL, {})


def test_an_unknown_role_is_refused_by_path():
    infos = model_infos()
    infos["log_gain"] = dataclasses.replace(infos["log_gain"], role="gain")
    with pytest.raises(UserError, match="log_gain has the unknown role 'gain'"):
        build_optimizer(config(), TOTAL, infos)


def test_a_parameter_without_metadata_is_refused():
    infos = model_infos()
    transform, _ = build_optimizer(config(), TOTAL, infos)
    with pytest.raises(UserError, match="extra has no metadata"):
        transform.init({**random_like(infos, 5), "extra": jnp.ones(3)})


@pytest.mark.usefixtures("x64")
def test_momenta_of_float64_parameters_are_float64():
    infos = {"w": info(("embed", "hidden"), "matrix", (4, 6), (0,), (1,))}
    transform, _ = build_optimizer(config(), 10, infos)
    state = transform.init({"w": jnp.ones((4, 6), jnp.float64)})
    assert {x.dtype for x in jax.tree.leaves(state) if x.shape} == {jnp.dtype("float64")}


@pytest.mark.parametrize("kind", ["soap", "kl_shampoo"])
def test_only_shampoo_takes_plain_sums(kind):
    build_optimizer(config(kind="shampoo", b2=1.0), 10, {})
    with pytest.raises(UserError, match="optimizer.b2 is 1.0; it must be at least 0 and below 1"):
        build_optimizer(config(kind=kind, b2=1.0), 10, {})
