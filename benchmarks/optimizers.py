"""Time, memory and FLOPs of one optimizer update over AdamW's, on a transformer's parameters.

  python benchmarks/optimizers.py --d_model=928 --blocks=1 [--kinds=adamw,muon,soap] [--devices=8]

Gradients are random and the model is not run. A turn of an optimizer with refreshes is as many
updates as lie between two of them. FLOPs are those of matrix products by formula, with QR and
eigendecomposition at 8/3 and 9 n^3; their share of a training step is of 6 FLOPs a parameter and
token. optax.contrib.muon takes the same matrices, each by itself. With --devices the update is
compiled for so many simulated ones, parameters split along the model width or replicated, and what
they send is printed: always, and in branches (those of the first update, of later ones and of
refreshes added up); nothing is timed then.
"""

import os
import sys

if devices := [arg.partition("=")[2] for arg in sys.argv if arg.startswith("--devices=")]:
    count = f" --xla_force_host_platform_device_count={devices[-1]}"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + count

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from jax.sharding import AxisType, NamedSharding
from rich.console import Console
from timing import mib, size_of, surroundings, table_of, timed_turns

from nag_jax.analysis.optimizer_flops import update_flops
from nag_jax.kinds import kind_class
from nag_jax.optim import build_optimizer, state_like_params
from nag_jax.parameters import ParamInfo
from nag_jax.sharding.collectives import KINDS, collectives, totals
from nag_jax.sharding.rules import derived_sharding

_BLOCKS = flags.DEFINE_integer("blocks", 6, "blocks (attention and SwiGLU), stacked")
_D_MODEL = flags.DEFINE_integer("d_model", 256, "width of the stream")
_VOCABULARY = flags.DEFINE_integer("vocabulary", 384, "rows of the embedding table")
_REPEATS = flags.DEFINE_integer("repeats", 5, "timed turns of each optimizer")
_REFRESH = flags.DEFINE_integer("refresh_every", 10, "updates between refreshes")
_DEVICES = flags.DEFINE_integer("devices", 1, "simulated devices; above 1 only what they send")
_KINDS = flags.DEFINE_list(
    "kinds", ["adamw", "muon", "soap", "shampoo", "kl_shampoo"], "optimizers to compare"
)
# Tokens of a step: what a small machine takes, and P2's batch of 512 rows of 512.
TOKENS = (4096, 512 * 512)

console = Console(highlight=False, soft_wrap=True)


def parameter_infos(blocks: int, d: int, vocabulary: int) -> dict[str, ParamInfo]:
    """Metadata of a stacked transformer with grouped-query attention and SwiGLU."""
    head_dim = 64 if d % 64 == 0 else 32
    hidden = 128 * round(8 * d / 3 / 128)

    def info(axes, role, shape, rows=(), columns=(), centred=False):
        return ParamInfo(axes, role, rows, columns, centred, shape, jnp.float32)

    def matrix(names, *sizes, rows=(1,)):
        columns = tuple(i for i in range(1, len(names) + 1) if i not in rows)
        return info(("layers", *names), "matrix", (blocks, *sizes), rows, columns)

    def to_heads(heads):
        return matrix(("embed", "heads", "head_dim"), d, heads, head_dim)

    heads = d // head_dim
    return {
        "query": to_heads(heads),
        "key": to_heads(max(1, heads // 2)),
        "value": to_heads(max(1, heads // 2)),
        "out": matrix(("heads", "head_dim", "embed"), heads, head_dim, d, rows=(1, 2)),
        "up": matrix(("embed", "hidden"), d, hidden),
        "gate": matrix(("embed", "hidden"), d, hidden),
        "down": matrix(("hidden", "embed"), hidden, d),
        "directions": info(("layers", "directions", "embed"), "gate", (2 * blocks, 32, d)),
        "table": info(("vocabulary", "embed"), "embedding", (vocabulary, d), centred=True),
    }


def optimizer_config(kind: str) -> dict:
    """A complete optimizer config with the defaults of training."""
    roles = ("embedding", "head", "gate", "scale", "bias", "conv")
    config = {
        **kind_class("optimizer", kind).defaults(),
        "kind": kind,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "adam_b1": 0.9,
        "adam_b2": 0.95,
        "adam_eps": 1e-8,
        "rate_multiplier": dict.fromkeys(roles, 1.0),
        "embedding_decay": 0.0,
        "schedule": {"kind": "cosine", "warmup_steps": 20, "final_share": 0.1},
    }
    if "refresh_every" in config:
        config["refresh_every"] = _REFRESH.value
    return config


def update_of(transform):
    """(params, state, grads) -> (params, state)."""

    def step(params, state, grads):
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def contrib_muon(infos):
    """optax's own Muon on the same stacked matrices, and AdamW on the rest."""
    from optax.contrib import MuonDimensionNumbers, muon

    numbers = {
        name: MuonDimensionNumbers(info.rows, info.columns) if info.role == "matrix" else None
        for name, info in infos.items()
    }
    return muon(3e-3, weight_decay=0.1, muon_weight_dimension_numbers=numbers)


def timed(infos) -> None:
    """Prints the table of times."""
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda i: jnp.asarray(rng.normal(size=i.shape), jnp.float32), infos)
    transforms = {
        kind: build_optimizer(optimizer_config(kind), 1000, infos)[0] for kind in _KINDS.value
    }
    if "muon" in transforms:
        transforms["optax.contrib.muon"] = contrib_muon(infos)
    turns, counts, sizes = {}, {}, {}
    for name, transform in transforms.items():
        run = jax.jit(update_of(transform), donate_argnums=(0, 1))
        params = jax.tree.map(jnp.array, grads)
        holder = [(params, transform.init(params))]
        sizes[name] = size_of(holder[0][1])
        refreshed = name in _KINDS.value and "refresh_every" in optimizer_config(name)
        counts[name] = _REFRESH.value if refreshed else 1

        def turn(run=run, holder=holder, count=counts[name]):
            for _ in range(count):
                holder[0] = run(*holder[0], grads)
            return holder[0]

        turns[name] = turn
    seconds = {
        name: value / counts[name] for name, value in timed_turns(turns, _REPEATS.value).items()
    }
    size = size_of(grads)
    square = jnp.asarray(rng.normal(size=(1024, 1024)), jnp.float32)
    product = jax.jit(jnp.matmul)
    peak = 2 * 1024**3 / timed_turns({"": lambda: product(square, square)}, 20)[""]
    matrices = sum(info.size for info in infos.values() if info.role == "matrix")
    table = table_of(
        f"{_BLOCKS.value} blocks, d {_D_MODEL.value}, {size // 4:,} parameters of which "
        f"{matrices:,} in matrices, refreshes every {_REFRESH.value}; matmul peak "
        f"{peak / 1e9:.0f} GFLOP/s",
        *("optimizer", "ms", "over adamw", "GFLOP", "over its FLOPs at peak", "state, MiB"),
        *("state over params", *(f"of a step's FLOPs, {tokens:,} tokens" for tokens in TOKENS)),
    )
    for name, value in seconds.items():
        flops = sum(update_flops(optimizer_config(name.rpartition(".")[2]), infos))
        cells = [f"{1e3 * value:.1f}", f"{value / seconds['adamw']:.1f}", f"{flops / 1e9:.1f}"]
        cells.append(f"{value / (flops / peak):.2f}" if flops else "")
        cells += [mib(sizes[name]), f"{sizes[name] / size:.1f}"]
        cells += [f"{flops / (6 * matrices * tokens):.1%}" for tokens in TOKENS]
        table.add_row(name, *cells)
    console.print(table)


def sent(infos) -> None:
    """Prints what devices send in an update, parameters split along the width or not at all."""
    sending = [kind for kind in KINDS if not kind.startswith("ragged")]
    mesh = jax.make_mesh((_DEVICES.value,), ("fsdp",), axis_types=(AxisType.Auto,))
    table = table_of(
        f"MiB that a device receives in an update, {_DEVICES.value} devices, "
        f"{mib(sum(4 * info.size for info in infos.values()))} MiB of parameters",
        *("optimizer", "parameters", "update", *sending),
        left=3,
    )
    for kind in _KINDS.value:
        transform, _ = build_optimizer(optimizer_config(kind), 1000, infos)
        for layout, over in (("split", {"embed": "fsdp"}), ("replicated", {})):
            shardings = {
                name: NamedSharding(mesh, jax.P(*(over.get(axis) for axis in info.axes)))
                for name, info in infos.items()
            }
            params = {
                name: jax.ShapeDtypeStruct(info.shape, jnp.float32, sharding=shardings[name])
                for name, info in infos.items()
            }
            whole = NamedSharding(mesh, jax.P())
            placed = state_like_params(transform, params, shardings, whole, derived_sharding)
            state = jax.tree.map(
                lambda leaf, sharding: jax.ShapeDtypeStruct(
                    leaf.shape, leaf.dtype, sharding=sharding
                ),
                jax.eval_shape(transform.init, params),
                placed,
            )
            run = jax.jit(update_of(transform), out_shardings=(shardings, placed))
            with jax.set_mesh(mesh):
                text = run.lower(params, state, params).compile().as_text()
            found = collectives(text, mesh.size)
            for when, conditional in (("always", False), ("branches", True)):
                sums = totals([one for one in found if one.conditional == conditional])
                cells = [mib(sums[name][1]) if name in sums else "" for name in sending]
                if not conditional or any(cells):
                    table.add_row(kind, layout, when, *cells)
    console.print(table)


def main(argv) -> None:
    """Prints the tables."""
    del argv
    console.print(surroundings())
    infos = parameter_infos(_BLOCKS.value, _D_MODEL.value, _VOCABULARY.value)
    if _DEVICES.value > 1:
        sent(infos)
    else:
        timed(infos)


if __name__ == "__main__":
    app.run(main)
