"""Saves a run on one mesh and reads it on others; started by `test_runs` with eight devices."""

import tempfile
import types

import jax
import numpy as np
from ml_collections import ConfigDict
from small_models import quick_compilation, small_config

import nag_jax
from nag_jax import config as config_lib
from nag_jax.data.tokenizers import ByteTokenizer
from nag_jax.models.transformer import build_model
from nag_jax.optim import build_optimizer
from nag_jax.sharding.mesh import make_mesh
from nag_jax.training import start
from nag_jax.training.checkpoints import CheckpointReader, Checkpoints, folder_documents
from nag_jax.training.state import abstract_state, initialise


def mesh_of(data, fsdp):
    options = ConfigDict({"data": data, "fsdp": fsdp, "tensor": 1, "expert": 1})
    return make_mesh(options, jax.devices()[: data * fsdp])


def assert_equal(tree, expected):
    for got, value in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(got), value)


def assert_divided(tree, fsdp):
    """Each device holds at most 1.1 times its share of the bytes."""
    leaves = jax.tree.leaves(tree)
    total = sum(leaf.nbytes for leaf in leaves)
    for device in jax.tree.leaves(tree)[0].sharding.device_set:
        held = sum(
            shard.data.nbytes
            for leaf in leaves
            for shard in leaf.addressable_shards
            if shard.device == device
        )
        assert held <= 1.1 * total / fsdp, (held, total, fsdp)


def main(folder):
    config = small_config(
        {"optimizer.kind": "muon", "data.tokenizer.kind": "bytes"},
        d_model=64,
        num_blocks=1,
    )
    model = build_model(config, ByteTokenizer.vocab_size)
    optimizer, _ = build_optimizer(config.optimizer, 300, model.infos)
    state = initialise(model, optimizer, 0, mesh_of(4, 2))
    # The optimizer starts at zero; numbers that differ show what comes back.
    opt_state = jax.jit(
        lambda tree: jax.tree.map(
            lambda leaf: leaf + np.arange(leaf.size).reshape(leaf.shape).astype(leaf.dtype), tree
        ),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, state.opt_state),
    )(state.opt_state)
    items = {"params": state.params, "opt_state": opt_state, "balance": {}}
    expected = jax.tree.map(np.asarray, items)
    with tempfile.TemporaryDirectory() as tokenizer:
        ByteTokenizer().save(tokenizer)
        documents = folder_documents(tokenizer, start.TOKENIZER_FOLDER)
    documents[start.CONFIG_FILE] = config_lib.to_json(config)
    rows = types.SimpleNamespace(fingerprint="x", corpus_fingerprint="y")
    documents[start.POSITION_FILE] = start.Position(5, 8, 5).to_json(rows)
    checkpoints = Checkpoints(folder, keep_last=1)
    checkpoints.save(5, items, documents, None)
    checkpoints.close()

    reference = nag_jax.load_run(folder)
    assert reference.step == 5
    assert_equal(reference.params, expected["params"])
    assert {len(leaf.devices()) for leaf in jax.tree.leaves(reference.params)} == {1}
    for shape in ((4, 2), (2, 4), (1, 8)):
        mesh = mesh_of(*shape)
        run = nag_jax.load_run(folder, mesh=mesh)
        assert_equal(run.params, expected["params"])
        assert_divided(run.params, shape[1])
        abstract = abstract_state(model, optimizer, mesh)
        _, whole = CheckpointReader(folder).restore(
            None, {item: getattr(abstract, item) for item in items}
        )
        assert_equal(whole, expected)
        assert_divided(whole["params"], shape[1])
        assert_divided(whole["opt_state"], shape[1])
        if shape == (2, 4):
            bits = reference.bits_per_byte(["some text"])
            np.testing.assert_allclose(run.bits_per_byte(["some text"]), bits, rtol=1e-5)
    print("all meshes agree")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch, quick_compilation():
        main(scratch)
