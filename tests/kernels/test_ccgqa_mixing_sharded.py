"""CCGQA's mixing on a mesh of simulated devices: one device's values, and nothing large sent."""

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
from pallas_kernels import ccgqa_mix
from pallas_kernels.ccgqa_mixing import Convolutions

mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
rng = np.random.default_rng(0)
num_kv_heads, B, T, h = int(sys.argv[1]), 4, 37, 6
counts = (4, num_kv_heads)

def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

wide = [normal(B, T, n, h) for n in (*counts, num_kv_heads)]
learned = [
    Convolutions(normal(2, n, h), normal(n, h), normal(3, n, h, h), normal(n, h)) for n in counts
] + [normal(num_kv_heads)]
positions = jnp.asarray(np.tile(np.arange(T) % 11, (B, 1)), jnp.int32)

def loss(implementation, **split):
    def function(wide, learned):
        out = ccgqa_mix(*wide, *learned, positions, implementation=implementation, **split)
        return sum(jnp.sum(jnp.sin(x)) for x in out)
    return jax.value_and_grad(function, (0, 1))

expected = loss("reference")(wide, learned)
heads = "tensor" if num_kv_heads % 2 == 0 else None
weights = 4 * sum(x.size for x in jax.tree.leaves(learned))
for rows, heads in (("data", heads), ("data", None), (("data",), heads), (None, None)):
    placed = [jax.device_put(x, NamedSharding(mesh, jax.P(rows, None, heads))) for x in wide]
    whole = jax.device_put(learned, NamedSharding(mesh, jax.P()))
    with jax.set_mesh(mesh):
        run = jax.jit(loss("mosaic_tpu", rows=rows, heads=heads))
        compiled = run.lower(placed, whole).compile()
        got = compiled(placed, whole)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), got, expected)
    # The gradients of the weights alone, over devices that have other rows or heads.
    sizes = [one.bytes for one in collectives(compiled.as_text(), 8)]
    assert sum(sizes) <= (2 * weights if rows else 64), (rows, heads, sizes, weights)
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_each_device_mixes_its_own_rows_and_heads(num_kv_heads):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    result = subprocess.run(
        [sys.executable, "-c", SHARDED, str(num_kv_heads)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
