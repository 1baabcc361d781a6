"""How long a step takes at the least, from FLOPs, bytes of memory and bytes of links.

All of it is our own arithmetic (no paper's): a bound of what a device could do, and the time if
nothing overlapped. Neither knows of latencies, of kernels that fall short of the peak, or of hosts.
"""

from typing import NamedTuple

from nag_jax.sharding.hardware import Chip

_PEAK = (
    "Products run at the chip's published peak: bfloat16's, or float32's where the model computes "
    "in float32; the optimizer's at that of their own dtype. Attention counts its causal half."
)
_LINKS = (
    "Links carry the collectives of every run at the published bandwidth, one after the other; "
    "those in branches, such as a refresh of SOAP's bases, are not counted."
)
_BOUND = (
    "Lower bound: the largest of the three alone. Without overlap: their sum. The truth lies "
    "above the lower bound."
)

# What estimates of each kind of step assume.
ASSUMPTIONS = {
    "train": (
        _PEAK,
        "Memory moves, for each micro-batch, the weights in use three times, gradients and every "
        "kept activation twice, and once a step parameters and optimizer state, each way.",
        _LINKS,
        _BOUND,
    ),
    "evaluate": (
        _PEAK,
        "Memory moves the weights once a batch, those that other devices hold twice more; no "
        "activation is counted.",
        _LINKS,
        _BOUND,
    ),
    "decode": (
        _PEAK,
        "Memory moves the weights once for each token, those that other devices hold twice more; "
        "of experts no more than the rows can choose; and the whole cache once.",
        "Memory holds matrices in the compute dtype. A run loaded in another one holds those, too: "
        "load_run(dtype=...) loads it so.",
        _LINKS,
        _BOUND,
    ),
}


class Work(NamedTuple):
    """What one device does in a step.

    Attributes:
        model_flops: Of the model, in training forward and backward, without what is computed again.
        again_flops: What the backward pass computes again.
        optimizer_flops: Of the optimizer's update.
        memory_bytes: To and from its memory.
        link_bytes: Received from other devices.
        tokens: Of the step on all devices.
        devices: Their number.
        float32: Whether the model's products are float32.
        optimizer_float32: Whether the optimizer's are.
    """

    model_flops: float
    again_flops: float
    optimizer_flops: float
    memory_bytes: float
    link_bytes: float
    tokens: int
    devices: int
    float32: bool
    optimizer_float32: bool


class Estimate(NamedTuple):
    """Seconds of a step by what bounds it."""

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
        """Model FLOPs over what the chip could do in that time in bfloat16 (MFU)."""
        return self.work.model_flops / (seconds * self.chip.flops)


def estimate(work: Work, chip: Chip, one_host: bool) -> Estimate:
    """Returns the roofline of a step; links between hosts are slower for GPUs."""
    peak, optimizer_peak = (
        chip.flops32 if float32 else chip.flops
        for float32 in (work.float32, work.optimizer_float32)
    )
    return Estimate(
        (work.model_flops + work.again_flops) / peak + work.optimizer_flops / optimizer_peak,
        work.memory_bytes / chip.bandwidth,
        work.link_bytes / (chip.link if one_host else min(chip.link, chip.network)),
        work,
        chip,
    )


def training_bytes(memory: dict[str, float], weights_in_use: float, micro_batches: int) -> float:
    """Bytes that a training step moves (see `ASSUMPTIONS`).

    Args:
        memory: Of `flops.memory_estimate`, whose activations are those of one micro-batch.
        weights_in_use: Bytes of the weights as a device multiplies with them, gathered.
        micro_batches: Of a step.
    """
    each = 3 * weights_in_use + 2 * memory["gradients"] + 2 * memory["kept activations"]
    return micro_batches * each + 2 * (memory["parameters"] + memory["optimizer state"])
