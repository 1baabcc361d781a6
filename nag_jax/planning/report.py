"""The report of a plan: the model, memory, what is sent, kernels, and how long it takes."""

import jax
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from nag_jax.analysis.roofline import ASSUMPTIONS
from nag_jax.planning.plans import Plan, Target
from nag_jax.sharding.collectives import totals
from nag_jax.training.header import print_implementations, print_model

# Of a GPU's memory that JAX can be told to take, beside what drivers and libraries need.
_LARGEST_SHARE = 0.93


def print_report(plan: Plan, target: Target, steps: int | None, places: int = 0) -> None:
    """Prints all of it.

    Args:
        plan: The plan.
        target: What it is for.
        steps: Of a run, to say how long it takes; None where nothing is trained.
        places: How many of the slowest places to list.
    """
    step = plan.step
    with jax.set_mesh(plan.mesh):
        print_model(step.config, step.model, plan.mesh, step.optimizer)
        if step.name != "decode":  # a token uses other ones
            print_implementations(step.config)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{step.title(plan.mesh)} on {target.topology}", markup=False)
    table = Table("quantity", "value", title=f"compiled in {plan.seconds:.0f} s")
    rows = _memory(plan, target) + _sent(plan)
    rows += [(f"kernel {n}", f"{k} calls in the program") for n, k in (plan.kernels or {}).items()]
    for row in rows + _seconds(plan, steps):
        table.add_row(*row)
    console.print(table)
    if places and plan.memory:
        console.print(_places(plan, places))
    if plan.why_not:
        console.print(f"The compiler refused: {plan.why_not}", markup=False)
    if plan.estimate:
        for sentence in ASSUMPTIONS[step.name]:
            console.print(f"- {sentence}", markup=False)


def _memory(plan: Plan, target: Target) -> list[tuple[str, str]]:
    rows = []
    if plan.memory:
        rows.append(("memory per device, compiled", decimal(sum(plan.memory.values()))))
        rows += [(f"  {kind}", decimal(size)) for kind, size in plan.memory.items()]
    if target.chip:
        verdict = {True: "fits", False: "DOES NOT FIT", None: "not known"}[plan.fits]
        rows.append(("  a program may take", f"{decimal(round(target.chip.usable))}: {verdict}"))
        share = sum(plan.memory.values()) / target.chip.memory if plan.memory else 0
        if not plan.fits and 0 < share < _LARGEST_SHARE:
            rows.append(
                ("  it would fit with", f"XLA_PYTHON_CLIENT_MEM_FRACTION={share + 0.02:.2f}")
            )
    return rows


def _sent(plan: Plan) -> list[tuple[str, str]]:
    rows = []
    for when, conditional in (("", False), (", in branches", True)):
        found = [one for one in plan.collectives if one.conditional == conditional]
        counted = totals([one for one in found if one.times is not None])
        rows += [
            (f"{kind}{when}", f"{decimal(size)} received in {count:,}")
            for kind, (count, size) in counted.items()
        ]
    rows += [
        (
            f"{one.kind}, not counted",
            f"{decimal(one.bytes)} each time round a loop that does not say how often it runs: "
            f"{one.source}",
        )
        for one in plan.collectives
        if one.times is None
    ]
    return rows


def _seconds(plan: Plan, steps: int | None) -> list[tuple[str, str]]:
    found = plan.estimate
    if found is None:
        return []
    parts = (("compute", found.compute), ("memory", found.memory), ("links", found.links))
    rows = [(f"seconds of {name}", f"{seconds:.4g}") for name, seconds in parts]
    for name, seconds in (("lower bound", found.bound), ("without overlap", found.total)):
        rows.append(
            (
                name,
                f"{seconds:.4g} s, {found.work.tokens / seconds:,.0f} tokens/s, "
                f"MFU {found.utilisation(seconds):.1%}",
            )
        )
        if steps is not None:
            hours = seconds * steps / 3600
            rows.append(
                (
                    f"  {steps:,} steps ({steps * found.work.tokens / 1e9:.4g}G tokens)",
                    f"{_duration(hours)}, {hours * found.work.devices:,.0f} device-hours",
                )
            )
    return rows


def _places(plan: Plan, most: int) -> Table:
    total = sum(place.cycles for place in plan.places)
    table = Table("place", "cycles, millions", "share", "operations run")
    table.title = f"{total / 1e6:,.1f} million cycles by the compiler's estimate, without kernels"
    for place in plan.places[:most]:
        table.add_row(
            place.name,
            f"{place.cycles / 1e6:,.2f}",
            f"{place.cycles / total:.1%}",
            f"{place.runs:,}",
        )
    return table


def _duration(hours: float) -> str:
    return f"{hours / 24:.3g} days" if hours >= 48 else f"{hours:.3g} hours"
