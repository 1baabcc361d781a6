"""What the Pallas kernels of a function read and write, from their grids and index maps."""

import itertools
import math

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun


def kernel_calls(function, *arguments):
    """The `pallas_call` equations that a function traces to, by the kernel's name."""
    jaxpr = jax.make_jaxpr(function)(*arguments)
    return {str(e.params["name"]): e for e in _equations(jaxpr.jaxpr, "pallas_call")}


def traffic(equation) -> int:
    """Bytes between the array memory and the kernel: a block moves when its index changes.

    Parts of blocks beyond the array's end do not move.
    """
    mapping = equation.params["grid_mapping"]
    total = 0
    for block in mapping.block_mappings:
        shape = block.array_aval.shape
        sizes = [getattr(size, "block_size", size) for size in block.block_shape]
        index_map = jaxpr_as_fun(block.index_map_jaxpr)
        last = None
        for step in itertools.product(*map(range, mapping.grid)):
            index = tuple(int(i) for i in index_map(*(np.int32(i) for i in step)))
            if index != last:
                inside = [
                    min(size, length - i * size)
                    for size, length, i in zip(sizes, shape, index, strict=True)
                ]
                total += math.prod(inside) * block.array_aval.dtype.itemsize
            last = index
    return total


def _equations(jaxpr, name):
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            yield equation
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner, name)
