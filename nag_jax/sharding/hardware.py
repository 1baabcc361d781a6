"""What accelerators can do, as their makers publish it, for estimates before one is at hand."""

from typing import NamedTuple


class Chip(NamedTuple):
    """One device as JAX sees it.

    Attributes:
        name: Its maker's name.
        platform: "tpu", "gpu" or "cpu".
        flops: Dense FLOP/s in bfloat16.
        flops32: The same of float32 products at the highest precision.
        memory: Bytes of high-bandwidth memory; of a TPU those that its compiler leaves to programs.
        bandwidth: Bytes/s of that memory.
        link: Bytes/s that a device receives from its neighbours, over all links at once.
        network: Bytes/s that it receives from other hosts, where those are not neighbours.
    """

    name: str
    platform: str
    flops: float
    flops32: float
    memory: float
    bandwidth: float
    link: float
    network: float

    @property
    def usable(self) -> float:
        """Bytes of memory that a program gets if nobody sets another share."""
        return self.memory * (JAX_SHARE if self.platform == "gpu" else 1)


# What JAX takes of a GPU's memory at its start: all that its programs have, fragmentation apart.
JAX_SHARE = 0.75

# Google Cloud's TPU pages and NVIDIA's data sheets. Links: half of the published sum of both
# directions. A chip of TPU7x is two devices, with half of it each. Between hosts of GPUs 400 Gbit/s
# for each of them are assumed. A float32 product takes a TPU six passes of bfloat16. A TPU's memory
# is what libtpu 0.0.42 names when it refuses a program of 480 GiB: "exceeds available HBM".
CHIPS = {
    "v4": Chip("TPU v4", "tpu", 275e12, 275e12 / 6, 30.75 * 2**30, 1228e9, 150e9, 150e9),
    "v5e": Chip("TPU v5e", "tpu", 197e12, 197e12 / 6, 15.75 * 2**30, 819e9, 100e9, 100e9),
    "v5p": Chip("TPU v5p", "tpu", 459e12, 459e12 / 6, 95.74 * 2**30, 2765e9, 300e9, 300e9),
    "v6e": Chip("TPU v6e", "tpu", 918e12, 918e12 / 6, 31.25 * 2**30, 1640e9, 224e9, 224e9),
    "tpu7x": Chip(
        "half of a TPU7x", "tpu", 1153e12, 1153e12 / 6, 94.75 * 2**30, 3690e9, 300e9, 300e9
    ),
    "h100": Chip("H100 80GB SXM", "gpu", 989e12, 67e12, 80e9, 3350e9, 450e9, 50e9),
    "h200": Chip("H200 141GB SXM", "gpu", 989e12, 67e12, 141e9, 4800e9, 450e9, 50e9),
}
