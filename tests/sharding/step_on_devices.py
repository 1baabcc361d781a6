"""Runs one optimizer step on this process's devices and checks it against one device.

Started by `test_step_on_devices` with eight simulated devices.
"""

import sys

import jax
import numpy as np
from ml_collections import ConfigDict
from small_models import quick_compilation, small_config

from nag_jax.models.transformer import build_model
from nag_jax.optim import build_optimizer
from nag_jax.parameters import flatten
from nag_jax.sharding.mesh import make_mesh
from nag_jax.training.state import abstract_state, initialise
from nag_jax.training.step import jit_train_step, train_step

VOCAB, LENGTH, ROWS = 50, 104, 16


def ragged_batch(lengths):
    """Rows with the given numbers of valid targets."""
    rng = np.random.default_rng(0)
    valid = np.arange(LENGTH + 1)[None, :] < np.asarray(lengths)[:, None] + 1
    tokens = np.where(valid, rng.integers(0, VOCAB, valid.shape), 0).astype(np.int32)
    segment_ids = np.where(valid, 1 + (np.arange(LENGTH + 1) >= 7), 0).astype(np.int32)
    return {"tokens": tokens, "segment_ids": segment_ids, "valid": valid}


# Alternating rows give every device and micro-batch equally many targets; sorted ones do not, and
# would show a mean of means.
BATCHES = {
    "alternating": ragged_batch([11, 101] * 8),
    "sorted": ragged_batch([11] * 8 + [101] * 8),
}


class Stepper:
    """A compiled step on a mesh, from the same start each time (that of the first)."""

    def __init__(self, connection, mesh_shape, accumulation, start=None):
        config = small_config(
            {
                "optimizer.kind": "adamw",
                # Adam divides by the gradient's own size: a floor well above rounding keeps the
                # comparison of parameters about the gradient.
                "optimizer.adam_eps": 1e-3,
                "optimizer.learning_rate": 0.05,
                "optimizer.schedule.kind": "constant",
                "optimizer.schedule.warmup_steps": 0,
            },
            connection__kind=connection,
            d_model=64,
            feedforward__hidden=96,
            attention__query_chunk=32,
            loss_chunk=50,
        )
        model = build_model(config, VOCAB)
        optimizer, schedule = build_optimizer(config.optimizer, 10, model.infos)
        devices = jax.devices()[: int(np.prod(mesh_shape))]
        shape = dict(zip(("data", "fsdp"), mesh_shape, strict=True))
        self.mesh = make_mesh(ConfigDict(shape), devices)
        function = train_step(
            model,
            optimizer,
            schedule,
            accumulation=accumulation,
            taps=True,
            skip_not_finite=False,
        )
        self.step = jit_train_step(function, model, optimizer, self.mesh)
        abstract = abstract_state(model, optimizer, self.mesh)
        self.shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        start = start or initialise(model, optimizer, 0, self.mesh)
        self.start = jax.tree.map(np.asarray, start)

    def __call__(self, batch):
        """(metrics, flat parameters after the step, the state on its devices)."""
        with jax.set_mesh(self.mesh):
            state, metrics = self.step(jax.device_put(self.start, self.shardings), batch)
        return (
            flatten(jax.tree.map(np.asarray, metrics)),
            flatten(jax.tree.map(np.asarray, state.params)),
            state,
        )


def compare(got, expected, start, where):
    """Every metric to 1e-5, and each leaf's change to 1e-3 of its largest entry."""
    metrics, params = got
    expected_metrics, expected_params = expected
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(
            metrics[name], value, rtol=1e-5, atol=1e-9, err_msg=f"{where} {name}"
        )
    for path, value in expected_params.items():
        moved = np.abs(value - start[path]).max()
        assert moved > 0, path
        np.testing.assert_allclose(
            params[path], value, rtol=0, atol=1e-3 * moved + 3e-7, err_msg=f"{where} {path}"
        )


def check_bytes(state, fsdp, where):
    """Each device holds at most 1.1 times its share of parameters and optimizer state."""
    for name, tree in (("params", state.params), ("opt_state", state.opt_state)):
        leaves = jax.tree.leaves(tree)
        total = sum(leaf.nbytes for leaf in leaves)
        for device in state.step.devices():
            held = sum(
                shard.data.nbytes
                for leaf in leaves
                for shard in leaf.addressable_shards
                if shard.device == device
            )
            assert held <= 1.1 * total / fsdp, (where, name, held, total)


MESHES = {  # (data, fsdp), accumulation
    "nag": [((8, 1), 2), ((4, 2), 1), ((2, 4), 2)],
    "prenorm": [((1, 1), 2), ((2, 4), 1)],
}


def main(connection):
    reference = Stepper(connection, (1, 1), 1)
    expected = {name: reference(batch)[:2] for name, batch in BATCHES.items()}
    # Each batch has 16 * 56 targets, of which the metrics know.
    assert all(metrics["tokens"] == 896 for metrics, _ in expected.values())
    start = flatten(reference.start.params)
    for mesh_shape, accumulation in MESHES[connection]:
        stepper = Stepper(connection, mesh_shape, accumulation, reference.start)
        for name, batch in BATCHES.items():
            metrics, params, state = stepper(batch)
            where = f"mesh {mesh_shape}, accumulation {accumulation}, {name}:"
            compare((metrics, params), expected[name], start, where)
        check_bytes(state, mesh_shape[1], where)
    print("metrics:", sorted(expected["sorted"][0]))


if __name__ == "__main__":
    with quick_compilation():
        main(sys.argv[1])
