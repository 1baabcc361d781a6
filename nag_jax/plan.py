"""What a configuration costs on devices that you do not have: fit, time, and what is sent.

  python -m nag_jax.plan --config=configs/papers/nag.py:ratio=60 --topology=v5e:4x4 \\
      --config.mesh.fsdp=16 --config.mesh.data=1 --tokens=50e9

Compiles the whole training step for the topology with nothing attached (TPU needs libtpu, GPU the
CUDA plugin and ptxas) and prints parameters, FLOPs, memory, collectives and a roofline estimate.
--search tries micro-batches, remat policies and meshes, ranks them by the estimate, compiles the
best (--compile=0: none) and prints the fastest that fits. --step=evaluate and --step=decode do the
same for a batch of evaluation, and for one token of --batch_size rows with --context tokens each.
--places=20 lists where a TPU program spends its time by the compiler's own estimates.
"""

from typing import Any

from absl import flags
from ml_collections import ConfigDict

from nag_jax import cli
from nag_jax.errors import UserError

_TOPOLOGY = flags.DEFINE_string("topology", None, "chip and shape, such as v5e:4x4 or h200:8")
_STEP = flags.DEFINE_enum("step", "train", ["train", "evaluate", "decode"], "what is compiled")
_TOKENS = flags.DEFINE_float("tokens", 0, "token budget of training; 0: the config's steps")
_BATCH = flags.DEFINE_integer("batch_size", 1, "rows that decode together")
_CONTEXT = flags.DEFINE_integer("context", 0, "tokens of a decoded row; 0: data.row_length")
_VOCAB = flags.DEFINE_integer("vocab_size", 0, "ids, if the tokenizer's file is not at hand")
_SEARCH = flags.DEFINE_bool("search", False, "find the fastest way to train that fits")
_COMPILE = flags.DEFINE_integer("compile", 3, "most that --search compiles; 0: estimates alone")
_PLACES = flags.DEFINE_integer("places", 0, "slowest places of a TPU program to list")
flags.mark_flag_as_required("topology")

# Flags that only one of the steps reads.
_OF_STEP = {"tokens": "train", "search": "train", "batch_size": "decode", "context": "decode"}


def main(config: ConfigDict, flag_values: flags.FlagValues) -> int:
    """Plans one configuration, or searches."""
    import jax

    from nag_jax.sharding.topologies import parse_topology

    _check(config, flag_values)
    chip, shape = parse_topology(flag_values.topology)
    jax.config.update("jax_platforms", "cpu")  # nothing is looked for or held
    if chip == "cpu":
        jax.config.update("jax_num_cpu_devices", shape[0])

    from nag_jax.planning.plans import Target, make_plan
    from nag_jax.planning.report import print_report
    from nag_jax.planning.search import search

    target = Target.of(flag_values.topology)
    if not flag_values.search:
        target.mesh(config)  # is refused before anything is built
    step = _step(config, flag_values)
    if flag_values.search:
        plan = search(step, target, flag_values.compile)
        if plan is None:
            return 0
    else:
        plan = make_plan(step, target)
    training = flag_values.step == "train"
    steps = _steps(plan.step.config, flag_values.tokens) if training else None
    print_report(plan, target, steps, flag_values.places)
    return cli.FAILED if plan.fits is False or plan.why_not else 0


def _check(config: ConfigDict, flag_values: flags.FlagValues) -> None:
    """Refuses flags that say nothing, or nothing possible.

    Raises:
        UserError: One sentence naming the flag.
    """
    for name, step in _OF_STEP.items():
        if flag_values[name].present and flag_values.step != step:
            raise UserError(f"--{name} goes with --step={step}, not with --step={flag_values.step}")
    if flag_values.compile < 0 or (flag_values["compile"].present and not flag_values.search):
        raise UserError(
            f"--compile={flag_values.compile}: it must be at least 0, and goes with --search"
        )
    if not 0 <= flag_values.tokens < float("inf"):
        raise UserError(f"--tokens={flag_values.tokens}: it must be above 0, such as 50e9")
    if flag_values.batch_size < 1:
        raise UserError(f"--batch_size={flag_values.batch_size}: it must be at least 1")
    if flag_values.vocab_size < 0:
        raise UserError(f"--vocab_size={flag_values.vocab_size}: it must be above 0")
    tpu = flag_values.topology.startswith(("v", "tpu"))
    compiled = not flag_values.search or flag_values.compile > 0
    if flag_values.places < 0 or (flag_values.places and not (tpu and compiled)):
        raise UserError(
            f"--places={flag_values.places}: it must be at least 0, and goes with a TPU and a "
            "program that is compiled"
        )
    length = config.data.row_length
    if not 0 <= flag_values.context <= length:
        raise UserError(
            f"--context={flag_values.context}: the model's context holds 1 to {length} tokens "
            "(data.row_length)"
        )


def _step(config: ConfigDict, flag_values: flags.FlagValues) -> Any:
    """What is to be planned."""
    from nag_jax.models.transformer import build_model
    from nag_jax.planning.steps import DecodingStep, EvaluationStep, TrainingStep

    vocab_size = _vocab_size(config, flag_values.vocab_size)
    if flag_values.step == "train":
        return TrainingStep.of(config, vocab_size)
    model = build_model(config, vocab_size)
    if flag_values.step == "evaluate":
        return EvaluationStep(config, model)
    context = flag_values.context or config.data.row_length
    return DecodingStep(config, model, flag_values.batch_size, context)


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
