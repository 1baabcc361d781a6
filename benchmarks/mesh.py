"""Bytes that a device receives in a training step, per token of the batch, for each mesh.

  python benchmarks/mesh.py --feedforward=moe

Compiled for simulated CPU devices and read from the program, so it takes no accelerator and no
step is run. CPU's compiler sums gradients whole where others scatter the sums, which halves the
bytes of gradients over fsdp, and sends each sum by itself where others add first.
"""

import argparse

import jax
import jax.numpy as jnp

from nag_jax.config import resolve
from nag_jax.models.transformer import build_model
from nag_jax.optim import build_optimizer
from nag_jax.sharding import rules
from nag_jax.sharding.collectives import KINDS, collectives, totals
from nag_jax.sharding.mesh import make_mesh
from nag_jax.training.state import abstract_state
from nag_jax.training.step import jit_train_step, train_step
from nag_jax.validation import validate, validate_devices

DEVICES = 8
MESHES = (
    {"data": 8},
    {"fsdp": 8},
    {"fsdp": 4, "tensor": 2},
    {"data": 2, "tensor": 4},
    {"data": 2, "tensor": 2, "expert": 2},
    {"data": 2, "expert": 4},
    {"expert": 8},
)


def exchanged(arguments: argparse.Namespace, axes: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Runs and bytes of each kind of collective in one step on a mesh."""
    overrides = {
        "model.attention.kind": "ccgqa",
        "model.attention.num_heads": 8,
        "model.attention.num_kv_heads": 4,
        "model.feedforward.kind": arguments.feedforward,
        "model.feedforward.hidden": arguments.hidden,
        "model.d_model": arguments.width,
        "model.num_blocks": arguments.layers,
        "data.row_length": arguments.length,
        "train.batch_size": arguments.rows,
        "evaluation.batch_size": arguments.rows,
        "optimizer.kind": arguments.optimizer,
        **{f"mesh.{axis}": axes.get(axis, 1) for axis in rules.MESH_AXES},
    }
    config = resolve(overrides)
    validate(config)
    validate_devices(config, DEVICES)
    model = build_model(config, arguments.vocabulary)
    optimizer, schedule = build_optimizer(config.optimizer, config.train.steps, model.infos)
    mesh = make_mesh(config.mesh, jax.devices())
    function = train_step(
        model,
        optimizer,
        schedule,
        steps=config.train.steps,
        accumulation=1,
        taps=False,
        skip_not_finite=False,
    )
    shape, sharding = (arguments.rows, arguments.length + 1), rules.batch_sharding(mesh)
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for name, dtype in (("tokens", jnp.int32), ("segment_ids", jnp.int32), ("valid", bool))
    }
    step = jit_train_step(function, model, optimizer, mesh)
    with jax.set_mesh(mesh):
        text = step.lower(abstract_state(model, optimizer, mesh), batch).compile().as_text()
    return totals(collectives(text, DEVICES))


def main() -> None:
    """Prints a row for each mesh."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--feedforward", default="swiglu", choices=("swiglu", "mlp", "moe"))
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"))
    for name, value in (("width", 256), ("hidden", 512), ("layers", 4), ("length", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=1024)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    tokens = arguments.rows * arguments.length
    print("bytes per token |", " | ".join(KINDS), "| all | collectives a step")
    for axes in MESHES:
        sums = exchanged(arguments, axes)
        sizes = [sums.get(kind, (0, 0))[1] / tokens for kind in KINDS]
        runs = sum(count for count, _ in sums.values())
        name = " ".join(f"{axis} {length}" for axis, length in axes.items())
        cells = [name, *(f"{size:.0f}" for size in (*sizes, sum(sizes))), str(runs)]
        print(" | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
