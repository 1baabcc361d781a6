"""The kernels on a mesh of simulated devices: the values of one, and nothing large that is sent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARDED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding
from nag_jax.sharding.collectives import collectives
from pallas_kernels import nag_update

mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
rng = np.random.default_rng(0)
r, f = (jnp.asarray(rng.normal(size=(8, 19, 40)), jnp.float32) for _ in range(2))
a = jnp.asarray(rng.uniform(size=(8, 19)), jnp.float32)

def loss(spec=None, implementation=sys.argv[1]):
    def function(r, f, a):
        out, growth = nag_update(r, f, a, implementation=implementation, token_spec=spec)
        return jnp.sum(jnp.sin(out)) + jnp.sum(growth * growth)
    return jax.value_and_grad(function, (0, 1, 2))

expected = loss(implementation="reference")(r, f, a)
for spec in (jax.P("data"), jax.P(("data", "tensor")), None):
    placed = [jax.device_put(x, NamedSharding(mesh, spec or jax.P())) for x in (r, f, a)]
    with jax.set_mesh(mesh):
        compiled = jax.jit(loss(spec)).lower(*placed).compile()
        got = compiled(*placed)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, expected)
    # Nothing but the sums that are the loss.
    sizes = [one.bytes for one in collectives(compiled.as_text(), 8)]
    assert max(sizes, default=0) <= 64, (spec, sizes)
"""


# The others' interpreters take one device; `test_gpu_kernels` compiles those for a mesh.
@pytest.mark.parametrize(
    "implementation", ["mosaic_tpu", pytest.param("pallas_triton", marks=pytest.mark.slow)]
)
def test_on_a_mesh_each_device_updates_its_own_tokens(implementation):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    result = subprocess.run(
        [sys.executable, "-c", SHARDED, implementation],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
