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


MORE = ("shampoo", "kl_shampoo", "spectral")


@pytest.mark.parametrize(
    "kind",
    ["adamw", "muon", "soap", *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)],
)
def test_eight_devices_equal_one(kind):
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "true",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here)]),
    }
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
