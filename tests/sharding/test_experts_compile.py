"""The ragged exchange, forward and backward, compiled for TPU and GPU meshes that are not there.

No device is needed, but the compiler is: without libtpu or the CUDA plugin these tests skip. The
offsets and sizes are checked in `test_experts`; that a device moves the rows is not shown here.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from compile_targets import gpu_mesh, tpu_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nag_jax.models.linear import Numerics, contract_grouped
from nag_jax.parameters import declare, info_of
from nag_jax.sharding import experts
from nag_jax.sharding.rules import BATCH_AXES, parameter_spec

pytestmark = pytest.mark.absent_device

ROWS = P(BATCH_AXES)
AXES = {
    "gate": ("expert", "embed", "hidden"),
    "up": ("expert", "embed", "hidden"),
    "down": ("expert", "hidden", "embed"),
}


def compile_gradients(mesh, platform, dtype, exchange="auto", num_experts=8, k=2):
    """Value and gradients of experts of width 512 over rows of 256, 16 rows of 512 tokens."""
    width, hidden, batch, length = 256, 512, 16, 512
    # tokamax looks for a device even while compiling for one that is not there.
    implementation = "ragged_dot" if platform == "tpu" else "blocked"
    exchange = experts.choose(exchange, platform).name
    sizes = {"expert": num_experts, "embed": width, "hidden": hidden}

    def as_parameters(weights):
        return {
            name: declare(w, AXES[name], "matrix", rows=AXES[name][1:2], columns=AXES[name][2:])
            for name, w in weights.items()
        }

    def swiglu(weights, x, group_sizes):
        def product(name, x):
            numerics = Numerics(dtype)
            return contract_grouped(
                f"moe/{name}", x, weights[name], group_sizes, numerics, implementation
            )

        return product("down", jax.nn.silu(product("gate", x)) * product("up", x))

    def both(weights, x, chosen, shares, d_y):
        def run(weights, x, shares):
            return experts.run_experts(
                swiglu, as_parameters(weights), x, chosen, shares, exchange=exchange
            )

        y, pull_back = jax.vjp(run, weights, x, shares)
        return y, pull_back(d_y)

    def array(*shape, dtype=dtype, spec=ROWS):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    shapes = {
        name: jax.ShapeDtypeStruct([sizes[axis] for axis in axes], jnp.float32)
        for name, axes in AXES.items()
    }
    infos = {name: info_of(w, name) for name, w in as_parameters(shapes).items()}
    weights = {
        name: array(*info.shape, dtype=info.dtype, spec=parameter_spec(info, mesh, name))
        for name, info in infos.items()
    }
    with jax.set_mesh(mesh):
        return (
            jax.jit(both)
            .lower(
                weights,
                array(batch, length, width),
                array(batch, length, k, dtype=jnp.int32),
                array(batch, length, k),
                array(batch, length, width),
            )
            .compile()
        )


def collectives(compiled):
    """Names of the collectives of a compiled program."""
    names = "all-gather|all-reduce|reduce-scatter|ragged-all-to-all|all-to-all|collective-permute"
    return sorted(re.findall(rf" ({names})(?:-start)?\(", compiled.as_text()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ragged_exchange_compiles_for_tpu(dtype):
    """Rows and results cross once each way; the sums over data and tensor, and nothing else."""
    compiled = compile_gradients(tpu_mesh("v5e:4x4", (2, 1, 2, 4)), "tpu", dtype)
    exchanged = ["ragged-all-to-all"] * 4
    assert [x for x in collectives(compiled) if x != "all-reduce"] == exchanged
    text = compiled.as_text()
    assert 'custom_call_target="tpu_custom_call"' in text
    # Without a kernel all rows are multiplied, masked, once for each expert.
    old = jax.__version_info__ < (0, 11)
    assert ("output_mask" in text) == (old and dtype == "float32")
    assert ("tgmm" in text) == (old and dtype == "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ragged_exchange_compiles_for_gpu(dtype):
    """As for TPU; the sizes are gathered too, and weights over fsdp."""
    compiled = compile_gradients(gpu_mesh(8, (1, 2, 1, 4)), "gpu", dtype)
    found = collectives(compiled)
    assert found.count("ragged-all-to-all") == 4
    assert set(found) == {"all-gather", "ragged-all-to-all", "reduce-scatter"}
