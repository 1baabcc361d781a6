"""Mixture of experts over the dense model of equal active FLOPs: time and memory, in one run.

  python benchmarks/moe.py --config=configs/nag_small.py [--rows=8] [--dtypes=float32] [--quick]

First a training step (loss, gradients, AdamW) of the config's model with SwiGLU and with experts of
equal active width; its optimizer moves all parameters, not the active ones alone. Then one
feed-forward layer alone against the number of experts, whose active FLOPs stay the same: flat is
the aim. Then the grouped product itself beside a loop over groups whose sizes are known while
compiling, which is what it would cost if shapes could be dynamic. "both" is the forward pass and
the pull-back to inputs and parameters.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from ml_collections import ConfigDict
from rich.console import Console
from stepping import Stepper, derived, random_batch
from timing import gradient_of, mib, size_of, surroundings, table_of, temporaries, timed_turns

from nag_jax import cli
from nag_jax.kinds import kind_class
from nag_jax.models.context import Context
from nag_jax.models.linear import PRECISION, Numerics
from nag_jax.models.rows import grouped_matmul

_ROWS = flags.DEFINE_integer("rows", 8, "rows of a batch, of the config's length")
_VOCAB = flags.DEFINE_integer("vocabulary", 4096, "size of the vocabulary")
_EXPERTS = flags.DEFINE_list(
    "experts", ["1", "2", "4", "8", "16", "32", "64"], "experts of a layer"
)
_DTYPES = flags.DEFINE_list("dtypes", ["float32"], "compute dtypes")
_REPEATS = flags.DEFINE_integer("repeats", 7, "timed turns")
_QUICK = flags.DEFINE_bool("quick", False, "few tokens, two numbers of experts, one turn")

console = Console(highlight=False, soft_wrap=True)


def feedforwards(hidden: int, counts: list[tuple[int, int]]) -> dict[str, dict[str, Any]]:
    """name -> `model.feedforward` of the dense layer and of (experts, k), equal in active FLOPs."""
    nodes: dict[str, dict[str, Any]] = {"dense": {"kind": "swiglu", "hidden": hidden}}
    for experts, k in counts:
        nodes[f"{experts} experts, k {k}"] = {
            "kind": "moe",
            "hidden": hidden // k,
            "num_experts": (experts,),
            "top_k": (k,),
        }
    return nodes


def steps_table(config: ConfigDict, dtype: str):
    """Whole training steps."""
    length = config.data.row_length
    batch = random_batch(_ROWS.value, length, _VOCAB.value)
    nodes = feedforwards(config.model.feedforward.hidden, [(8, 1), (8, 2), (64, 1)])
    made = {
        name: Stepper(
            derived(config, length, feedforward=node, compute_dtype=dtype), batch, _VOCAB.value
        )
        for name, node in nodes.items()
    }
    seconds = timed_turns(made, _REPEATS.value)
    table = table_of(
        f"training step, {_ROWS.value} rows of {length} tokens, {dtype}",
        *("feed-forward", "ms", "over dense", "temporaries, MiB", "parameters, million"),
    )
    for name, step in made.items():
        count = size_of(step.state.params) // 4
        over = f"{seconds[name] / seconds['dense']:.2f}"
        table.add_row(
            name, f"{1e3 * seconds[name]:.0f}", over, mib(step.temporaries), f"{count / 1e6:.1f}"
        )
    return table


def layer(config: ConfigDict, node: dict, dtype: str) -> tuple[Callable, Any, jax.Array]:
    """The function of a feed-forward layer, its parameters and an input."""
    d_model, length = config.model.d_model, config.data.row_length
    branch = kind_class("model.feedforward", node["kind"])
    options = ConfigDict(branch.defaults() | {k: v for k, v in node.items() if k != "kind"})
    kind = config.model.initialisation.kind
    initialisation = kind_class("model.initialisation", kind)(config.model.initialisation)
    made = branch(
        options, d_model, initialisation, Numerics(dtype), nnx.Rngs(params=jax.random.key(0))
    )
    definition, params = nnx.split(made)
    shape = (_ROWS.value, length)
    balance = {}
    if hasattr(branch, "balance_shapes"):
        shapes = branch.balance_shapes(options)
        balance = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    ones = jnp.ones(shape, jnp.int32)
    context = Context(
        segment_ids=ones,
        positions=ones,
        valid=ones > 0,
        gain_warmup=jnp.ones(()),
        taps=False,
        balance=balance,
    )

    def run(params, x):
        out = nnx.merge(definition, params)(x, None, context)
        return out.y if out.weight is None else out.y * out.weight[..., None].astype(x.dtype)

    x = jax.random.normal(jax.random.key(1), (*shape, d_model), dtype)
    return run, params, x


def compiled_pair(function: Callable, *args: Any) -> dict[str, tuple[Callable, int]]:
    """ "forward" and "both" of a function: (call, bytes of its temporaries)."""
    pair = {}
    for name, made in (("forward", function), ("both", gradient_of(function))):
        compiled = jax.jit(made).lower(*args).compile()
        pair[name] = (lambda compiled=compiled: compiled(*args), temporaries(compiled))
    return pair


def comparison(title: str, pairs: dict[str, dict], base: str):
    """A table of forward and both over those of `base`, and bytes of their temporaries."""
    table = table_of(
        title, "", "forward, ms", "over", "both, ms", "over", "MiB forward", "MiB both"
    )
    calls = {(name, part): pairs[name][part][0] for name in pairs for part in pairs[name]}
    seconds = timed_turns(calls, _REPEATS.value)
    for name, pair in pairs.items():
        cells = []
        for part in pair:
            mine = seconds[name, part]
            cells += [f"{1e3 * mine:.1f}", f"{mine / seconds[base, part]:.2f}"]
        table.add_row(name, *cells, *(mib(size) for _, size in pair.values()))
    return table


def layers_table(config: ConfigDict, dtype: str, counts: list[int]):
    """One layer against the number of experts."""
    nodes = feedforwards(config.model.feedforward.hidden, [(count, 1) for count in counts])
    pairs = {name: compiled_pair(*layer(config, node, dtype)) for name, node in nodes.items()}
    tokens = _ROWS.value * config.data.row_length
    title = f"one layer, {tokens} tokens, {dtype}, over the dense one"
    return comparison(title, pairs, "dense")


def products_table(config: ConfigDict, dtype: str, count: int):
    """The grouped product, its groups as uneven as a random router's."""
    rng = np.random.default_rng(0)
    rows = _ROWS.value * config.data.row_length
    d_model, hidden = config.model.d_model, config.model.feedforward.hidden
    sizes = rng.multinomial(rows, rng.dirichlet(np.full(count, 5.0)))
    edges = np.concatenate([[0], np.cumsum(sizes)])
    x = jnp.asarray(rng.normal(size=(rows, d_model)), dtype)
    w = jnp.asarray(rng.normal(size=(count, d_model, hidden)), dtype)
    group_sizes = jnp.asarray(sizes, jnp.int32)

    def known_sizes(x, w):
        pieces = zip(edges[:-1], edges[1:], w, strict=True)
        return jnp.concatenate(
            [jnp.matmul(x[first:last], one, precision=PRECISION) for first, last, one in pieces]
        )

    functions = {
        "loop over known sizes": known_sizes,
        "one dense product": lambda x, w: jnp.matmul(x, w[0], precision=PRECISION),
        "blocked": lambda x, w: grouped_matmul(x, w, group_sizes, "blocked"),
        "ragged_dot": lambda x, w: grouped_matmul(x, w, group_sizes, "ragged_dot"),
    }
    pairs = {name: compiled_pair(function, x, w) for name, function in functions.items()}
    return comparison(
        f"product of {rows} rows of {d_model} with {count} matrices of {d_model} x {hidden}, "
        f"{dtype}, groups of {sizes.min()} to {sizes.max()} rows",
        pairs,
        "loop over known sizes",
    )


def main(config: ConfigDict, flag_values: flags.FlagValues) -> None:
    """Times and prints."""
    counts = [int(count) for count in flag_values.experts]
    if flag_values.quick:
        counts, flag_values.repeats, flag_values.rows = [1, 4], 1, 1
    console.print(surroundings())
    for dtype in flag_values.dtypes:
        console.print(steps_table(config, dtype))
        console.print(layers_table(config, dtype, counts))
        for count in (8, 64):
            console.print(products_table(config, dtype, count))
    console.print(surroundings())


if __name__ == "__main__":
    cli.run(main)
