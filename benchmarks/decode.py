"""Time of a generated token: over the cache, without one, and in plain JAX.

  python benchmarks/decode.py --config=configs/nag_small.py [--quick]

The programs are the ones that `generate` runs, sampling included; their peer is a pre-norm model of
the same sizes in plain JAX, called from a Python loop with a donated cache or as one scan over all
tokens. Weights are random: only their sizes matter. The kinds over a cache take turns, so that a
drifting machine is fair to all. "bound" is the time in which the machine reads every parameter and
the whole cache once, at the rate of a plain sum over as many bytes.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain_jax
from absl import flags
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table
from timing import (
    mib,
    read_rate,
    size_of,
    surroundings,
    table_of,
    temporaries,
    timed_for,
    timed_turns,
)

from nag_jax import cli
from nag_jax.evals import generate as generate_lib
from nag_jax.models.transformer import LanguageModel, build_model
from nag_jax.sharding.mesh import single_device_mesh

_VOCAB = flags.DEFINE_integer("vocabulary", 4096, "size of the vocabulary")
_LENGTHS = flags.DEFINE_list("lengths", ["128", "1024", "4096"], "columns of the cache")
_BATCHES = flags.DEFINE_list("batches", ["1", "16"], "rows")
_TOKENS = flags.DEFINE_integer("tokens", 8, "tokens of a timed turn")
_REPEATS = flags.DEFINE_integer("repeats", 5, "timed turns")
_TOP_K = flags.DEFINE_integer("top_k", 0, "sampling among the k most likely tokens; 0: among all")
_SECONDS = flags.DEFINE_float("seconds", 2.0, "time for the tokens without a cache, per row")
_QUICK = flags.DEFINE_bool("quick", False, "lengths 16 and 32, batches 1 and 2, two turns of 4")

console = Console(highlight=False, width=150)

CACHED, PYTHON, SCAN = "cache", "plain JAX, Python loop", "plain JAX, scan"


class Ours:
    """This project's programs at one batch and length."""

    def __init__(self, model: LanguageModel, params: dict[str, Any], batch: int, length: int):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(batch))
        settings = (jnp.float32(1.0), jnp.int32(_TOP_K.value), jnp.float32(1.0))
        self.last = (jnp.int32(0), keys, settings)
        self.params = (model.decoding_params(params), model.initial_balance())
        self.length = length
        self.tokens = jnp.zeros((batch, length - _TOKENS.value), jnp.int32)
        self.start = jnp.zeros(batch, jnp.int32)
        first, advance = generate_lib.decode_programs(model)
        self.first = first.lower(self.params, self.tokens, self.start, length, *self.last).compile()
        self.prefill, _ = timed_for(self.run_prompts, _SECONDS.value, _REPEATS.value)
        self.drawn, self.state = self.fresh
        self.advance = advance.lower(self.params, self.state, self.drawn, *self.last).compile()
        self.cache_bytes = size_of(model.cache_shapes(batch, length))

        def without_cache(variables, row):
            params, balance = variables
            last = model.logits(params, row, balance=balance)[:, length - 1]
            choose = jax.vmap(generate_lib.choose_token, (0, 0, None, None, None))
            return choose(last, keys, *settings)

        self.row = jnp.zeros((batch, length), jnp.int32)
        self.uncached = jax.jit(without_cache).lower(self.params, self.row).compile()

    def run_prompts(self) -> jax.Array:
        """Runs the prompts, which leave room for a turn of tokens."""
        self.fresh = self.first(self.params, self.tokens, self.start, *self.last)
        return self.fresh[0]

    def turn(self) -> jax.Array:
        """The last tokens of the cache's columns, as `generate` draws them."""
        self.state["position"] = jnp.int32(self.tokens.shape[1])
        for _ in range(_TOKENS.value):
            current = self.drawn
            self.drawn, self.state = self.advance(self.params, self.state, current, *self.last)
            np.asarray(current)  # decoded to text while the next is under way
        return self.drawn


def draw(logits: jax.Array, key: jax.Array, position: jax.Array) -> jax.Array:
    """Sampling in plain JAX, at temperature 1."""
    return jax.random.categorical(jax.random.fold_in(key, position), logits)


def plain_turns(params: dict, config: ConfigDict, batch: int, length: int) -> Iterator[Callable]:
    """A turn of tokens in plain JAX, called token by token, and as one scan."""
    sizes, key, begin = config.model, jax.random.key(0), length - _TOKENS.value

    def step(params, cache, tokens, position):
        logits, cache = plain_jax.decode_step(params, cache, position, tokens, sizes)
        return draw(logits, key, position), cache

    def scanned(params, cache, tokens):
        def body(carry, position):
            tokens, cache = step(params, carry[1], carry[0], position)
            return (tokens, cache), tokens

        (_, cache), drawn = jax.lax.scan(body, (tokens, cache), jnp.arange(begin, length))
        return drawn, cache

    holder = [plain_jax.empty_cache(sizes, batch, length)]
    zeros = jnp.zeros(batch, jnp.int32)
    first = (params, holder[0], zeros, jnp.int32(0))
    one = jax.jit(step, donate_argnums=1).lower(*first).compile()
    many = jax.jit(scanned, donate_argnums=1).lower(*first[:3]).compile()

    def in_python():
        drawn = zeros
        for position in range(begin, length):
            current = drawn
            drawn, holder[0] = one(params, holder[0], current, jnp.int32(position))
            np.asarray(current)
        return drawn

    def in_scan():
        drawn, holder[0] = many(params, holder[0], zeros)
        return drawn

    yield from (in_python, in_scan)


def measure(model, params, plain_params, config, batch, length) -> dict[str, Any]:
    """All numbers of one batch and length; times in seconds per token of each row."""
    ours = Ours(model, params, batch, length)
    turns = {CACHED: ours.turn}
    turns |= zip((PYTHON, SCAN), plain_turns(plain_params, config, batch, length), strict=True)
    seconds = {
        name: value / _TOKENS.value for name, value in timed_turns(turns, _REPEATS.value).items()
    }
    uncached, count = timed_for(
        functools.partial(ours.uncached, params, ours.row), _SECONDS.value, _TOKENS.value
    )
    read = size_of(ours.params[0]) + ours.cache_bytes
    return {
        "seconds": seconds,
        "uncached": uncached,
        "uncached_count": count,
        "prefill": ours.prefill,
        "cache": ours.cache_bytes,
        "temporaries": temporaries(ours.advance),
        "bound": read / read_rate(read),
    }


def main(config: ConfigDict, flag_values: flags.FlagValues) -> None:
    """Times and prints."""
    lengths, batches = ([int(n) for n in given] for given in (_LENGTHS.value, _BATCHES.value))
    if flag_values.quick:
        lengths, batches = [16, 32], [1, 2]
        flag_values.tokens, flag_values.repeats = 4, 2
    model = build_model(config, flag_values.vocabulary)
    params = jax.jit(model.init)(jax.random.key(config.seed))
    plain_params = plain_jax.separate_blocks(
        plain_jax.init(jax.random.key(0), config.model, flag_values.vocabulary)
    )
    sizes = config.model
    console.print(
        f"{sizes.num_blocks} blocks of width {sizes.d_model}, {sizes.connection.kind}, "
        f"{sizes.attention.kind}, vocabulary {flag_values.vocabulary}, {sizes.compute_dtype}; "
        f"parameters {mib(size_of(params))} MiB, plain JAX {mib(size_of(plain_params))} MiB; "
        f"medians of {flag_values.repeats} turns of {flag_values.tokens} tokens"
    )
    console.print(surroundings())
    with jax.set_mesh(single_device_mesh()):
        for batch in batches:
            found = [
                measure(model, params, plain_params, config, batch, length) for length in lengths
            ]
            console.print(times_table(batch, lengths, found))
            console.print(memory_table(batch, lengths, found))
    console.print(surroundings())


def times_table(batch: int, lengths: list[int], measured: list[dict[str, Any]]) -> Table:
    """Times of a token."""
    table = table_of(
        f"{batch} rows: ms of a token of all rows together",
        *("length", "cache", "tokens/s", "plain JAX", "plain scan", "over plain JAX", "over scan"),
        *(f"over length {lengths[0]}", "bound", "no cache", "tokens timed", "no cache/cache"),
        left=0,
    )
    for length, found in zip(lengths, measured, strict=True):
        seconds = found["seconds"]
        cached = seconds[CACHED]
        table.add_row(
            str(length),
            f"{cached * 1e3:.2f}",
            f"{batch / cached:,.0f}",
            f"{seconds[PYTHON] * 1e3:.2f}",
            f"{seconds[SCAN] * 1e3:.2f}",
            f"{cached / seconds[PYTHON]:.2f}",
            f"{cached / seconds[SCAN]:.2f}",
            f"{cached / measured[0]['seconds'][CACHED]:.2f}",
            f"{found['bound'] * 1e3:.2f}",
            f"{found['uncached'] * 1e3:.1f}",
            str(found["uncached_count"]),
            f"{found['uncached'] / cached:.1f}",
        )
    return table


def memory_table(batch: int, lengths: list[int], measured: list[dict[str, Any]]) -> Table:
    """Memory of the cache and of a token, and the time of the prompts before it."""
    table = table_of(
        f"{batch} rows: memory in MiB, prompts",
        *("length", "cache", "temporaries of a token", "prompt", "prefill ms", "tokens/s"),
        left=0,
    )
    for length, found in zip(lengths, measured, strict=True):
        prompt = length - _TOKENS.value
        table.add_row(
            str(length),
            mib(found["cache"]),
            mib(found["temporaries"]),
            str(prompt),
            f"{found['prefill'] * 1e3:.1f}",
            f"{batch * prompt / found['prefill']:,.0f}",
        )
    return table


if __name__ == "__main__":
    cli.run(main)
