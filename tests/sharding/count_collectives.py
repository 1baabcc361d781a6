"""Counts collectives on eight simulated devices; started by `test_collectives`."""

import sys
from collections import Counter

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict
from small_models import quick_compilation, small_config

from nag_jax.models.transformer import build_model
from nag_jax.optim import build_optimizer
from nag_jax.parameters import flatten
from nag_jax.sharding import rules
from nag_jax.sharding.collectives import KINDS, collectives, totals
from nag_jax.sharding.mesh import make_mesh
from nag_jax.training.state import abstract_state
from nag_jax.training.step import jit_train_step, train_step

ROWS, LENGTH, WIDTH, VOCAB = 16, 32, 64, 50


def mesh_of(**axes):
    lengths = {axis: axes.get(axis, 1) for axis in rules.MESH_AXES}
    return make_mesh(ConfigDict(lengths), jax.devices())


def programs():
    """One collective of each kind, in a loop and out of it."""
    mesh = mesh_of(data=2, tensor=4)

    def mapped(x):
        def body(x, _):
            return jax.lax.psum(x, "tensor") * 0.1, None

        x, _ = jax.lax.scan(body, x, length=5)
        gathered = jax.lax.all_gather(x, "data", tiled=True)
        scattered = jax.lax.psum_scatter(gathered, "tensor", tiled=True)
        pairs = [(0, 1), (1, 0)]
        return (
            scattered,
            jax.lax.ppermute(x, "data", pairs),
            jax.lax.all_to_all(x, "tensor", 0, 0, tiled=True),
        )

    run = jax.shard_map(mapped, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    text = jax.jit(run).lower(jnp.zeros((32, 8))).compile().as_text()
    found = {(one.kind, one.devices): one for one in collectives(text, 8)}
    size = 32 * 8 * 4
    expected = {
        ("all-reduce", 4): (2 * size * 3 // 4, 5),
        ("all-gather", 2): (size, 1),
        ("reduce-scatter", 4): (2 * size * 3 // 4, 1),
        ("collective-permute", 8): (size, 1),
        ("all-to-all", 4): (size * 3 // 4, 1),
    }
    assert {key: (one.bytes, one.times) for key, one in found.items()} == expected, found


def step_collectives(layers, feedforward, **axes):
    """A model and the collectives of its training step."""
    config = small_config(
        {"optimizer.kind": "adamw"},
        connection__kind="nag",
        attention__kind="ccgqa",
        attention__num_heads=4,
        attention__num_kv_heads=2,
        feedforward__kind=feedforward,
        d_model=WIDTH,
        num_blocks=layers,
        vocab_multiple=8,
        loss_chunk=0,
    )
    model = build_model(config, VOCAB)
    optimizer, schedule = build_optimizer(config.optimizer, 100, model.infos)
    mesh = mesh_of(**axes)
    function = train_step(
        model,
        optimizer,
        schedule,
        steps=config.train.steps,
        accumulation=1,
        taps=False,
        skip_not_finite=False,
    )
    step = jit_train_step(function, model, optimizer, mesh)
    batch = {
        name: jax.ShapeDtypeStruct((ROWS, LENGTH + 1), dtype, sharding=rules.batch_sharding(mesh))
        for name, dtype in (("tokens", jnp.int32), ("segment_ids", jnp.int32), ("valid", bool))
    }
    with jax.set_mesh(mesh):
        text = step.lower(abstract_state(model, optimizer, mesh), batch).compile().as_text()
    return model, collectives(text, mesh.size)


def step(**axes):
    """Bytes by kind within a tenth of what the mesh must send, at 2 and at 8 layers.

    With n tokens on a device, d the width, p parameters, of which w are gathered along the width,
    v of them the table's, and D, F, T devices on the axes data, fsdp and tensor, a float32 step
    sends

        gathered weights    2 (F-1)/F 4 w/T           forward, and again in the backward pass
        gradients           2 (DF-1)/(DF) 4 p/T       the table's of the lookup
        the decode's        (F-1)/F 4 v/T             by a reduce-scatter, and from there
                            + 2 (D-1)/D 4 v/(FT)
        activations         2 (T-1)/T 4 n d (7 L + 2)

    Of the 7 in a layer one is forward and three backward in attention (queries, keys, values), one
    forward and two backward in SwiGLU; where a compiler sums before it sends there are fewer. The
    other 2 are the embedding's and the decode's.
    """
    data, fsdp, tensor = (axes.get(axis, 1) for axis in ("data", "fsdp", "tensor"))
    for layers in (2, 8):
        model, found = step_collectives(layers, "swiglu", **axes)
        infos = flatten(model.infos).values()
        parameters = sum(info.size for info in infos)
        table = sum(info.size for info in infos if info.role == "embedding")
        wide = sum(info.size for info in infos if "embed" in info.axes)
        shards, tokens = data * fsdp, ROWS * LENGTH // (data * fsdp)
        expected = {
            "all-gather": 2 * (fsdp - 1) / fsdp * 4 * wide / tensor,
            "reduce-scatter": (fsdp - 1) / fsdp * 4 * table / tensor,
            "all-reduce": 2 * (shards - 1) / shards * 4 * parameters / tensor
            + 2 * (data - 1) / data * 4 * table / (fsdp * tensor)
            + 2 * (tensor - 1) / tensor * 4 * tokens * WIDTH * (7 * layers + 2),
        }
        sums = {kind: size for kind, (_, size) in totals(found).items()}
        print(axes, layers, sums, expected)
        for kind in KINDS:
            wanted, got = expected.get(kind, 0), sums.get(kind, 0)
            # Convolutions' weights and norms, however they are stored.
            small = 0.05 * sum(expected.values())
            assert wanted * 0.9 - small <= got <= wanted * 1.1 + small, (axes, layers, kind, sums)
        if tensor > 1:
            runs = Counter()
            for one in found:
                if one.devices == tensor and f"[{tokens},{WIDTH}]" in one.shape:
                    for site in ("attention/output", "feedforward/down"):
                        runs[site] += one.times * (site in one.source)
            assert runs == {"attention/output": layers, "feedforward/down": layers}, runs


STEPS = {"data": {"data": 8}, "fsdp": {"fsdp": 8}, "tensor": {"data": 4, "tensor": 2}}
STEPS["mixed"] = {"data": 2, "fsdp": 2, "tensor": 2}


if __name__ == "__main__":
    with quick_compilation():
        for name in sys.argv[1:]:
            if name == "programs":
                programs()
            else:
                step(**STEPS[name])
