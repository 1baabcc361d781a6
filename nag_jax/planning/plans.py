"""A step compiled for devices that are not there: memory, what is sent, kernels, a roofline."""

import re
import time
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from nag_jax.analysis import roofline
from nag_jax.planning.places import Place, places
from nag_jax.planning.steps import Step
from nag_jax.sharding.collectives import Collective, collectives
from nag_jax.sharding.hardware import CHIPS, Chip
from nag_jax.sharding.mesh import make_mesh
from nag_jax.sharding.topologies import absent_devices
from nag_jax.training.header import implementations
from nag_jax.validation import validate, validate_devices


class Target(NamedTuple):
    """Devices to plan for.

    Attributes:
        topology: Its name.
        devices: All of them.
        chip: What one can do; None for a CPU, of which nobody knows.
    """

    topology: str
    devices: list
    chip: Chip | None

    @classmethod
    def of(cls, topology: str) -> "Target":
        """The devices of a topology.

        Raises:
            UserError: There is no such topology, or no compiler for it.
        """
        return cls(topology, absent_devices(topology), CHIPS.get(topology.partition(":")[0]))

    def mesh(self, config: ConfigDict) -> Mesh:
        """The mesh of a config.

        Raises:
            UserError: The config is not valid, or does not fit the devices.
        """
        validate(config)
        validate_devices(config, len(self.devices))
        return make_mesh(config.mesh, self.devices)


class Plan(NamedTuple):
    """A step on a topology.

    Attributes:
        step: What was planned.
        mesh: Its mesh.
        estimate: The roofline; None where the chip is not known, or the compiler refused.
        memory: Bytes on a device by kind, by the compiler; None where it refused.
        fits: Whether that is less than programs get; None where it is not known.
        why_not: The compiler's word where it refused, for want of memory or otherwise.
        collectives: What is sent.
        kernels: Fused kernels inside, with how often each is called in the program's text.
        places: Where its time goes by the compiler's estimate, the slowest first.
        seconds: How long compiling took.
    """

    step: Step
    mesh: Mesh
    estimate: roofline.Estimate | None = None
    memory: dict[str, int] | None = None
    fits: bool | None = None
    why_not: str = ""
    collectives: tuple[Collective, ...] = ()
    kernels: dict[str, int] | None = None
    places: tuple[Place, ...] = ()
    seconds: float = 0.0


def make_plan(step: Step, target: Target) -> Plan:
    """Compiles a step for a target.

    Raises:
        UserError: The config does not fit the devices.
    """
    mesh = target.mesh(step.config)
    began = time.perf_counter()
    with jax.set_mesh(mesh):
        implementations(step.config)
        lowered = step.lower(mesh)
    try:
        program = lowered.compile()
    except Exception as error:  # a compiler raises what it likes
        told = " ".join(str(error).split())[:300]
        fits = False if "RESOURCE_EXHAUSTED" in told else None
        return Plan(step, mesh, fits=fits, why_not=told, seconds=time.perf_counter() - began)
    seconds = time.perf_counter() - began
    memory, text = memory_of(program), program.as_text()
    sent = tuple(collectives(text, mesh.size))
    return Plan(
        step,
        mesh,
        estimate=estimate(step, mesh, target, sent),
        memory=memory,
        fits=sum(memory.values()) < target.chip.usable if target.chip else None,
        collectives=sent,
        kernels=_kernels(text),
        places=tuple(places(text)),
        seconds=seconds,
    )


def estimate(
    step: Step, mesh: Mesh, target: Target, sent: tuple[Collective, ...] = ()
) -> roofline.Estimate | None:
    """The roofline of a step that sends this; None where the chip is not known."""
    if target.chip is None:
        return None
    link_bytes = sum(one.times * one.bytes for one in sent if one.times and not one.conditional)
    hosts = len({device.process_index for device in target.devices})
    one_host = hosts == 1 or target.chip.platform == "tpu"
    return roofline.estimate(step.work(mesh, float(link_bytes)), target.chip, one_host)


def memory_of(program: Any) -> dict[str, int]:
    """Bytes on a device by kind, as the compiler of a program has planned it."""
    analysis = program.memory_analysis()
    return {
        "arguments": analysis.argument_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
        "results not in place": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
    }


def _kernels(text: str) -> dict[str, int]:
    """Names of the fused kernels in a program's text, with their numbers of calls."""
    counts: dict[str, int] = {}
    for line in text.splitlines():
        target = re.search(r'custom_call_target="(tpu_custom_call|__gpu\$xla\.gpu\.triton)"', line)
        name = re.search(r'op_name="[^"]*?(\w+)\)*/pallas_call', line)
        if target:
            known = name[1] if name else target[1]
            counts[known] = counts.get(known, 0) + 1
    return counts
