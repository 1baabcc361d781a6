"""Pieces of P1's model at ratio 60, forward and backward, by the TPU compiler's own estimate.

  python benchmarks/tpu_pieces.py [--topology=v5e:1x1] [--rows=6] [--hertz=1.5e9]

Compiled alone with nothing attached, at a micro-batch's sizes in bfloat16: milliseconds by the
cycles that the compiler estimates, by FLOPs at peak, and by inputs and outputs moved once. Pallas
kernels carry no estimate, so CCGQA's mixing is the plain definition.
"""

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding
from rich.console import Console
from timing import gradient_of, size_of, table_of

from nag_jax.models.losses import cross_entropy
from nag_jax.planning.places import places
from nag_jax.sharding.hardware import CHIPS
from nag_jax.sharding.topologies import absent_devices
from pallas_kernels.ccgqa_mixing import Convolutions, ccgqa_mix

_TOPOLOGY = flags.DEFINE_string("topology", "v5e:1x1", "chip to compile for")
_ROWS = flags.DEFINE_integer("rows", 6, "rows of a micro-batch")
_HERTZ = flags.DEFINE_float("hertz", 1.5e9, "cycles of the chip in a second")

LENGTH, WIDTH, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 2048, 1280, 32000, 8, 2, 80


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    """An argument to compile for."""
    return jax.ShapeDtypeStruct(shape, dtype)


def loss(rows: int, chunk: int):
    """(function, arguments, FLOPs) of decode and loss, whose forward product runs twice."""

    def function(hidden, table, log_scale, targets):
        return cross_entropy(hidden, jnp.exp(log_scale), table, targets, VOCAB, chunk)

    arguments = (
        array(rows, LENGTH, WIDTH),
        array(VOCAB, WIDTH, dtype="float32"),
        array(rows, LENGTH, dtype="float32"),
        array(rows, LENGTH, dtype="int32"),
    )
    return function, arguments, 8.0 * rows * LENGTH * WIDTH * VOCAB


def mixing(rows: int):
    """(function, arguments, FLOPs) of what lies between CCGQA's projections and its positions."""
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (rows, LENGTH))

    def function(q, k, v, query, key, log_temperature):
        return ccgqa_mix(
            q, k, v, query, key, log_temperature, positions, implementation="reference"
        )

    def convolutions(heads):
        shapes = ((2, heads, HEAD_DIM), (heads, HEAD_DIM), (2, heads, HEAD_DIM, HEAD_DIM))
        return Convolutions(
            *(array(*shape, dtype="float32") for shape in (*shapes, (heads, HEAD_DIM)))
        )

    narrow = array(rows, LENGTH, KV_HEADS, HEAD_DIM)
    arguments = (
        array(rows, LENGTH, HEADS, HEAD_DIM), narrow, narrow,
        convolutions(HEADS), convolutions(KV_HEADS), array(KV_HEADS, dtype="float32"),
    )  # fmt: skip
    return function, arguments, 12.0 * rows * LENGTH * (HEADS + KV_HEADS) * HEAD_DIM**2


def main(_: list[str]) -> None:
    """Compiles and prints."""
    jax.config.update("jax_platforms", "cpu")  # nothing is looked for or held
    chip = CHIPS[_TOPOLOGY.value.partition(":")[0]]
    mesh = Mesh(np.array(absent_devices(_TOPOLOGY.value)[:1]), ("data",))
    whole = NamedSharding(mesh, jax.P())
    table = table_of(
        f"forward and backward of {_ROWS.value} rows of {LENGTH:,}, {chip.name}",
        *("piece", "ms, estimated", "FLOPs at peak", "bytes moved once"),
    )
    for name, (function, arguments, work) in {
        "decode and cross-entropy, chunks of 2,048": loss(_ROWS.value, 2048),
        "decode and cross-entropy, all at once": loss(_ROWS.value, 0),
        "CCGQA's mixing, plain": mixing(_ROWS.value),
    }.items():
        both = gradient_of(function)
        moved = size_of((arguments, jax.eval_shape(both, *arguments)))
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), arguments
        )
        with jax.set_mesh(mesh):
            text = jax.jit(both).lower(*placed).compile().as_text()
        cycles = sum(place.cycles for place in places(text))
        numbers = (cycles / _HERTZ.value, work / chip.flops, moved / chip.bandwidth)
        table.add_row(name, *(f"{1e3 * seconds:.2f}" for seconds in numbers))
    Console(highlight=False, soft_wrap=True).print(table)


if __name__ == "__main__":
    app.run(main)
