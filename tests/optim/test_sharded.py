"""On a mesh the update is that of one device, and the state is really divided."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import jax, numpy as np, optax
from jax.sharding import AxisType, NamedSharding
from optimizer_examples import config, model_infos, random_like
from nag_jax.optim import build_optimizer, state_like_params
from nag_jax.sharding.rules import derived_sharding

infos = model_infos()
mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
axes = {"embed": "fsdp"}
shardings = jax.tree.map(
    lambda i: NamedSharding(mesh, jax.P(*(axes.get(name) for name in i.axes))), infos
)
options = {}
if "refresh_every" in config(kind=sys.argv[1]):
    # A longer side's factor would lack rank at first, and any basis of the rest would be right.
    options = {"refresh_every": 2, "max_side": 16}
transform, _ = build_optimizer(config(kind=sys.argv[1], embedding_decay=0.1, **options), 10, infos)
params = random_like(infos, 0, dtype=np.float64)
replicated = NamedSharding(mesh, jax.P())
state_shardings = state_like_params(
    transform, params, shardings, replicated, derived_sharding
)

def step(params, state, grads):
    updates, state = transform.update(grads, state, params)
    return optax.apply_updates(params, updates), state

single = jax.jit(step)
jitted = jax.jit(step, out_shardings=(shardings, state_shardings))

def many(*arguments):
    with jax.set_mesh(mesh):
        return jitted(*arguments)
p, s = params, transform.init(params)
P = jax.device_put(params, shardings)
S = jax.jit(transform.init, out_shardings=state_shardings)(P)
for i in range(4):
    grads = random_like(infos, i + 1, dtype=np.float64)
    p, s = single(p, s, grads)
    P, S = many(P, S, jax.device_put(grads, shardings))
for a, b, start in zip(*map(jax.tree.leaves, (p, P, params)), strict=True):
    scale = np.abs(np.asarray(a) - np.asarray(start)).max()
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-3 * scale)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), s, S)
large = [x for x in jax.tree.leaves(S) if x.size > 3]
share = sum(x.addressable_shards[0].data.nbytes for x in large) / sum(x.nbytes for x in large)
assert share <= 1.1 / 4, share
assert all(len(x.devices()) == 8 for x in jax.tree.leaves(S))
"""


SENT = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from nag_jax import optim
from nag_jax.sharding.collectives import collectives
from nag_jax.sharding.rules import derived_sharding

mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
whole = NamedSharding(mesh, jax.P())

def sent(kind, count, spec):
    # Bytes that a device receives in every update, and those of updates that refresh, by kind.
    transform = getattr(optim, f"scale_by_{kind}")(matrices={"w": "stacked_matrix"})
    placed = {"w": NamedSharding(mesh, spec)}
    params = {"w": jax.ShapeDtypeStruct((count, 32, 48), jnp.float32, sharding=placed["w"])}
    state_at = optim.state_like_params(transform, params, placed, whole, derived_sharding)
    state = jax.tree.map(
        lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
        jax.eval_shape(transform.init, params),
        state_at,
    )

    def step(params, state, grads):
        # As in training, gradients are computed on: clipped, say.
        updates, state = transform.update(jax.tree.map(lambda g: 0.5 * g, grads), state, params)
        return jax.tree.map(jnp.add, params, updates), state

    with jax.set_mesh(mesh):
        jitted = jax.jit(step, out_shardings=(placed, state_at))
        text = jitted.lower(params, state, params).compile().as_text()
    always, rare = {}, {}
    for one in collectives(text, 8):
        if one.bytes > 64:  # more than flags and counts
            table = rare if one.conditional else always
            table[one.kind] = table.get(one.kind, 0) + one.times * one.bytes
    return always, rare

share = 7 / 8 * 4 * 32 * 48
# Replicated: the finished updates and no more, the stack filled up to 8 matrices.
assert sent("muon", 6, jax.P()) == ({"all-gather": 8 * share}, {}), sent("muon", 6, jax.P())
# Split: there and back, each a whole exchange of the eighth that a device has.
assert sent("muon", 8, jax.P(None, "fsdp")) == ({"all-to-all": 2 * share}, {})
for kind in ("soap", "shampoo", "kl_shampoo"):
    always, rare = sent(kind, 6, jax.P())
    # Bases travel when they are renewed; the rest of a replicated update is every device's own.
    assert not always and set(rare) == {"all-gather"}, (kind, always, rare)
    # Split: factors lie whole, one device has each; rows are exchanged and one side is summed.
    always, rare = sent(kind, 8, jax.P(None, "fsdp"))
    assert sum(always.values()) <= 28 * share and "all-gather" not in always, (kind, always)
"""

MORE = ("adamw", "shampoo", "kl_shampoo", "spectral")


@pytest.mark.parametrize(
    "kind",
    ["muon", "soap", *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)],
)
def test_eight_devices_equal_one(kind):
    run(SCRIPT, kind)


@pytest.mark.slow
def test_what_an_update_sends():
    """Collectives of the compiled update: nothing that another layout of the work would spare."""
    run(SENT)


def run(script, *arguments):
    """Runs a script on eight simulated devices."""
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "true",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here)]),
    }
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
