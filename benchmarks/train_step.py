"""Training step of pre-norm and NAG, and of the same pre-norm model in plain JAX, in one run.

  python benchmarks/train_step.py [--config=configs/nag_small.py] [--rows=8] [--repeats=8]

The three steps (loss, gradients, AdamW) take turns, so that a drifting machine is fair to all. Then
the pieces of one block are timed alone at the same shapes, which says where the time goes, and the
largest buffers of the compiled step, which says where the memory goes. Absolute times hold for the
machine at that moment; the ratios are the result.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_jax
from absl import flags
from ml_collections import ConfigDict
from rich.console import Console
from timing import gradient_of, mib, table_of, temporaries, timed_turns

from nag_jax import cli
from nag_jax import config as config_lib
from nag_jax.analysis.flops import training_flops
from nag_jax.models.chunked_attention import chunked_attention
from nag_jax.models.losses import cross_entropy
from nag_jax.models.transformer import build_model
from nag_jax.optim import build_optimizer
from nag_jax.sharding.mesh import single_device_mesh
from nag_jax.training.progress import measure_matmul_peak
from nag_jax.training.state import initialise
from nag_jax.training.step import jit_train_step, train_step
from pallas_kernels import nag_update

_ROWS = flags.DEFINE_integer("rows", 8, "rows of a batch")
_VOCAB = flags.DEFINE_integer("vocabulary", 4096, "size of the vocabulary")
_REPEATS = flags.DEFINE_integer("repeats", 8, "timed turns")
_BUFFERS = flags.DEFINE_integer("buffers", 6, "how many of the largest buffers to list")

console = Console(highlight=False, soft_wrap=True)


def with_connection(config: ConfigDict, kind: str) -> ConfigDict:
    """The same model and data shapes with another connection, AdamW, and no taps."""
    model = config.model
    return config_lib.resolve(
        {
            "data": {"row_length": config.data.row_length},
            "model": {
                **{k: v for k, v in model.items() if not isinstance(v, ConfigDict)},
                "attention": model.attention.to_dict(),
                "feedforward": model.feedforward.to_dict(),
                "connection": {"kind": kind},
            },
            "optimizer": {"kind": "adamw", "schedule": {"kind": "constant"}},
        }
    )


def ours(config: ConfigDict, kind: str, taps: bool, batch: dict[str, jax.Array]):
    """(compiled step, its state) of this project's model; calling it returns the next state."""
    config = with_connection(config, kind)
    model = build_model(config, _VOCAB.value)
    optimizer, schedule = build_optimizer(config.optimizer, config.train.steps, model.infos)
    mesh = single_device_mesh()
    state = initialise(model, optimizer, config.seed, mesh)
    function = train_step(
        model,
        optimizer,
        schedule,
        steps=config.train.steps,
        accumulation=1,
        taps=taps,
        skip_not_finite=False,
    )
    with jax.set_mesh(mesh):
        compiled = jit_train_step(function, model, optimizer, mesh).lower(state, batch).compile()
    return compiled, state, training_flops(model.infos, config, _VOCAB.value)


def plain(config: ConfigDict, batch: dict[str, jax.Array]):
    """(compiled step, its state) of the plain JAX twin with optax's AdamW."""
    sizes = config.model
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(3e-3, b1=0.9, b2=0.95, weight_decay=0.1)
    )
    params = plain_jax.init(jax.random.key(0), sizes, _VOCAB.value)

    def step(state, batch):
        params, opt_state = state
        loss, gradient = jax.value_and_grad(plain_jax.loss)(params, batch["tokens"], sizes)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    state = (params, optimizer.init(params))
    return jax.jit(step, donate_argnums=0).lower(state, batch).compile(), state


def stepper(compiled, state, batch) -> Callable[[], Any]:
    """A function that takes a step on each call and keeps the state."""
    holder = [state]

    def call():
        holder[0], out = compiled(holder[0], batch)
        return out, holder[0]

    return call


def call_of_gradient(function: Callable, *args: jax.Array) -> Callable[[], Any]:
    """A compiled call of a function and its pull-back of ones."""
    compiled = jax.jit(gradient_of(function))
    return lambda: compiled(*args)


def pieces(config: ConfigDict, rows: int, vocab: int) -> dict[str, tuple[Callable, int, float]]:
    """name -> (forward and backward of a piece, how often a step runs it, its FLOPs)."""
    model, length = config.model, config.data.row_length
    attention, d, hidden = model.attention, model.d_model, model.feedforward.hidden
    heads, kv_heads, width = attention.num_heads, attention.num_kv_heads, attention.head_dim
    tokens, blocks = rows * length, model.num_blocks
    key = jax.random.key(0)
    x = jax.random.normal(key, (tokens, d))
    up, down = jax.random.normal(key, (d, hidden)), jax.random.normal(key, (hidden, d))
    columns = (heads + 2 * kv_heads) * width
    qkv, out = jax.random.normal(key, (d, columns)), jax.random.normal(key, (heads * width, d))
    q = jax.random.normal(key, (rows, length, kv_heads, heads // kv_heads, width))
    k = jax.random.normal(key, (rows, length, kv_heads, width))
    segments = jnp.ones((rows, length), jnp.int32)
    table = jax.random.normal(key, (vocab, d))

    def feedforward(x, gate, up, down):
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    def nats(hidden, table):
        # Of the data: compilers would fold what constants decide.
        scale, targets = jnp.ones((rows, length)), (hidden[..., 0] > 0).astype(jnp.int32)
        return cross_entropy(hidden, scale, table, targets, vocab, model.loss_chunk)[0]

    return {
        "feed-forward": (
            call_of_gradient(feedforward, x, up, up, down),
            blocks,
            18.0 * tokens * d * hidden,
        ),
        "attention projections": (
            call_of_gradient(lambda x, a, b: (x @ a)[:, : heads * width] @ b, x, qkv, out),
            blocks,
            6.0 * tokens * d * (columns + heads * width),
        ),
        "attention": (
            call_of_gradient(
                lambda q, k, v: chunked_attention(q, k, v, segments, attention.query_chunk),
                q,
                k,
                k,
            ),
            blocks,
            7.0 * tokens * heads * width * (length + 1),
        ),
        "cross-entropy": (
            call_of_gradient(nats, x.reshape(rows, length, d), table),
            1,
            6.0 * tokens * d * vocab,
        ),
        "NAG update": (
            call_of_gradient(nag_update, x, x + 1, jnp.full(tokens, 0.3)),
            2 * blocks,
            0.0,
        ),
    }


def largest_buffers(compiled, count: int) -> list[tuple[str, float]]:
    """Shapes of the largest results in the optimised program, with their MiB."""
    sizes = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1}
    found = {}
    for dtype, dims in re.findall(r"= (\w+)\[([\d,]+)\]", compiled.as_text()):
        if dtype in sizes:
            elements = int(np.prod([int(n) for n in dims.split(",")]))
            found[f"{dtype}[{dims}]"] = elements * sizes[dtype] / 2**20
    return sorted(found.items(), key=lambda item: -item[1])[:count]


def main(config: ConfigDict, flag_values: flags.FlagValues) -> None:
    """Times and prints."""
    rows, length = flag_values.rows, config.data.row_length
    shape = (rows, length + 1)
    batch = {
        "tokens": jax.random.randint(jax.random.key(1), shape, 0, flag_values.vocabulary),
        "segment_ids": jnp.ones(shape, jnp.int32),
        "valid": jnp.ones(shape, bool),
    }
    steps, flops, programs = {}, {}, {}
    for name, kind, taps in (
        ("pre-norm", "prenorm", False),
        ("NAG", "nag", False),
        ("NAG with taps", "nag", True),
    ):
        compiled, state, flops[name] = ours(config, kind, taps, batch)
        steps[name] = stepper(compiled, state, batch)
        programs[name] = compiled
    compiled, state = plain(config, batch)
    steps["plain JAX pre-norm"] = stepper(compiled, state, batch)
    programs["plain JAX pre-norm"] = compiled
    flops["plain JAX pre-norm"] = flops["pre-norm"]

    peak = measure_matmul_peak(config.model.compute_dtype)
    seconds = timed_turns(steps, flag_values.repeats)
    model = config.model
    table = table_of(
        f"{model.num_blocks} blocks of width {model.d_model}, {rows} rows of {length}, "
        f"vocabulary {flag_values.vocabulary}, {model.compute_dtype}, jax {jax.__version__}",
        *("", "ms a step", "tokens/s", "over plain JAX", "of matmul peak", "temporaries, MiB"),
    )
    for name, value in seconds.items():
        table.add_row(
            name,
            f"{value * 1e3:.0f}",
            f"{rows * length / value:,.0f}",
            f"{value / seconds['plain JAX pre-norm']:.2f}",
            f"{flops[name] * rows * length / value / peak:.0%}",
            mib(temporaries(programs[name])),
        )
    console.print(table)
    console.print(f"NAG over pre-norm: {seconds['NAG'] / seconds['pre-norm']:.3f}")

    parts = pieces(config, rows, flag_values.vocabulary)
    times = timed_turns({name: part[0] for name, part in parts.items()}, flag_values.repeats)
    table = table_of(
        "pieces alone, forward and backward",
        *("", "ms each", "times", "ms a step", "of matmul peak"),
    )
    for name, (_, count, work) in parts.items():
        share = f"{work / times[name] / peak:.0%}" if work else ""
        each = times[name] * 1e3
        table.add_row(name, f"{each:.1f}", str(count), f"{each * count:.0f}", share)
    console.print(table)
    for name in ("pre-norm", "NAG"):
        buffers = largest_buffers(programs[name], flag_values.buffers)
        text = ", ".join(f"{shape} {size:.1f} MiB" for shape, size in buffers)
        console.print(f"largest buffers, {name}: {text}", markup=False)


if __name__ == "__main__":
    cli.run(main)
