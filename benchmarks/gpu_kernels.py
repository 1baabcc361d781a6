"""The fused kernels on a GPU: right on the device, and how fast beside a copy and XLA's own fusion.

  benchmarks/gpu.sh [--seconds=0.2] [--blocks=24]

Every implementation for GPU that serves is compared with float64, forward and backward, and timed:
bytes of its inputs and outputs a second, over those of a copy of as many bytes and beside the plain
definition as XLA fuses it. Then the training step of a model with and without the kernel. On a
machine without GPU the same runs with few, narrow tokens, interpreted, and times mean nothing.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.console import Console
from timing import table_of, timed_turns
from train_step import stepper

from nag_jax import config as config_lib
from nag_jax.analysis.flops import training_flops
from nag_jax.models.transformer import build_model
from nag_jax.optim import build_optimizer
from nag_jax.sharding.hardware import CHIPS
from nag_jax.sharding.mesh import single_device_mesh
from nag_jax.training.state import initialise
from nag_jax.training.step import configured_step, jit_train_step
from pallas_kernels import nag_update
from pallas_kernels.nag_update import IMPLEMENTATIONS, choose
from pallas_kernels.nag_update.dispatch import KERNELS

_SECONDS = flags.DEFINE_float("seconds", 0.2, "time for each measurement")
_BLOCKS = flags.DEFINE_integer("blocks", 24, "blocks of the model whose step is timed")

NAMES = ("reference", *(name for name in IMPLEMENTATIONS[1:] if KERNELS[name].platform == "gpu"))
# Of a token's largest entry; bfloat16 has 8 bits.
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}

console = Console(highlight=False, soft_wrap=True)


def main(_: list[str]) -> None:
    """Checks, times, and leaves with 1 if a value is wrong."""
    on_gpu = jax.default_backend() == "gpu"
    widths = (256, 928, 1024, 2048, 4096) if on_gpu else (64, 96)
    tokens = 16384 if on_gpu else 32
    wrong = 0
    for dtype in ("bfloat16", "float32"):
        table = table_of(
            f"nag_update on {tokens} tokens, {dtype}, {jax.devices()[0].device_kind}, "
            f"jax {jax.__version__}",
            *(
                "implementation",
                "width",
                "pass",
                "error",
                "us",
                "GB/s",
                "of a copy",
                "of reference",
            ),
            left=3,
        )
        table.columns[0].no_wrap = True
        for width in widths:
            wrong += _rows(table, tokens, width, jnp.dtype(dtype), on_gpu)
        console.print(table)
    _training_step(on_gpu)
    if wrong:
        sys.exit(f"{wrong} values are further from float64 than {TOLERANCE}")


def _rows(table: Any, tokens: int, width: int, dtype: jnp.dtype, on_gpu: bool) -> int:
    """Adds the rows of a width; returns how many passes gave something wrong."""
    rng = np.random.default_rng(0)
    r = rng.normal(size=(tokens, width))
    r -= r.mean(-1, keepdims=True)
    r /= np.sqrt(np.mean(r * r, -1, keepdims=True))
    wide = [jnp.asarray(x, dtype) for x in (r, *rng.normal(size=(2, tokens, width)))]
    narrow = [jnp.asarray(x, jnp.float32) for x in rng.uniform(size=(2, tokens))]
    given = {"forward": (wide[0], wide[1], narrow[0]), "backward": (*wide, *narrow)}
    with jax.enable_x64(True):
        exact = {
            name: _passes("reference")[name](*(x.astype(jnp.float64) for x in arrays))
            for name, arrays in given.items()
        }
    wrong, calls = 0, {}
    for name in NAMES:
        platform = "gpu" if on_gpu else jax.default_backend()
        try:
            choose(name, platform, width=width, dtypes=(dtype, dtype))
            passes = {
                kind: jax.jit(function).lower(*given[kind]).compile()
                for kind, function in _passes(name).items()
            }
        except ValueError as refused:
            console.print(f"left out: {refused}", markup=False)
            continue
        for kind, function in passes.items():
            calls[name, kind] = lambda function=function, kind=kind: function(*given[kind])
    moved = {
        kind: sum(
            x.size * x.dtype.itemsize
            for x in jax.tree.leaves(
                (given[kind], jax.eval_shape(_passes("reference")[kind], *given[kind]))
            )
        )
        for kind in given
    }
    copies = {kind: _copy(size) for kind, size in moved.items()}
    seconds = {key: _seconds(call) for key, call in (calls | copies).items()}
    for (name, kind), call in calls.items():
        error = max(
            _error(got, wanted)
            for got, wanted in zip(
                jax.tree.leaves(call()), jax.tree.leaves(exact[kind]), strict=True
            )
        )
        wrong += not error <= TOLERANCE[dtype.name]
        took = seconds[name, kind]
        table.add_row(
            name, str(width), kind, f"{error:.1e}",
            f"{took * 1e6:.1f}", f"{moved[kind] / took / 1e9:.0f}",
            f"{seconds[kind] / took:.2f}", f"{seconds['reference', kind] / took:.2f}",
        )  # fmt: skip
    return wrong


def _passes(name: str) -> dict[str, Callable]:
    def forward(r, f, a):
        return nag_update(r, f, a, implementation=name)

    def backward(r, f, c, a, g):  # the forward pass is not used, and not compiled
        return jax.vjp(forward, r, f, a)[1]((c, g.astype(jnp.promote_types(r.dtype, jnp.float32))))

    return {"forward": forward, "backward": backward}


def _copy(size: int) -> Callable:
    """A copy that reads and writes `size` bytes in all."""
    source = jnp.zeros(size // 8, jnp.float32)
    copy = jax.jit(lambda x: x + 1).lower(source).compile()
    return lambda: copy(source)


def _seconds(call: Callable) -> float:
    """Of one of many calls in flight at a time, the fewest of three rounds."""
    jax.block_until_ready(call())
    began = time.perf_counter()
    jax.block_until_ready(call())
    once = time.perf_counter() - began
    count = max(1, min(1000, round(_SECONDS.value / 3 / max(once, 1e-6))))
    rounds = []
    for _ in range(3):
        began = time.perf_counter()
        results = [call() for _ in range(count)][-1]
        jax.block_until_ready(results)
        rounds.append((time.perf_counter() - began) / count)
    return min(rounds)


def _error(got: jax.Array, wanted: jax.Array) -> float:
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    return float(np.max(np.abs(got - wanted)) / np.max(np.abs(wanted)))


def _training_step(on_gpu: bool) -> None:
    width, blocks, rows, length = (1024, _BLOCKS.value, 8, 2048) if on_gpu else (64, 2, 2, 64)
    steps, flops = {}, 0.0
    for name in ("reference", "auto"):
        config = config_lib.resolve(
            {
                "data": {"row_length": length},
                "train": {"batch_size": rows, "taps": False},
                "model": {
                    "d_model": width,
                    "num_blocks": blocks,
                    "compute_dtype": "bfloat16",
                    "remat": "dots_with_no_batch_dims_saveable",
                    "attention": {
                        "kind": "gqa",
                        "num_heads": width // 64,
                        "num_kv_heads": width // 64,
                    },
                    "feedforward": {"kind": "swiglu", "hidden": 3 * width},
                    "connection": {"kind": "nag", "implementation": name},
                },
                "optimizer": {"kind": "adamw"},
            }
        )
        model = build_model(config, 32768 if on_gpu else 256)
        optimizer, schedule = build_optimizer(config.optimizer, config.train.steps, model.infos)
        mesh = single_device_mesh()
        with jax.set_mesh(mesh):
            state = initialise(model, optimizer, 0, mesh)
            shape = (rows, length + 1)
            batch = {
                "tokens": jnp.ones(shape, jnp.int32),
                "segment_ids": jnp.ones(shape, jnp.int32),
                "valid": jnp.ones(shape, bool),
            }
            function = configured_step(config, model, optimizer, schedule)
            step = jit_train_step(function, model, optimizer, mesh)
            began = time.perf_counter()
            compiled = step.lower(state, batch).compile()
            console.print(f"training step, {name}: compiled in {time.perf_counter() - began:.0f} s")
        steps[name] = stepper(compiled, state, batch)
        flops = training_flops(model.infos, config, 32768 if on_gpu else 256)
    seconds = timed_turns(steps, 5)
    table = table_of(
        f"training step: {blocks} blocks of width {width}, {rows} rows of {length}",
        *("", "ms", "tokens/s", "MFU", "over reference"),
    )
    for name, took in seconds.items():
        chip = next(
            (c for k, c in CHIPS.items() if k.upper() in jax.devices()[0].device_kind), None
        )
        rate = rows * length / took
        table.add_row(
            name, f"{took * 1e3:.1f}", f"{rate:,.0f}",
            f"{flops * rate / chip.flops:.1%}" if chip else "",
            f"{took / seconds['reference']:.3f}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    app.run(main)
