"""Whole training steps compiled for slices of TPU that are not there, fused kernels inside."""

from pathlib import Path

import pytest
from compile_targets import skip_without_compiler

from nag_jax.config import load_config_file, resolve
from nag_jax.planning.plans import Target, make_plan
from nag_jax.planning.steps import TrainingStep

pytestmark = pytest.mark.absent_device

REPOSITORY = Path(__file__).parents[2]


def planned(path, topology, vocab_size, **changes):
    """The plan of a config file with changes, "__" for the dot."""
    with skip_without_compiler():
        target = Target.of(topology)
    config = resolve(
        load_config_file(f"{REPOSITORY}/{path}"),
        [f"{key.replace('__', '.')}={value}" for key, value in changes.items()],
    )
    return make_plan(TrainingStep.of(config, vocab_size), target)


@pytest.mark.parametrize("topology, mesh", [("v5e:2x2", 4), ("v5e:4x4", 16)])
def test_a_small_models_step_has_the_kernels_inside(topology, mesh):
    plan = planned(
        "configs/nag_small.py", topology, 8192,
        model__strict_kernels=True, model__compute_dtype="bfloat16",
        mesh__data=1, mesh__fsdp=mesh, train__batch_size=32, evaluation__batch_size=32,
    )  # fmt: skip
    assert plan.fits
    assert {"nag_update_forward", "nag_update_backward"} <= set(plan.kernels)


@pytest.mark.parametrize("topology, mesh", [("v5e:2x2", 4), ("v5e:4x4", 16)])
def test_a_step_of_the_papers_model_has_the_kernels_inside(topology, mesh):
    """P1's model at ratio 60 with two of its blocks: the rest are compiled once all the same."""
    plan = planned(
        "configs/papers/nag.py:ratio=60", topology, 50257,
        model__num_blocks=2, mesh__data=1, mesh__fsdp=mesh, train__accumulation=32,
    )  # fmt: skip
    assert plan.fits
    assert {"nag_update_forward", "nag_update_backward"} <= set(plan.kernels)
    assert all(one.times is not None for one in plan.collectives)
