"""Runs one optimizer step on this process's devices and checks it against one device.

Started by `test_step_on_devices` with eight simulated devices.
"""

import dataclasses
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from small_models import quick_compilation, small_config

from nag_jax.models import kept_rows
from nag_jax.models.moe import MixtureOfExperts
from nag_jax.models.skipping import ThresholdSkipping
from nag_jax.models.transformer import build_model, skipping_part, with_thresholds
from nag_jax.optim import build_optimizer
from nag_jax.parameters import flatten
from nag_jax.sharding.mesh import make_mesh
from nag_jax.sharding.rules import MESH_AXES
from nag_jax.training.state import abstract_state, initialise
from nag_jax.training.step import jit_train_step, train_step

VOCAB, LENGTH = 50, 104

# Probabilities of routers, or a score and its threshold, that lie nearer may change places by
# rounding.
SMALLEST_GAP = 1e-6


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


# Names of feed-forward kinds with what they need of the config.
FEEDFORWARDS = {
    "swiglu": {"hidden": 256},
    "moe": {"hidden": 32, "num_experts": (8,), "top_k": (2,)},
}


class Kinds(NamedTuple):
    """The kinds of a model's parts."""

    connection: str
    attention: str
    feedforward: str
    skipping: str = "none"


# Of a model that skips: half of the run is done, so that the target is its rate.
SKIPPING = {"skipping__rate": 0.4, "skipping__threshold_rate": 0.5}
STEPS = 10


class Stepper:
    """A compiled step on a mesh, from the same start each time (that of the first)."""

    def __init__(self, kinds, mesh_shape, accumulation, start=None):
        connection, attention, feedforward, skipping = kinds
        self.config = small_config(
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
            attention__kind=attention,
            attention__num_heads=4,
            attention__num_kv_heads=2,
            feedforward__kind=feedforward,
            d_model=64,
            attention__query_chunk=32,
            loss_chunk=12,
            vocab_multiple=8,
            **{f"feedforward__{k}": value for k, value in FEEDFORWARDS[feedforward].items()},
            skipping__kind=skipping,
            **(SKIPPING if skipping == "threshold" else {}),
        )
        self.model = model = build_model(self.config, VOCAB)
        optimizer, schedule = build_optimizer(self.config.optimizer, STEPS, model.infos)
        devices = jax.devices()[: int(np.prod(mesh_shape))]
        self.mesh = make_mesh(ConfigDict(dict(zip(MESH_AXES, mesh_shape, strict=True))), devices)
        function = train_step(
            model,
            optimizer,
            schedule,
            steps=STEPS,
            accumulation=accumulation,
            taps=True,
            skip_not_finite=False,
        )
        self.step = jit_train_step(function, model, optimizer, self.mesh)
        abstract = abstract_state(model, optimizer, self.mesh)
        self.shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        if start is None:
            start = jax.tree.map(np.asarray, initialise(model, optimizer, 0, self.mesh))
            if skipping == "threshold":
                start = dataclasses.replace(start, step=np.int32(STEPS // 2))
                start = dataclasses.replace(start, balance=thresholds_in_gaps(model, start))
        self.start = start

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


def split_of(info, mesh):
    """How often a leaf is to be split along each axis, written out apart from the rules."""
    of_tensor = ("heads", "kv_heads", "hidden", "vocabulary")
    lengths = dict(mesh.shape)
    split = []
    for axis, length in zip(info.axes, info.shape, strict=True):
        ways = 1
        if axis == "embed":
            ways = lengths["fsdp"] * (1 if "expert" in info.axes else lengths["expert"])
        elif axis in of_tensor and length % lengths["tensor"] == 0:
            ways = lengths["tensor"]
        elif axis == "expert":
            ways = lengths["expert"]
        split.append(ways)
    return tuple(split)


def check_bytes(stepper, state, where):
    """Large leaves are divided by every axis but data; a device holds at most 1.1 of its share."""
    mesh = stepper.mesh
    shards = mesh.size // mesh.shape["data"]
    infos = flatten(stepper.model.infos)
    for path, leaf in flatten(state.params).items():
        split = split_of(infos[path], mesh)
        expected = tuple(n // ways for n, ways in zip(leaf.shape, split, strict=True))
        assert leaf.sharding.shard_shape(leaf.shape) == expected, (where, path)
        if infos[path].role in ("matrix", "embedding"):
            whole = "kv_heads" in infos[path].axes and mesh.shape["tensor"] > 2
            assert np.prod(split) == shards // (mesh.shape["tensor"] if whole else 1), path
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
            assert held <= 1.1 * total / shards, (where, name, held * shards / total)


def check_routing(stepper, batch):
    """In every block each token's k-th and (k+1)-th scores are further apart than rounding errs."""
    found = []
    choose = MixtureOfExperts._choose

    def watched(self, probabilities, bias):
        scores = jax.lax.top_k(probabilities + bias, self.top_k + 1)[0]
        gap = jnp.min(scores[..., -2] - scores[..., -1])
        jax.debug.callback(lambda gap: found.append(float(gap)), gap)
        return choose(self, probabilities, bias)

    MixtureOfExperts._choose = watched
    try:
        model, start = stepper.model, stepper.start
        jax.block_until_ready(
            model.evaluate_batch(start.params, batch, start.age, False, start.balance)
        )
        jax.effects_barrier()
    finally:
        MixtureOfExperts._choose = choose
    assert len(found) == stepper.config.model.num_blocks and min(found) > SMALLEST_GAP, found


def scores_of(model, start, balance):
    """Scores of the tokens of both batches, [layers, tokens], and each's distance to its threshold.

    Padding is left out: its scores are one number up to rounding, and nobody reads it.
    """
    decide, found = ThresholdSkipping.decide, []

    def watched(self, gate, score, threshold):
        jax.debug.callback(lambda *x: found.append(x), score, threshold, ordered=True)
        return decide(self, gate, score, threshold)

    scores, thresholds = [], []
    ThresholdSkipping.decide = watched
    try:
        for batch in BATCHES.values():
            found.clear()
            jax.block_until_ready(
                model.evaluate_batch(start.params, batch, start.age, False, balance)
            )
            jax.effects_barrier()
            scores.append([np.asarray(score)[batch["valid"][:, :-1]] for score, _ in found])
            thresholds = np.array([threshold for _, threshold in found])
    finally:
        ThresholdSkipping.decide = decide
    scores = np.concatenate(scores, axis=1)
    return scores, np.abs(scores - thresholds[:, None])


def thresholds_in_gaps(model, start):
    """The balance with thresholds below which about 40 % of tokens lie, and none is near.

    One layer after the other, since what one skips moves the scores of those behind it.
    """
    balance = jax.tree.map(np.array, start.balance)
    names = list(model.skipping.sublayers)
    for layer in range(len(names) * model.options.num_blocks):
        repeat, offset = divmod(layer, len(names))
        scores = np.sort(scores_of(model, start, balance)[0][layer])
        part = scores[int(0.37 * len(scores)) : int(0.43 * len(scores))]
        at = np.argmax(np.diff(part))
        thresholds = skipping_part(balance)
        thresholds["stage_0"]["blocks"][names[offset]][repeat] = (part[at] + part[at + 1]) / 2
        balance = with_thresholds(balance, thresholds)
    return balance


def check_skipping(stepper):
    """No token's score is near its threshold."""
    _, margins = scores_of(stepper.model, stepper.start, stepper.start.balance)
    assert margins.min() > 10 * SMALLEST_GAP, margins.min()


# What is run by each name: the kinds, and meshes (data, fsdp, tensor, expert) with the number of
# micro-batches.
PAPER_MESHES = [
    ((8, 1, 1, 1), 2),
    ((1, 4, 2, 1), 2),
    ((2, 1, 2, 2), 1),
    ((2, 1, 1, 4), 1),
    ((1, 1, 1, 8), 1),
]
CASES = {
    "nag": (Kinds("nag", "ccgqa", "moe"), [((1, 2, 2, 2), 2)]),
    # In the second mesh fewer key-value heads than devices that share heads.
    "prenorm": (Kinds("prenorm", "gqa", "swiglu"), [((1, 1, 1, 1), 2), ((2, 1, 4, 1), 1)]),
    "nag_skips": (
        Kinds("nag", "ccgqa", "moe", "threshold"),
        [((8, 1, 1, 1), 2), ((1, 2, 2, 2), 1)],
    ),
    "gated_prenorm_skips": (
        Kinds("gated_prenorm", "gqa", "swiglu", "threshold"),
        [((2, 1, 4, 1), 2), ((1, 4, 1, 2), 1)],
    ),
} | {
    f"{connection}_ccgqa_moe": (Kinds(connection, "ccgqa", "moe"), PAPER_MESHES)
    for connection in ("nag", "prenorm", "residual_free")
}


def main(case):
    kinds, meshes = CASES[case]
    kept_rows.EIGHTHS = (0, 4, 5, 8)  # a shorter ladder compiles faster
    reference = Stepper(kinds, (1, 1, 1, 1), 1)
    expected = {name: reference(batch)[:2] for name, batch in BATCHES.items()}
    if kinds.feedforward == "moe":
        for batch in BATCHES.values():
            check_routing(reference, batch)
    if kinds.skipping == "threshold":
        check_skipping(reference)
        for metrics, _ in expected.values():
            assert np.all(np.abs(metrics["taps/skipped"] - 0.4) < 0.1), metrics["taps/skipped"]
    # Each batch has 16 * 56 targets, of which the metrics know.
    assert all(metrics["tokens"] == 896 for metrics, _ in expected.values())
    start = flatten(reference.start.params)
    for mesh_shape, accumulation in meshes:
        stepper = Stepper(kinds, mesh_shape, accumulation, reference.start)
        for name, batch in BATCHES.items():
            metrics, params, state = stepper(batch)
            where = f"mesh {mesh_shape}, accumulation {accumulation}, {name}:"
            compare((metrics, params), expected[name], start, where)
        check_bytes(stepper, state, where)
        print("agrees:", mesh_shape)
    print("metrics:", sorted(expected["sorted"][0]))


if __name__ == "__main__":
    with quick_compilation():
        main(sys.argv[1])
