"""What every fused kernel of the update takes: dtypes, and work."""

from collections.abc import Sequence

import jax.numpy as jnp

# Of an entry of the direction.
FLOPS = {"forward": 16, "backward": 42}


def dtype_refusal(dtypes: Sequence[jnp.dtype]) -> str:
    """Why a kernel cannot serve arrays of these dtypes, or nothing."""
    for dtype in dtypes:
        if dtype not in (jnp.float32, jnp.bfloat16):
            return f"takes float32 and bfloat16, not {dtype.name}"
    return ""
