"""The loss on meshes of this process's devices: one device's values, and what is sent.

Started by `test_loss` with eight simulated devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from ml_collections import ConfigDict
from small_models import quick_compilation

from nag_jax.models import losses
from nag_jax.models.losses import cross_entropy
from nag_jax.sharding import rules
from nag_jax.sharding.collectives import collectives
from nag_jax.sharding.mesh import make_mesh

LENGTH, VOCAB = 5, 45


def check(rows, padded, width, chunk, loudest=1.0, **axes):
    """Values and gradients as one device has them; sent are the matrix and sums over tokens.

    The last row's logits are `loudest` times the others'.
    """
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(rows, LENGTH, width)), jnp.float32)
    scale = jnp.asarray(np.exp(rng.normal(size=(rows, LENGTH))) / 8, jnp.float32)
    scale = scale.at[-1].multiply(loudest)
    matrix = jnp.asarray(rng.normal(size=(padded, width)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, VOCAB, (rows, LENGTH)))
    weights = jnp.asarray(rng.normal(size=(rows, LENGTH)), jnp.float32)

    def function(hidden, scale, matrix):
        def loss(*inputs):
            nats, correct = cross_entropy(*inputs, targets, VOCAB, chunk)
            return jnp.sum(weights * nats), (nats, correct)

        return jax.grad(loss, (0, 1, 2), has_aux=True)(hidden, scale, matrix)

    expected = jax.jit(function)(hidden, scale, matrix)
    mesh = make_mesh(
        ConfigDict({axis: axes.get(axis, 1) for axis in rules.MESH_AXES}), jax.devices()
    )
    stored = rules.stored_spec(("vocabulary", "embed"), matrix.shape, mesh)
    batch = rules.rows_spec(rows, mesh)
    tokens, wide, table = (NamedSharding(mesh, spec) for spec in (batch, batch, stored))
    with jax.set_mesh(mesh):
        compiled = (
            jax.jit(function, out_shardings=((wide, tokens, table), None))
            .lower(*jax.device_put((hidden, scale, matrix), (wide, tokens, table)))
            .compile()
        )
        got = compiled(*jax.device_put((hidden, scale, matrix), (wide, tokens, table)))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        # All rows but the loudest to its own rounding; it, to that of its large numbers.
        for part in (slice(-1), slice(-1, None)) if x.shape[0] == rows else (slice(None),):
            atol = 1e-5 * max(1, np.abs(y[part]).max())
            np.testing.assert_allclose(x[part], y[part], 1e-5, atol, err_msg=f"{axes} {chunk}")
    sent = {}
    for one in collectives(compiled.as_text(), mesh.size):
        if not one.conditional:
            sent[one.kind] = sent.get(one.kind, 0) + one.bytes * one.times
    vocabulary = mesh.shape["tensor"] if "tensor" in stored else 1
    across = rules.batch_shards(mesh) // mesh.shape["data"] if stored[1] else 1
    data = rules.batch_shards(mesh) // across
    whole = 4 * matrix.size // vocabulary
    part = 1.3 * whole  # filling, where no chunk divides the rows
    on_device = 4 * rows * LENGTH // rules.batch_shards(mesh) * (width + 5)
    bounds = {
        "all-gather": 2 * (across - 1) / across * part,
        "reduce-scatter": (across - 1) / across * part,
        "all-reduce": 2 * (data - 1) / data * part / across
        + 2 * (vocabulary - 1) / vocabulary * on_device,
    }
    if batch == jax.P():  # the matrix is gathered, once a pass, and its gradient is everyone's
        bounds = {"all-gather": 2 * part, "all-reduce": 2 * 4 * rows * LENGTH * (width + 5)}
    # Results that are no one's but the test's, [B, T] as whole arrays.
    small = 4 * 4 * rows * LENGTH
    for kind, size in sent.items():
        assert size <= bounds.get(kind, 0) + small, (axes, chunk, kind, sent, bounds)
    if across > 1 and batch != jax.P():
        assert sent["reduce-scatter"] >= whole - whole // across, (axes, sent)
    print("checked")


if __name__ == "__main__":
    losses.SAMPLE = 4  # fewer rows than any device has
    with quick_compilation():
        for chunk in (0, 7, 12):
            check(16, 48, 32, chunk, data=8)
            check(16, 48, 32, chunk, fsdp=8)
            check(16, 48, 32, chunk, data=2, fsdp=2, tensor=2)
            check(16, 48, 32, chunk, fsdp=2, tensor=2, expert=2)
        # The device with the last row alone sees an exponential overflow.
        check(16, 48, 32, 7, 1e3, data=2, fsdp=2, tensor=2)
        check(16, 48, 32, 7, 1e3, fsdp=8)
        check(16, 64, 32, 10, data=2, tensor=4)  # one device with padding alone
        check(16, 48, 30, 12, fsdp=4, data=2)  # a width that is not split
        check(16, 47, 32, 12, fsdp=4, tensor=2)  # a vocabulary that is not
        check(6, 48, 32, 12, fsdp=4, tensor=2)  # rows that are not
        check(3, 48, 32, 12, fsdp=8)
