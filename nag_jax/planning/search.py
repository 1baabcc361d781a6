"""The fastest way to train that fits: ranks by the estimate, compiles the best."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict
from rich.filesize import decimal

from nag_jax.errors import UserError
from nag_jax.planning.plans import Plan, Target, estimate, make_plan
from nag_jax.planning.steps import TrainingStep

REMATS = ("none", "dots_with_no_batch_dims_saveable", "nothing_saveable")
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)

# Programs were compiled that took 0.56 (GPU) to 1.75 times (TPU) of the formula's memory.
_LEAST, _MOST = 0.56, 1.75
_TOLD = 10


def search(step: TrainingStep, target: Target, most: int) -> Plan | None:
    """Compiles up to `most` candidates and returns the fastest of them that fits.

    Meshes, numbers of micro-batches and remat policies are tried, one candidate for each mesh. The
    candidates are printed; where none is to be compiled the ten best, and nothing is returned.

    Raises:
        UserError: None fits, or the chip's speed is not known.
    """
    if target.chip is None:
        raise UserError("--search needs a chip whose speed is known, not cpu")
    config = step.config
    found, refused, valid = [], "", 0
    for values in _variants(config, len(target.devices)):
        variant = config.copy_and_resolve_references()
        for (node, key), value in values.items():
            variant[node][key] = value
        try:
            mesh = target.mesh(variant)
        except UserError as error:  # this mesh or micro-batch does not divide the model or batch
            refused = str(error)
            continue
        valid += 1
        candidate = dataclasses.replace(step, config=variant)
        size = sum(candidate.memory_estimate(mesh).values())
        if _LEAST * size < target.chip.usable:
            found.append((estimate(candidate, mesh, target).bound, size, values, candidate))
    if not valid:
        raise UserError(
            f"no mesh of {len(target.devices)} devices divides this model and its batches of "
            f"{config.train.batch_size} and {config.evaluation.batch_size} rows; the last one "
            f"tried: {refused}"
        )
    if not found:
        raise UserError(
            f"no mesh, micro-batch and remat policy fits {target.topology} by the estimate: "
            "take more devices, or a smaller model or row"
        )
    # Of equal bounds the surest to fit that sends least between devices and accumulates least comes
    # first, and of each mesh only the best, since what is sent is known from compiling alone.
    usable = target.chip.usable
    found.sort(
        key=lambda one: (float(f"{one[0]:.3g}"), max(_MOST * one[1], usable), *_preference(one[2]))
    )
    best: dict[str, tuple] = {}
    for one in found:
        best.setdefault(_words(one[2])[0], one)
    chosen, candidates = None, list(best.values())
    for bound, size, values, candidate in candidates[: most or _TOLD]:
        told = f"{'; '.join(_words(values))}: by estimate {bound:.4g} s and {decimal(round(size))}"
        if most:
            plan = make_plan(candidate, target)
            compiled = decimal(sum(plan.memory.values())) if plan.memory else "refused"
            told += f", compiled {compiled}"
            if plan.fits and (chosen is None or plan.estimate.total < chosen.estimate.total):
                chosen = plan
        print(told, flush=True)
    if not most:
        return None
    if chosen is None:
        raise UserError(
            f"none of the {min(len(candidates), most)} best candidates fits: "
            f"compile more of the {len(candidates)} (--compile), or take more devices"
        )
    return chosen


def _variants(config: ConfigDict, devices: int) -> Iterator[dict[tuple[str, str], Any]]:
    """Meshes, micro-batches and remat policies to try, as {(node, key): value}."""
    axes = ("data", "fsdp", "tensor", "expert")
    divisors = [length for length in range(1, devices + 1) if devices % length == 0]
    experts = "num_experts" in config.model.feedforward
    for lengths in itertools.product(divisors, repeat=4):
        product = lengths[0] * lengths[1] * lengths[2] * lengths[3]
        if product != devices or lengths[2] > 8 or (lengths[3] > 1 and not experts):
            continue
        for accumulation, remat in itertools.product(MICRO_BATCHES, REMATS):
            yield {
                **{("mesh", axis): length for axis, length in zip(axes, lengths, strict=True)},
                ("train", "accumulation"): accumulation,
                ("model", "remat"): remat,
            }


def _preference(values: dict[tuple[str, str], Any]) -> tuple:
    return (
        values["mesh", "tensor"],
        values["train", "accumulation"],
        values["mesh", "expert"],
        values["mesh", "fsdp"],
    )


def _words(values: dict[tuple[str, str], Any]) -> tuple[str, str, str]:
    mesh = ", ".join(f"{key} {v}" for (node, key), v in values.items() if node == "mesh" and v > 1)
    parts = f"{values['train', 'accumulation']} micro-batches"
    return mesh or "one device", parts, f"remat {values['model', 'remat']}"
