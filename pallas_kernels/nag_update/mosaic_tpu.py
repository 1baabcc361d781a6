"""The norm-agnostic update as one Pallas kernel for TPU, forward and backward.

Each kernel holds some whole tokens in VMEM, computes the definition (`reference.update_formula`, or
`gradient.update_gradient`) on them, and reads and writes every array once. The backward kernel
recomputes from the inputs; nothing else is kept.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.nag_update.gradient import update_gradient
from pallas_kernels.nag_update.limits import FLOPS, dtype_refusal
from pallas_kernels.nag_update.reference import with_pass_through
from pallas_kernels.platform import tpu_refusal

LANES = 128
ROWS = 16  # of a tile of bfloat16; float32 has 8
# What a kernel may take of VMEM, of the 16 MiB that are a kernel's by default on all generations.
BUDGET = 12 * 2**20
# Full-width float32 arrays alive at once in the body, as the compiler was seen to need.
LIVE = {"forward": 4, "backward": 8}


def refusal(width: int, dtypes: Sequence[jnp.dtype]) -> str:
    """Why the kernel cannot serve, or nothing."""
    if refused := tpu_refusal():
        return refused
    if refused := dtype_refusal(dtypes):
        return refused
    if _bytes(width, max(dtype.itemsize for dtype in dtypes), "backward") * ROWS > BUDGET:
        return f"has no room for tokens of width {width}"
    return ""


class Layout(NamedTuple):
    """How tokens are laid out for a kernel.

    Attributes:
        outer: Rows of the grid's first axis: 1, or the leading axes where flattening would copy.
        tokens: Tokens of each.
        rows: Tokens of a block.
        blocks: Blocks of each outer row; the last one may be partly empty.
    """

    outer: int
    tokens: int
    rows: int
    blocks: int


def block_rows(width: int, itemsize: int, kind: str) -> int:
    """Tokens of a block: the largest power of 2 that VMEM has room for, at most 512."""
    fitting = BUDGET // _bytes(width, itemsize, kind)
    return max(ROWS, min(512, 2 ** int(math.log2(max(fitting, 1)))))


def _bytes(width: int, itemsize: int, kind: str) -> int:
    """VMEM that a token takes."""
    padded = -(-width // LANES) * LANES
    moved = {"forward": 3, "backward": 5}[kind] * itemsize * 2  # each block twice, to overlap
    return padded * (moved + 4 * LIVE[kind])


def layout_of(shape: tuple[int, ...], itemsize: int, kind: str) -> Layout:
    """Plans the grid of a kernel.

    Args:
        shape: Of the direction.
        itemsize: Bytes of an entry, the larger of direction and branch.
        kind: "forward" or "backward".
    """
    *leading, width = shape
    rows = block_rows(width, itemsize, kind)
    last = leading[-1] if leading else 1
    # Merging axes is free where tiles do not straddle them. Short rows, such as those of decoding,
    # are merged all the same: a tile for each would be mostly empty.
    if len(leading) < 2 or last % ROWS == 0 or last < ROWS:
        outer, tokens = 1, math.prod(leading)
    else:
        outer, tokens = math.prod(leading[:-1]), last
    rows = min(rows, -(-tokens // ROWS) * ROWS)
    return Layout(outer, tokens, rows, -(-tokens // rows))


def forward(
    direction: Float[Array, "*tokens d"],
    branch: Float[Array, "*tokens d"],
    gain: Float[Array, "*tokens"],
    interpret: bool,
) -> tuple[Float[Array, "*tokens d"], Float[Array, "*tokens"]]:
    """`reference.with_pass_through`; `interpret` runs the kernel without a TPU."""
    statistics = jnp.promote_types(direction.dtype, jnp.float32)
    return _call(
        _forward_body,
        "forward",
        wide=(direction, branch),
        narrow=(gain.astype(statistics),),
        out_wide=(direction.dtype,),
        out_narrow=(statistics,),
        interpret=interpret,
    )


def backward(
    direction: Float[Array, "*tokens d"],
    branch: Float[Array, "*tokens d"],
    gain: Float[Array, "*tokens"],
    d_updated: Float[Array, "*tokens d"],
    d_log_gain: Float[Array, "*tokens"],
    interpret: bool,
) -> tuple[Float[Array, "*tokens d"], Float[Array, "*tokens d"], Float[Array, "*tokens"]]:
    """`gradient.update_gradient`."""
    statistics = jnp.promote_types(direction.dtype, jnp.float32)
    d_direction, d_branch, d_gain = _call(
        _backward_body,
        "backward",
        wide=(direction, branch, d_updated),
        narrow=(gain.astype(statistics), d_log_gain),
        out_wide=(direction.dtype, branch.dtype),
        out_narrow=(statistics,),
        interpret=interpret,
    )
    return d_direction, d_branch, d_gain.astype(gain.dtype)


def _forward_body(direction, branch, gain, updated, log_gain):
    r, f, a = direction[0], branch[0], gain[0, 0, 0]
    updated[0], log_gain[0, 0, 0] = with_pass_through(r, f, a)


def _backward_body(direction, branch, d_updated, gain, d_log_gain, *outputs):
    d_direction, d_branch, d_gain = outputs
    d_direction[0], d_branch[0], d_gain[0, 0, 0] = update_gradient(
        direction[0], branch[0], gain[0, 0, 0], d_updated[0], d_log_gain[0, 0, 0]
    )


def _call(body, kind, *, wide, narrow, out_wide, out_narrow, interpret):
    """Runs a body over blocks: `wide` arrays [*tokens, d], `narrow` ones [*tokens]."""
    shape = wide[0].shape
    width = shape[-1]
    itemsize = max(x.dtype.itemsize for x in wide)
    outer, tokens, rows, blocks = layout_of(shape, itemsize, kind)
    # One number a token lies along lanes, blocks of them in rows of their own: [.., 1, rows] is
    # compact in memory, where [tokens, 1] would take a whole tile a token.
    missing = blocks * rows - tokens
    narrow = [
        jnp.pad(x.reshape(outer, tokens), ((0, 0), (0, missing))).reshape(outer, blocks, 1, rows)
        for x in narrow
    ]
    wide_spec = pl.BlockSpec((1, rows, width), lambda i, j: (i, j, 0))
    narrow_spec = pl.BlockSpec((1, 1, 1, rows), lambda i, j: (i, j, 0, 0))
    count = outer * tokens * width
    moved = [jnp.dtype(dtype) for dtype in (*(x.dtype for x in wide), *out_wide)]
    results = pl.pallas_call(
        body,
        name=f"nag_update_{kind}",
        grid=(outer, blocks),
        in_specs=[wide_spec] * len(wide) + [narrow_spec] * len(narrow),
        out_specs=[wide_spec] * len(out_wide) + [narrow_spec] * len(out_narrow),
        out_shape=[jax.ShapeDtypeStruct((outer, tokens, width), dtype) for dtype in out_wide]
        + [jax.ShapeDtypeStruct((outer, blocks, 1, rows), dtype) for dtype in out_narrow],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=FLOPS[kind] * count,
            transcendentals=outer * tokens * 2,
            bytes_accessed=count * sum(dtype.itemsize for dtype in moved)
            + 4 * outer * tokens * (len(narrow) + len(out_narrow)),
        ),
        interpret=interpret,
    )(*(x.reshape(outer, tokens, width) for x in wide), *narrow)
    whole, single = results[: len(out_wide)], results[len(out_wide) :]
    return (
        *(x.reshape(shape) for x in whole),
        *(x.reshape(outer, -1)[:, :tokens].reshape(shape[:-1]) for x in single),
    )
