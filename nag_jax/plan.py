"""What a configuration costs on devices that you do not have: fit, time, and what is sent.

  python -m nag_jax.plan --config=configs/papers/nag.py:ratio=60 --topology=v5e:4x4 \\
      --config.mesh.fsdp=16 --config.mesh.data=1 --tokens=50e9

Compiles the whole training step for the topology with nothing attached (TPU needs libtpu, GPU the
CUDA plugin and ptxas) and prints parameters, FLOPs, memory, collectives and a roofline estimate.
--search tries micro-batches, remat policies and meshes, ranks them by the estimate and compiles
the best until one fits.
"""

import itertools
import math
import re
import time
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict

from nag_jax import cli
from nag_jax.errors import UserError

_TOPOLOGY = flags.DEFINE_string("topology", None, "chip and shape, such as v5e:4x4 or h200:8")
_TOKENS = flags.DEFINE_float("tokens", 0, "token budget; 0: the config's steps")
_VOCAB = flags.DEFINE_integer("vocab_size", 0, "ids, if the tokenizer's file is not at hand")
_SEARCH = flags.DEFINE_bool("search", False, "find the fastest that fits")
_COMPILE = flags.DEFINE_integer("compile", 3, "most candidates that --search compiles")
flags.mark_flag_as_required("topology")

REMATS = ("none", "dots_with_no_batch_dims_saveable", "nothing_saveable")


def main(config: ConfigDict, flag_values: Any) -> int:
    """Plans one configuration, or searches."""
    import jax

    from nag_jax.sharding.topologies import absent_devices, parse_topology

    chip, shape = parse_topology(flag_values.topology)
    jax.config.update("jax_platforms", "cpu")  # nothing is looked for or held
    if chip == "cpu":
        jax.config.update("jax_num_cpu_devices", shape[0])
    devices = absent_devices(flag_values.topology)
    planner = _Planner(flag_values.topology, devices, _vocab_size(config, flag_values.vocab_size))
    if flag_values.search:
        return _search(planner, config, flag_values)
    plan = planner.plan(config)
    planner.print(plan, _steps(config, flag_values.tokens))
    return 0 if plan.fits is not False else cli.FAILED


class Plan(NamedTuple):
    """A configuration on a topology.

    Attributes:
        config: The complete config.
        model: The model.
        mesh: Its mesh.
        optimizer: Its optimizer.
        estimate: The roofline; None where the chip is a CPU.
        memory: Bytes on a device by kind, by the compiler; None if it was not compiled.
        fits: Whether that is less than the device has; None where it is not known.
        why_not: The compiler's word where it refused.
        collectives: What is sent; None where the program does not say.
        kernels: Fused kernels inside, with how often each is called in the program's text.
        seconds: How long compiling took.
    """

    config: ConfigDict
    model: Any
    mesh: Any
    optimizer: Any
    estimate: Any
    memory: dict[str, int] | None = None
    fits: bool | None = None
    why_not: str = ""
    collectives: tuple | None = ()
    kernels: dict[str, int] | None = None
    seconds: float = 0.0


class _Planner:
    """Plans configs for one topology."""

    def __init__(self, topology: str, devices: list, vocab_size: int):
        from nag_jax.sharding.hardware import CHIPS

        self.topology, self.devices, self.vocab_size = topology, devices, vocab_size
        self.chip = CHIPS.get(topology.partition(":")[0])
        self._state: Any = None

    def plan(self, config: ConfigDict) -> Plan:
        """Builds the step, and compiles it.

        Raises:
            UserError: The config does not fit the devices.
        """
        import jax

        from nag_jax.models.transformer import build_model
        from nag_jax.optim import build_optimizer
        from nag_jax.training.header import implementations

        mesh = self._mesh(config)
        with jax.set_mesh(mesh):
            implementations(config)
        model = build_model(config, self.vocab_size)
        optimizer, schedule = build_optimizer(config.optimizer, config.train.steps, model.infos)
        return self._compiled(Plan(config, model, mesh, optimizer, None), schedule)

    def estimated(self, config: ConfigDict, like: Plan) -> Plan:
        """A plan that is not compiled, with the model of another one that differs in no size.

        Raises:
            UserError: As `plan`.
        """
        plan = like._replace(config=config, mesh=self._mesh(config), collectives=())
        return plan._replace(estimate=self._estimate(plan))

    def uncompiled(self, config: ConfigDict) -> Plan:
        """The model and the optimizer of a config, for `estimated`; its mesh is not looked at."""
        from nag_jax.models.transformer import build_model
        from nag_jax.optim import build_optimizer

        model = build_model(config, self.vocab_size)
        optimizer, _ = build_optimizer(config.optimizer, config.train.steps, model.infos)
        return Plan(config, model, None, optimizer, None)

    def _mesh(self, config: ConfigDict):
        from nag_jax.config import validate, validate_devices
        from nag_jax.sharding.mesh import make_mesh

        validate(config)
        validate_devices(config, len(self.devices))
        return make_mesh(config.mesh, self.devices)

    def _compiled(self, plan: Plan, schedule) -> Plan:
        from nag_jax.sharding.collectives import collectives

        began = time.perf_counter()
        try:
            program = _lower(plan, schedule).compile()
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            told = " ".join(str(error).split())[:300]
            return plan._replace(fits=False, why_not=told, seconds=time.perf_counter() - began)
        seconds = time.perf_counter() - began
        analysis, text = program.memory_analysis(), program.as_text()
        try:
            sent = tuple(collectives(text, plan.mesh.size))
        except ValueError:  # a loop that does not say how often it runs
            sent = None
        memory = {
            "state and batch": analysis.argument_size_in_bytes,
            "temporaries": analysis.temp_size_in_bytes,
            "results not in place": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        }
        plan = plan._replace(
            memory=memory,
            fits=sum(memory.values()) < self.chip.usable if self.chip else None,
            collectives=sent,
            kernels=_kernels(text),
            seconds=seconds,
        )
        return plan._replace(estimate=self._estimate(plan))

    def _estimate(self, plan: Plan):
        import jax.numpy as jnp

        from nag_jax.analysis import flops, roofline
        from nag_jax.analysis.optimizer_flops import update_flops

        if self.chip is None:
            return None
        config, infos = plan.config, plan.model.infos
        devices = plan.mesh.size
        tokens = config.train.batch_size * config.data.row_length
        parts = flops.forward_flops(infos, config, self.vocab_size)
        forward = sum(parts.values())
        # The decode is computed again in any case, to keep no logits.
        again = forward if config.model.remat == "nothing_saveable" else parts["decode"]
        update = update_flops(config.optimizer, infos)
        dtype = jnp.dtype(config.model.compute_dtype)
        weights = dtype.itemsize * self._weights_in_use(plan)
        always = [one for one in plan.collectives or () if not one.conditional]
        work = roofline.Work(
            model_flops=flops.TRAINING_FACTOR * forward * tokens / devices,
            again_flops=again * tokens / devices,
            optimizer_flops=update.shared / devices
            + update.repeated * plan.mesh.shape["data"] / devices,
            memory_bytes=roofline.memory_bytes(
                self.memory_estimate(plan), weights, config.train.accumulation
            ),
            link_bytes=float(sum(one.times * one.bytes for one in always)),
            tokens=tokens,
            devices=devices,
            float32=dtype.itemsize > 2,
            optimizer_float32=config.optimizer.get("newton_schulz_dtype") != "bfloat16",
        )
        hosts = len({device.process_index for device in self.devices})
        return roofline.estimate(work, self.chip, hosts == 1 or self.chip.platform == "tpu")

    @staticmethod
    def _weights_in_use(plan: Plan) -> int:
        """Numbers in the weights that a device multiplies with, gathered along the width."""
        from jax.sharding import NamedSharding

        from nag_jax.parameters import flatten
        from nag_jax.sharding.rules import use_spec

        return sum(
            math.prod(
                NamedSharding(plan.mesh, use_spec(info.axes, info.shape, plan.mesh)).shard_shape(
                    info.shape
                )
            )
            for info in flatten(plan.model.infos).values()
        )

    def memory_estimate(self, plan: Plan) -> dict[str, float]:
        """The formula's bytes on a device, by purpose."""
        import jax

        from nag_jax.analysis.flops import memory_estimate

        if self._state is None:  # sizes alone, which no mesh changes
            params = jax.tree.map(
                lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), plan.model.infos
            )
            self._state = jax.eval_shape(plan.optimizer.init, params)
        return memory_estimate(plan.model.infos, plan.config, self._state, plan.mesh)

    def print(self, plan: Plan, steps: int) -> None:
        """The whole report."""
        import jax
        from rich.console import Console
        from rich.filesize import decimal
        from rich.table import Table

        from nag_jax.analysis.roofline import ASSUMPTIONS
        from nag_jax.sharding.collectives import totals
        from nag_jax.training.header import print_header

        with jax.set_mesh(plan.mesh):
            print_header(plan.config, plan.model, plan.optimizer, plan.mesh)
        console = Console(highlight=False, soft_wrap=True)
        title = f"training step on {self.topology}, compiled in {plan.seconds:.0f} s"
        table = Table("quantity", "value", title=title)
        if plan.memory:
            table.add_row("memory per device, compiled", decimal(sum(plan.memory.values())))
            for kind, size in plan.memory.items():
                table.add_row(f"  {kind}", decimal(size))
        if self.chip:
            verdict = "fits" if plan.fits else "DOES NOT FIT"
            table.add_row("  a program may take", f"{decimal(round(self.chip.usable))}: {verdict}")
        for when, conditional in (("in every step", False), ("in branches", True)):
            found = [one for one in plan.collectives or () if one.conditional == conditional]
            for kind, (count, size) in totals(found).items():
                table.add_row(f"{kind}, received {when}", f"{decimal(size)} in {count}")
        if plan.collectives is None:
            table.add_row("collectives", "not counted: a loop does not say how often it runs")
        for name, count in (plan.kernels or {}).items():
            table.add_row(f"kernel {name}", f"{count} calls in the program")
        if plan.estimate and plan.memory:
            found = plan.estimate
            for name, part in (
                ("compute", found.compute),
                ("memory", found.memory),
                ("links", None if plan.collectives is None else found.links),
            ):
                told = "not counted, and in no line below" if part is None else f"{part:.4g}"
                table.add_row(f"seconds of {name}", told)
            for name, seconds in (("lower bound", found.bound), ("without overlap", found.total)):
                days = seconds * steps / 86400
                table.add_row(
                    f"step, {name}",
                    f"{seconds:.4g} s, {found.work.tokens / seconds:,.0f} tokens/s, "
                    f"MFU {found.utilisation(seconds):.0%}",
                )
                table.add_row(
                    f"  {steps:,} steps ({steps * found.work.tokens / 1e9:.4g}G tokens)",
                    f"{days:.3g} days, {days * 24 * found.work.devices:,.0f} device-hours",
                )
        console.print(table)
        if plan.why_not:
            console.print(f"The compiler refused: {plan.why_not}", markup=False)
        if plan.estimate and plan.memory:
            for sentence in ASSUMPTIONS:
                console.print(f"- {sentence}", markup=False)


def _lower(plan: Plan, schedule):
    import jax

    from nag_jax.sharding.rules import batch_sharding
    from nag_jax.training.state import abstract_state
    from nag_jax.training.step import configured_step, jit_train_step

    config = plan.config
    function = configured_step(config, plan.model, plan.optimizer, schedule)
    shape = (config.train.batch_size, config.data.row_length + 1)
    sharding = batch_sharding(plan.mesh)
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for name, dtype in (("tokens", "int32"), ("segment_ids", "int32"), ("valid", "bool"))
    }
    with jax.set_mesh(plan.mesh):
        step = jit_train_step(function, plan.model, plan.optimizer, plan.mesh)
        return step.lower(abstract_state(plan.model, plan.optimizer, plan.mesh), batch)


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


def _search(planner: _Planner, config: ConfigDict, flag_values: Any) -> int:
    """Ranks what could be run by the estimate, compiles the best until one fits, prints that."""
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    if planner.chip is None:
        raise UserError("--search needs a chip whose speed is known, not cpu")
    found, valid, like = [], 0, planner.uncompiled(config)
    for values in _variants(config, len(planner.devices)):
        variant = config.copy_and_resolve_references()
        for (node, key), value in values.items():
            variant[node][key] = value
        try:
            plan = planner.estimated(variant, like)
        except UserError:
            continue  # this mesh or micro-batch does not divide the model or the batch
        valid += 1
        size = sum(planner.memory_estimate(plan).values())
        if size < 1.25 * planner.chip.usable:  # as far as the estimate may be off
            found.append((plan.estimate.bound, size, values, variant))
    if not valid:
        raise UserError(
            f"no mesh of {len(planner.devices)} devices divides this model and its batch of "
            f"{config.train.batch_size} rows: take another number of devices, or another batch"
        )
    if not found:
        raise UserError(
            f"no mesh, micro-batch and remat policy fits {planner.topology} by the estimate: "
            "take more devices, or a smaller model or row"
        )
    # Of equal bounds the one that sends least between devices and accumulates least comes first,
    # and of each mesh only the best, since what is sent is known from compiling alone.
    found.sort(key=lambda one: (one[0], *_preference(one[2])))
    best: dict[str, tuple] = {}
    for one in found:
        best.setdefault(_words(one[2])[0], one)
    found = list(best.values())
    table = Table(
        "mesh", "micro-batches", "remat", "estimated bound", "estimated memory", "compiled"
    )
    chosen = None
    for bound, size, values, variant in found[: flag_values.compile]:
        plan = planner.plan(variant)
        told = decimal(sum(plan.memory.values())) if plan.memory else "refused by the compiler"
        cells = _words(values)
        table.add_row(*cells, f"{bound:.4g} s", decimal(round(size)), told)
        print(f"{', '.join(cells)}: {told}", flush=True)
        if plan.fits and (chosen is None or plan.estimate.total < chosen.estimate.total):
            chosen = plan
    Console(highlight=False, soft_wrap=True).print(table)
    if chosen is None:
        raise UserError(
            f"none of the {min(len(found), flag_values.compile)} best candidates fits: "
            f"compile more of the {len(found)} (--compile), or take more devices"
        )
    planner.print(chosen, _steps(chosen.config, flag_values.tokens))
    return 0


def _variants(config: ConfigDict, devices: int):
    """Meshes, micro-batches and remat policies to try, as {(node, key): value}."""
    axes = ("data", "fsdp", "tensor", "expert")
    divisors = [length for length in range(1, devices + 1) if devices % length == 0]
    experts = "num_experts" in config.model.feedforward
    for lengths in itertools.product(divisors, repeat=4):
        product = lengths[0] * lengths[1] * lengths[2] * lengths[3]
        if product != devices or lengths[2] > 8 or (lengths[3] > 1 and not experts):
            continue
        for accumulation, remat in itertools.product((1, 2, 4, 8, 16, 32), REMATS):
            yield {
                **{("mesh", axis): length for axis, length in zip(axes, lengths, strict=True)},
                ("train", "accumulation"): accumulation,
                ("model", "remat"): remat,
            }


def _preference(values) -> tuple:
    return (
        values["mesh", "tensor"],
        values["train", "accumulation"],
        values["mesh", "expert"],
        values["mesh", "fsdp"],
    )


def _words(values) -> tuple[str, str, str]:
    mesh = ", ".join(f"{key} {v}" for (node, key), v in values.items() if node == "mesh" and v > 1)
    return mesh or "one device", str(values["train", "accumulation"]), values["model", "remat"]


def _steps(config: ConfigDict, tokens: float) -> int:
    per_step = config.train.batch_size * config.data.row_length
    return max(1, round(tokens / per_step)) if tokens else config.train.steps


def _vocab_size(config: ConfigDict, given: int) -> int:
    """Ids of the config's tokenizer, of which no text is read."""
    from nag_jax.kinds import kind_class

    if given:
        return given
    kind = kind_class("data.tokenizer", config.data.tokenizer.kind)
    if "vocab_size" in config.data.tokenizer:
        return config.data.tokenizer.vocab_size
    try:
        return kind.from_config(config.data.tokenizer, ()).vocab_size
    except UserError as error:
        raise UserError(f"{error}; or say how many ids it has by --vocab_size") from error


if __name__ == "__main__":
    cli.run(main)
