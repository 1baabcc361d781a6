"""What the norm-agnostic stream costs over pre-norm: measured here, and estimated for TPU.

  python benchmarks/nag_overhead.py --config=configs/nag_small.py [--rows=8] [--repeats=8]
  python benchmarks/nag_overhead.py --config=configs/nag_small.py --topology=v5e:2x2 \\
      [--width=1024] [--blocks=2] [--length=1024]

Without a topology both training steps take turns on this machine, at equal shapes. With one, both
are compiled for one of its chips, with nothing attached, without chunks and with unrolled scans:
compilers count the body of a loop once. FLOPs and bytes are compared, by their times at peak.
"""

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import ConfigDict
from rich.console import Console
from timing import table_of, timed_turns
from train_step import ours, stepper

from nag_jax import cli
from nag_jax import config as config_lib
from nag_jax.errors import UserError
from nag_jax.models.transformer import build_model
from nag_jax.optim import build_optimizer
from nag_jax.sharding.hardware import CHIPS
from nag_jax.sharding.rules import MESH_AXES, batch_sharding
from nag_jax.sharding.topologies import absent_devices
from nag_jax.training.state import abstract_state
from nag_jax.training.step import configured_step, jit_train_step

_TOPOLOGY = flags.DEFINE_string("topology", "", "chip and shape to estimate for, such as v5e:2x2")
_WIDTH = flags.DEFINE_integer("width", 1024, "model width of the estimate")
_BLOCKS = flags.DEFINE_integer("blocks", 2, "blocks of the estimate, all compiled")
_LENGTH = flags.DEFINE_integer("length", 1024, "tokens of a row of the estimate")

console = Console(highlight=False, soft_wrap=True)


def main(config: ConfigDict, flag_values: flags.FlagValues) -> None:
    """Times or estimates, and prints."""
    if flag_values.topology:
        _estimate(flag_values)
    else:
        _measure(config, flag_values)


def _measure(config: ConfigDict, flag_values: flags.FlagValues) -> None:
    shape = (flag_values.rows, config.data.row_length + 1)
    batch = {
        "tokens": jax.random.randint(jax.random.key(1), shape, 0, flag_values.vocabulary),
        "segment_ids": jnp.ones(shape, jnp.int32),
        "valid": jnp.ones(shape, bool),
    }
    steps, temporaries = {}, {}
    for name, kind in (("pre-norm", "prenorm"), ("NAG", "nag")):
        compiled, state, _ = ours(config, kind, False, batch)
        steps[name] = stepper(compiled, state, batch)
        temporaries[name] = compiled.memory_analysis().temp_size_in_bytes
    seconds = timed_turns(steps, flag_values.repeats)
    table = table_of(
        f"{config.model.num_blocks} blocks of width {config.model.d_model}, {shape[0]} rows of "
        f"{shape[1] - 1}, {jax.default_backend()}, jax {jax.__version__}",
        *("", "ms a step", "over pre-norm", "temporaries over pre-norm"),
    )
    for name, value in seconds.items():
        table.add_row(
            name,
            f"{value * 1e3:.0f}",
            f"{value / seconds['pre-norm']:.3f}",
            f"{temporaries[name] / temporaries['pre-norm']:.3f}",
        )
    console.print(table)


def _estimate(flag_values: flags.FlagValues) -> None:
    jax.config.update("jax_platforms", "cpu")  # nothing is looked for or held
    chip = CHIPS.get(flag_values.topology.partition(":")[0])
    if chip is None or chip.platform != "tpu":
        raise UserError(f"--topology={flag_values.topology}: the estimate is for TPU, as v5e:2x2")
    device = absent_devices(flag_values.topology)[0]
    costs = {
        name: _cost(flag_values, device, kind, implementation)
        for name, kind, implementation in (
            ("pre-norm", "prenorm", None),
            ("NAG, fused kernel", "nag", "auto"),
            ("NAG, XLA's fusions", "nag", "reference"),
        )
    }
    table = table_of(
        f"{flag_values.blocks} blocks of width {flag_values.width}, {flag_values.rows} rows of "
        f"{flag_values.length}, bfloat16, compiled for {chip.name}",
        *("", "GFLOP", "ms", "GB moved", "ms", "sum over pre-norm", "memory, GB"),
    )
    least = {name: (cost[0] / chip.flops, cost[1] / chip.bandwidth) for name, cost in costs.items()}
    for name, (flops, moved, memory) in costs.items():
        table.add_row(
            name,
            f"{flops / 1e9:,.0f}",
            f"{least[name][0] * 1e3:.1f}",
            f"{moved / 1e9:.2f}",
            f"{least[name][1] * 1e3:.1f}",
            f"{sum(least[name]) / sum(least['pre-norm']):.3f}",
            f"{memory / 1e9:.2f}",
        )
    console.print(table)


def _cost(
    flag_values: flags.FlagValues, device: Any, kind: str, implementation: str | None
) -> tuple[float, float, int]:
    """FLOPs, bytes moved and bytes of memory of a step."""
    width, length = flag_values.width, flag_values.length
    connection = {"kind": kind} | ({"implementation": implementation} if implementation else {})
    config = config_lib.resolve(
        {
            "data": {"row_length": length},
            "train": {"batch_size": flag_values.rows, "taps": False},
            "model": {
                "d_model": width,
                "num_blocks": flag_values.blocks,
                "compute_dtype": "bfloat16",
                "loss_chunk": 0,
                "attention": {
                    "kind": "gqa",
                    "num_heads": width // 64,
                    "num_kv_heads": width // 128,
                    "query_chunk": length,
                },
                "feedforward": {"kind": "swiglu", "hidden": 3 * width},
                "connection": connection,
            },
            "optimizer": {"kind": "adamw"},
        }
    )
    config_lib.validate(config)
    model = build_model(config, flag_values.vocabulary)
    optimizer, schedule = build_optimizer(config.optimizer, config.train.steps, model.infos)
    mesh = jax.sharding.Mesh(np.array([device]).reshape((1,) * len(MESH_AXES)), MESH_AXES)
    shape, sharding = (flag_values.rows, length + 1), batch_sharding(mesh)
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for name, dtype in (("tokens", jnp.int32), ("segment_ids", jnp.int32), ("valid", bool))
    }
    step = jit_train_step(
        configured_step(config, model, optimizer, schedule), model, optimizer, mesh
    )
    unrolled = functools.partial(jax.lax.scan, unroll=True)
    with jax.set_mesh(mesh), mock.patch.object(jax.lax, "scan", unrolled):
        compiled = step.lower(abstract_state(model, optimizer, mesh), batch).compile()
    found, memory = compiled.cost_analysis(), compiled.memory_analysis()
    return (
        found["flops"],
        found["bytes accessed"],
        memory.argument_size_in_bytes + memory.temp_size_in_bytes,
    )


if __name__ == "__main__":
    cli.run(main)
