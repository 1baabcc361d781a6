"""Which rows of a global batch a process reads, and global arrays made of them.

Both follow from the sharding alone. Where a mesh axis that does not split rows spans processes,
two processes read the same rows.
"""

import jax
import numpy as np
from jax.sharding import Sharding


def local_rows(sharding: Sharding, batch_size: int) -> np.ndarray:
    """The rows of a global batch that this process's devices hold.

    Args:
        sharding: Sharding of a batch.
        batch_size: B, rows in a global batch.

    Returns:
        int [local rows], ascending, each once.
    """
    everywhere = np.arange(batch_size)
    held = sharding.addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([everywhere[index] for index in held]))


def place_batch(
    sharding: Sharding, batch_size: int, rows: np.ndarray, batch: dict[str, np.ndarray]
) -> dict[str, jax.Array]:
    """Global arrays of a batch of which each process has the rows of its own devices.

    Args:
        sharding: Sharding of a batch.
        batch_size: B, rows in a global batch.
        rows: What `local_rows` gave.
        batch: Arrays [local rows, ...] of these rows.

    Returns:
        Arrays [B, ...].
    """

    def place(x):
        def shard(index):
            first, last, _ = index[0].indices(batch_size)
            # The rows of one device are contiguous, and so is their place in `rows`.
            begin = np.searchsorted(rows, first)
            return x[begin : begin + last - first]

        return jax.make_array_from_callback((batch_size, *x.shape[1:]), sharding, shard)

    return {name: place(x) for name, x in batch.items()}
