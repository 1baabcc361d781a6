"""How Triton, through Pallas or by itself, lays tokens out over the threads of a GPU.

A program holds one token, or a few narrow ones, in registers. Triton wants powers of 2, so a token
is loaded with zeros behind its features.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.nag_update.limits import dtype_refusal

# Entries of a token that a thread holds; more spill in the backward pass.
ENTRIES = 8
MAX_WARPS = 16
MAX_WIDTH = 2 * ENTRIES * 32 * MAX_WARPS
# Programs with less to do than this take several tokens.
LEAST = 256


class Blocks(NamedTuple):
    """What a program works on.

    Attributes:
        rows: Tokens of a program.
        padded: Entries that a token is loaded as.
        warps: Warps of a program.
    """

    rows: int
    padded: int
    warps: int


def blocks_of(width: int) -> Blocks:
    """The layout of tokens of a width."""
    padded = pl.next_power_of_2(width)
    rows = max(1, LEAST // padded)
    return Blocks(rows, padded, max(1, min(MAX_WARPS, rows * padded // (32 * ENTRIES))))


def bytes_of(arrays: Sequence[Any]) -> int:
    """Bytes of arrays, or of what has their shapes and dtypes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def refusal(width: int, dtypes: Sequence[jnp.dtype]) -> str:
    """Why there is no layout, or nothing."""
    if width > MAX_WIDTH:
        return dtype_refusal(dtypes) or f"has no room for tokens of width {width}"
    return dtype_refusal(dtypes)
