"""A model's compiled training step as a call, for benchmarks that compare whole steps."""

from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from timing import temporaries

from nag_jax import config as config_lib
from nag_jax.models.transformer import build_model
from nag_jax.optim import build_optimizer
from nag_jax.sharding.mesh import single_device_mesh
from nag_jax.training.state import initialise
from nag_jax.training.step import jit_train_step, train_step


def derived(config: ConfigDict, length: int, **model: Any) -> ConfigDict:
    """The config's model with these parts instead, AdamW at a constant rate, rows of `length`."""
    own = {
        name: value.to_dict() if isinstance(value, ConfigDict) else value
        for name, value in config.model.items()
    }
    return config_lib.resolve(
        {
            "data": {"row_length": length},
            "model": own | model,
            "optimizer": {"kind": "adamw", "schedule": {"kind": "constant"}},
        }
    )


def random_batch(rows: int, length: int, vocabulary: int) -> dict[str, np.ndarray]:
    """Rows of one document each."""
    shape = (rows, length + 1)
    tokens = np.random.default_rng(0).integers(0, vocabulary, shape, np.int32)
    return {
        "tokens": tokens,
        "segment_ids": np.ones(shape, np.int32),
        "valid": np.ones(shape, bool),
    }


class Stepper:
    """Takes a step on each call, from an initial state on.

    Attributes:
        model: The model.
        state: The state after the last call.
        temporaries: Bytes that the program needs besides its inputs and outputs.
    """

    def __init__(self, config: ConfigDict, batch: dict[str, np.ndarray], vocabulary: int):
        self.model = build_model(config, vocabulary)
        optimizer, schedule = build_optimizer(
            config.optimizer, config.train.steps, self.model.infos
        )
        mesh = single_device_mesh()
        function = train_step(
            self.model,
            optimizer,
            schedule,
            steps=config.train.steps,
            accumulation=1,
            taps=False,
            skip_not_finite=False,
        )
        self.state, self.batch = initialise(self.model, optimizer, config.seed, mesh), batch
        with jax.set_mesh(mesh):
            step = jit_train_step(function, self.model, optimizer, mesh)
            self._compiled = step.lower(self.state, batch).compile()
        self.temporaries = temporaries(self._compiled)

    def __call__(self) -> dict[str, Any]:
        self.state, metrics = self._compiled(self.state, self.batch)
        return metrics
