"""What the benchmarks share: calls timed in turns, memory, its rate of reading, tables."""

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table


def timed_turns(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each function, called in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            began = time.perf_counter()
            jax.block_until_ready(function())
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - began)
    return {name: float(np.median(values)) for name, values in seconds.items()}


def timed_for(function: Callable[[], Any], seconds: float, most: int) -> tuple[float, int]:
    """Median seconds of a slow function, and how often it was called: until `seconds` are over."""
    times: list[float] = []
    while len(times) < most and sum(times) < seconds:
        began = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - began)
    return float(np.median(times)), len(times)


def gradient_of(function: Callable) -> Callable:
    """`function` and its pull-back of ones, to be compiled."""

    def both(*args):
        out, pull_back = jax.vjp(function, *args)
        return out, pull_back(jax.tree.map(jnp.ones_like, out))

    return both


def temporaries(compiled: Any) -> int:
    """Bytes that a compiled program needs besides its inputs and outputs."""
    return compiled.memory_analysis().temp_size_in_bytes


def size_of(tree: Any) -> int:
    """Bytes of all arrays or shapes of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def read_rate(size: int) -> float:
    """Bytes per second at which the fastest of a few sums over so many bytes reads them.

    Of the size in question, because a small buffer stays in the caches of a processor.
    """
    source = jnp.ones(max(size // 4, 1), jnp.float32)
    total = jax.jit(jnp.sum)
    times = []
    for _ in range(9):  # the first compiles
        began = time.perf_counter()
        jax.block_until_ready(total(source))
        times.append(time.perf_counter() - began)
    return source.nbytes / min(times)


def mib(size: float) -> str:
    """A size in MiB."""
    return f"{size / 2**20:,.1f}"


def table_of(title: str, *columns: str, left: int = 1) -> Table:
    """An empty table whose first `left` columns are names."""
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right")
    return table


def surroundings() -> str:
    """What the numbers depend on besides the code."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    device = jax.devices()[0]
    return f"{device.device_kind}, {os.cpu_count()} cores, load {load}, jax {jax.__version__}"
