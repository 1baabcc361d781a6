"""How long a training step takes at the least, from FLOPs, bytes of memory and bytes of links.

All of it is our own arithmetic (no paper's): a bound of what a device could do, and the time if
nothing overlapped. Neither knows of latencies, of kernels that fall short of the peak, or of hosts.
"""

from typing import NamedTuple

from nag_jax.analysis.hardware import Chip

ASSUMPTIONS = (
    "Products run at the chip's published bfloat16 peak; attention counts its causal half.",
    "Memory moves weights four times in the compute dtype (forward, backward twice, one cast), "
    "gradients, parameters and optimizer state once each way, and every kept activation twice.",
    "Links carry the step's collectives at the published bandwidth, one after the other.",
    "Lower bound: the largest of the three alone. Without overlap: their sum. The truth lies "
    "above the lower bound.",
)


class Work(NamedTuple):
    """What one device does in a step.

    Attributes:
        model_flops: Of the model, forward and backward, without what is computed again.
        other_flops: Recomputation, and the optimizer's products.
        memory_bytes: To and from its memory.
        link_bytes: Received from other devices.
        tokens: Of the step on all devices.
        devices: Their number.
    """

    model_flops: float
    other_flops: float
    memory_bytes: float
    link_bytes: float
    tokens: int
    devices: int


class Estimate(NamedTuple):
    """Seconds of a step by what bounds it; `bound` is their largest, `total` their sum."""

    compute: float
    memory: float
    links: float
    work: Work
    chip: Chip

    @property
    def bound(self) -> float:
        """Seconds of a step if all else hides behind the slowest part."""
        return max(self.compute, self.memory, self.links)

    @property
    def total(self) -> float:
        """Seconds of a step if nothing overlaps."""
        return self.compute + self.memory + self.links

    def utilisation(self, seconds: float) -> float:
        """Model FLOPs over what the chip could do in that time (MFU)."""
        return self.work.model_flops / (seconds * self.chip.flops)


def estimate(work: Work, chip: Chip, one_host: bool) -> Estimate:
    """Returns the roofline of a step; links between hosts are slower for GPUs."""
    return Estimate(
        (work.model_flops + work.other_flops) / chip.flops,
        work.memory_bytes / chip.bandwidth,
        work.link_bytes / (chip.link if one_host else min(chip.link, chip.network)),
        work,
        chip,
    )


def memory_bytes(memory: dict[str, float], compute_itemsize: int) -> float:
    """Bytes that a step moves, of `flops.memory_estimate`'s purposes (see `ASSUMPTIONS`)."""
    weights = memory["parameters"] / 4 * compute_itemsize  # stored in float32
    return (
        4 * weights
        + 2 * (memory["parameters"] + memory["gradients"] + memory["optimizer state"])
        + 2 * memory["kept activations"]
    )
