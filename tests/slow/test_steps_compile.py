"""Whole training steps compiled for slices of TPU that are not there, fused kernels inside."""

from pathlib import Path

import pytest
from compile_targets import skip_without_compiler

from nag_jax.config import load_config_file, resolve
from nag_jax.planning.plans import Target, make_plan
from nag_jax.planning.steps import TrainingStep

pytestmark = pytest.mark.absent_device

REPOSITORY = Path(__file__).parents[2]
PASSES = ("forward", "backward")


def planned(path, topology, vocab_size, **changes):
    """The plan of a config file with changes, "__" for the dot."""
    with skip_without_compiler():
        target = Target.of(topology)
    config = resolve(
        load_config_file(f"{REPOSITORY}/{path}"),
        [f"{key.replace('__', '.')}={value}" for key, value in changes.items()],
    )
    return make_plan(TrainingStep.of(config, vocab_size), target)


def test_a_small_models_step_has_the_kernels_inside():
    plan = planned(
        "configs/nag_small.py", "v5e:2x2", 8192,
        model__strict_kernels=True, model__compute_dtype="bfloat16",
        mesh__data=1, mesh__fsdp=4, train__batch_size=32, evaluation__batch_size=32,
    )  # fmt: skip
    assert plan.fits
    assert {"nag_update_forward", "nag_update_backward"} <= set(plan.kernels)


def test_a_step_of_the_papers_model_has_the_kernels_inside():
    """P1's model at ratio 60 with the first of the five blocks that it repeats: one is compiled."""
    plan = planned(
        "configs/papers/nag.py:ratio=60", "v5e:4x4", 32000,
        model__num_blocks=2, model__feedforward__num_experts=(8,), model__feedforward__top_k=(1,),
        mesh__data=1, mesh__fsdp=16, train__accumulation=16,
    )  # fmt: skip
    assert plan.fits
    kernels = {f"{name}_{way}" for name in ("nag_update", "ccgqa_mixing") for way in PASSES}
    assert kernels <= set(plan.kernels)
    assert all(one.times is not None for one in plan.collectives)
