"""The weight gradient of grouped products on TPU, for JAX 0.10.

XLA has a kernel for `jax.lax.ragged_dot`, but until JAX 0.11 none for the gradient of its weights:
there it multiplies all rows, masked, once for each group. JAX's megablox has one, which reads a
group's rows alone.
"""

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
from jaxtyping import Array, Float, Int

# Tiles: rows of one, the largest that divides all rows, and at most so many inputs and outputs.
# Sums and operands of 640 x 640 fill half of the 16 MiB that a kernel gets.
ROWS = (512, 256, 128)
WIDTH = 640


def weight_gradient(
    x: Float[Array, "N i"],
    d_y: Float[Array, "N o"],
    group_sizes: Int[Array, "E"],
    interpret: bool = False,
) -> Float[Array, "E i o"]:
    """Sum over the rows of each group of x[r]^T d_y[r].

    Args:
        x: Rows sorted by group, bfloat16; what lies past the sum of `group_sizes` adds nothing.
        d_y: Cotangents of their products, bfloat16.
        group_sizes: int32, rows of each group.
        interpret: Runs the kernel without a TPU.

    Returns:
        The gradient in bfloat16, summed in float32; zero for a group without rows.
    """
    filling = -x.shape[0] % ROWS[-1]
    x, d_y = (jnp.pad(rows, ((0, filling), (0, 0))) for rows in (x, d_y))
    rows = next(size for size in ROWS if x.shape[0] % size == 0)
    tiling = rows, _tile(x.shape[1]), _tile(d_y.shape[1])
    # `tgmm` turns its first operand back before it reads it.
    return tgmm(x.T, d_y, group_sizes, x.dtype, tiling, interpret=interpret)


def _tile(width: int) -> int:
    """Whole lanes, all tiles about equal."""
    tiles = -(-width // WIDTH)
    return min(width, -(-width // (tiles * 128)) * 128)
