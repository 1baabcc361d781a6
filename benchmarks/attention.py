"""CCGQA over GQA of equal latent width: time and memory of one attention layer against length.

  python benchmarks/attention.py --config=configs/nag_small.py [--dtypes=float32,bfloat16] [--quick]

Both layers have the config's heads and head width, projections included, in packed rows as in
training; every length has the same number of tokens. Then the attention proper by chunk of queries.
"both" is the forward pass and the pull-back to inputs and parameters.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from flax import nnx
from ml_collections import ConfigDict
from rich.console import Console
from timing import gradient_of, mib, surroundings, table_of, temporaries, timed_turns

from nag_jax import cli
from nag_jax.kinds import kind_class
from nag_jax.models.chunked_attention import chunked_attention
from nag_jax.models.context import Context
from nag_jax.models.linear import Numerics

_LENGTHS = flags.DEFINE_list("lengths", ["512", "1024", "2048", "4096", "8192"], "row lengths")
_TOKENS = flags.DEFINE_integer("tokens", 8192, "tokens of a batch, whatever the length")
_CHUNKS = flags.DEFINE_list("chunks", ["128", "256", "512"], "queries per chunk")
_DTYPES = flags.DEFINE_list("dtypes", ["float32"], "compute dtypes")
_REPEATS = flags.DEFINE_integer("repeats", 3, "timed turns")
_QUICK = flags.DEFINE_bool("quick", False, "lengths 32 and 64, chunks 16 and 32, one turn")

console = Console(highlight=False, soft_wrap=True)

KINDS = ("gqa", "ccgqa")


def compiled_pair(function: Callable, *args: Any) -> dict[str, tuple[Callable, int]]:
    """ "forward" and "both" of a function: (call, bytes of its temporaries)."""
    pair = {}
    for name, made in (("forward", function), ("both", gradient_of(function))):
        compiled = jax.jit(made).lower(*args).compile()
        pair[name] = (lambda compiled=compiled: compiled(*args), temporaries(compiled))
    return pair


def layer(kind: str, config: ConfigDict, rows: int, length: int, dtype: str):
    """The function of an attention layer, its parameters and an input."""
    model = config.model
    branch = kind_class("model.attention", kind)
    given = model.attention.to_dict()
    options = branch.defaults()
    options = ConfigDict({key: given.get(key, value) for key, value in options.items()})
    initialisation = kind_class("model.initialisation", model.initialisation.kind)
    made = branch(
        options,
        model.d_model,
        initialisation(model.initialisation),
        Numerics(dtype),
        nnx.Rngs(params=jax.random.key(0)),
    )
    definition, params = nnx.split(made)
    x = jax.random.normal(jax.random.key(1), (rows, length, model.d_model), dtype)
    ones = jnp.ones((rows, length), jnp.int32)
    context = Context(
        segment_ids=ones,
        positions=jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), ones.shape),
        valid=ones > 0,
        gain_warmup=jnp.ones(()),
        taps=False,
    )
    return lambda params, x: nnx.merge(definition, params)(x, None, context).y, params, x


def layers_table(config: ConfigDict, lengths: list[int], dtype: str):
    """CCGQA beside GQA."""
    table = table_of(
        f"one layer, {_TOKENS.value} tokens, {dtype}: ms, and temporaries in MiB",
        *("length", "rows", "gqa", "ccgqa", "ratio", "gqa both", "ccgqa both", "ratio"),
        *("gqa temp", "ccgqa temp", "gqa both temp", "ccgqa both temp"),
        left=0,
    )
    for length in lengths:
        rows = max(_TOKENS.value // length, 1)
        pairs = {
            f"{kind} {name}": value
            for kind in KINDS
            for name, value in compiled_pair(*layer(kind, config, rows, length, dtype)).items()
        }
        seconds = timed_turns({name: call for name, (call, _) in pairs.items()}, _REPEATS.value)
        cells = []
        for name in ("forward", "both"):
            pair = [seconds[f"{kind} {name}"] for kind in KINDS]
            cells += [*(f"{value * 1e3:.1f}" for value in pair), f"{pair[1] / pair[0]:.2f}"]
        sizes = [mib(pairs[f"{kind} {name}"][1]) for name in ("forward", "both") for kind in KINDS]
        table.add_row(str(length), str(rows), *cells, *sizes)
    return table


def chunks_table(config: ConfigDict, lengths: list[int], chunks: list[int], dtype: str):
    """Attention proper by chunk of queries."""
    options = config.model.attention
    kv_heads, group = options.num_kv_heads, options.num_heads // options.num_kv_heads
    columns = [
        f"{name}{chunk}" for name in ("", "both ", "temp ", "both temp ") for chunk in chunks
    ]
    table = table_of(
        f"attention proper by chunk, {_TOKENS.value} tokens, {dtype}: ms, and temporaries in MiB",
        *("length", "rows", *columns),
        left=0,
    )
    for length in lengths:
        rows = max(_TOKENS.value // length, 1)
        keys = jax.random.split(jax.random.key(0), 3)
        shape = (rows, length, kv_heads)
        q = jax.random.normal(keys[0], (*shape, group, options.head_dim), dtype)
        k, v = (jax.random.normal(key, (*shape, options.head_dim), dtype) for key in keys[1:])
        segments = jnp.ones((rows, length), jnp.int32)
        pairs = {}
        for chunk in chunks:
            function = functools.partial(chunked_attention, segment_ids=segments, chunk=chunk)
            pair = compiled_pair(function, q, k, v)
            pairs |= {(name, chunk): value for name, value in pair.items()}
        seconds = timed_turns({name: call for name, (call, _) in pairs.items()}, _REPEATS.value)
        cases = [(name, chunk) for name in ("forward", "both") for chunk in chunks]
        table.add_row(
            str(length),
            str(rows),
            *(f"{seconds[case] * 1e3:.1f}" for case in cases),
            *(mib(pairs[case][1]) for case in cases),
        )
    return table


def main(config: ConfigDict, flag_values: flags.FlagValues) -> None:
    """Times and prints."""
    lengths, chunks = ([int(n) for n in given] for given in (_LENGTHS.value, _CHUNKS.value))
    if flag_values.quick:
        lengths, chunks = [32, 64], [16, 32]
        flag_values.tokens, flag_values.repeats = 128, 1
    options = config.model.attention
    console.print(
        f"width {config.model.d_model}, {options.num_heads} query and {options.num_kv_heads} "
        f"key-value heads of {options.head_dim}, chunks of {options.query_chunk} queries; "
        f"medians of {flag_values.repeats} turns"
    )
    console.print(surroundings())
    for dtype in flag_values.dtypes:
        console.print(layers_table(config, lengths, dtype))
        console.print(chunks_table(config, lengths, chunks, dtype))
    console.print(surroundings())


if __name__ == "__main__":
    cli.run(main)
