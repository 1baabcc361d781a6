"""A whole training step with experts on four devices each, compiled for TPU and GPU.

Without libtpu or the CUDA plugin these tests skip. They compile for a minute or more.
"""

import re

import jax
import pytest
from compile_targets import gpu_mesh, tpu_mesh

from nag_jax.config import resolve
from nag_jax.models.transformer import build_model
from nag_jax.optim import build_optimizer
from nag_jax.sharding.rules import batch_sharding
from nag_jax.training.state import abstract_state
from nag_jax.training.step import jit_train_step, train_step

pytestmark = pytest.mark.absent_device


def compile_step(mesh, implementation):
    """A whole training step of NAG, CCGQA and experts under Muon, in bfloat16, 16 rows."""
    config = resolve(
        {
            "data.row_length": 256,
            "model.compute_dtype": "bfloat16",
            "model.num_blocks": 2,
            "model.attention.kind": "ccgqa",
            "model.attention.implementation": "chunked",  # cuDNN may not be installed
            "model.feedforward.kind": "moe",
            "model.feedforward.hidden": 256,
            "model.feedforward.num_experts": (8,),
            "model.feedforward.top_k": (2,),
            "model.feedforward.implementation": implementation,
            "optimizer.kind": "muon",
        }
    )
    model = build_model(config, 4096)
    optimizer, schedule = build_optimizer(config.optimizer, 100, model.infos)
    function = train_step(
        model,
        optimizer,
        schedule,
        steps=config.train.steps,
        accumulation=1,
        taps=True,
        skip_not_finite=True,
    )
    state = abstract_state(model, optimizer, mesh)
    shape, sharding = (16, config.data.row_length + 1), batch_sharding(mesh)
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for name, dtype in (("tokens", "int32"), ("segment_ids", "int32"), ("valid", "bool"))
    }
    step = jit_train_step(function, model, optimizer, mesh)
    with jax.set_mesh(mesh):
        return step.lower(state, batch).compile()


@pytest.mark.parametrize("target", ["tpu", "gpu"])
def test_step_with_experts_on_four_devices_compiles(target):
    """Forward, recomputation and backward exchange rows; the state is split as it is stored."""
    if target == "tpu":
        compiled = compile_step(tpu_mesh("v5e:4x4", (2, 2, 1, 4)), "auto")
    else:
        compiled = compile_step(gpu_mesh(8, (1, 2, 1, 4)), "blocked")
    assert len(re.findall(r" ragged-all-to-all(?:-start)?\(", compiled.as_text())) >= 4
