"""The outside package of `examples/`: its parts' definitions, and its use from the command line."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict
from run_helpers import REPOSITORY
from use_helpers import call, call_process

import nag_jax
from nag_jax.errors import UserError
from nag_jax.models.context import BranchOut, Context, positions_in_document
from nag_jax.models.initialisation import FanIn
from nag_jax.models.linear import Numerics

EXAMPLES = REPOSITORY / "examples"
KINDS = [
    "--config.model.attention.kind=own_parts.parts:LinearAttention",
    "--config.model.connection.kind=own_parts.parts:Highway",
]


@pytest.fixture
def parts(monkeypatch):
    """The example's module, importable as for a user who has its folder on the path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sys.modules.pop("own_parts", None)
    yield __import__("own_parts.parts").parts
    for name in ("own_parts", "own_parts.parts"):
        sys.modules.pop(name, None)


def test_linear_attention_is_its_definition(parts, x64):
    """Token by token in NumPy, documents of one row apart."""
    options = ConfigDict({"num_heads": 2, "head_dim": 3})
    module = parts.LinearAttention(
        options, 5, FanIn(ConfigDict()), Numerics("float64"), nnx.Rngs(params=jax.random.key(0))
    )
    x = np.random.default_rng(0).normal(size=(1, 7, 5))
    segment_ids = jnp.asarray([[1, 1, 1, 1, 2, 2, 0]])
    context = Context(
        segment_ids, positions_in_document(segment_ids), segment_ids > 0, jnp.ones(()), False
    )
    w = {name: np.asarray(getattr(module, name)[...]) for name in ("query", "key", "value")}
    q, k, v = (np.einsum("btd,dhe->bthe", x, w[name])[0] for name in w)
    q, k = (np.where(z > 0, z + 1, np.exp(z)) for z in (q, k))
    heads = np.zeros((7, 2, 3))
    for start, end in ((0, 4), (4, 6), (6, 7)):
        memory, total = np.zeros((2, 3, 3)), np.zeros((2, 3))
        for t in range(start, end):
            memory += np.einsum("hf,he->hfe", k[t], v[t])
            total += k[t]
            heads[t] = np.einsum("hf,hfe->he", q[t], memory) / np.sum(q[t] * total, -1)[:, None]
    expected = np.einsum("the,hed->td", heads, np.asarray(module.output[...]))
    np.testing.assert_allclose(module(x, None, context).y[0], expected, rtol=1e-7)


def test_highway_is_its_definition(parts, x64):
    connection = parts.Highway(
        ConfigDict(parts.Highway.defaults()), 4, 1, Numerics("float64"), nnx.Rngs(params=0)
    )
    rng = np.random.default_rng(1)
    r, y = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3, 4))
    w = rng.normal(size=4)
    connection.weight[...] = jnp.asarray(w)
    x = r / np.sqrt(np.mean(r**2, axis=-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(connection.read((r,)), x, rtol=1e-7)
    z = 1 / (1 + np.exp(1 - x @ w))
    written = connection.write((jnp.asarray(r),), BranchOut(jnp.asarray(y)), None, None)
    np.testing.assert_allclose(written.gain, z, rtol=1e-6)
    expected = (1 - z[..., None]) * r + z[..., None] * y
    np.testing.assert_allclose(written.stream[0], expected, rtol=1e-6)
    direction, log_norm = connection.describe((jnp.asarray(r),))
    np.testing.assert_allclose(direction * np.exp(log_norm)[..., None], r, rtol=1e-9)


@pytest.mark.slow
def test_all_contracts_hold(tiny_run):
    """As the documentation calls it, on four simulated devices."""
    done = call_process(
        tiny_run.place,
        "check",
        "--config=configs/nag_small.py:smoke",
        *KINDS,
        environment={"PYTHONPATH": f"{REPOSITORY}:{EXAMPLES}", "COLUMNS": "200"},
    )
    assert done.code == 0, done
    assert done.out.count("│ PASS │") == 7, done.out


@pytest.mark.slow
def test_they_train_and_generate(parts, tiny_run, tmp_path, cached_compilation):
    place = tiny_run.place
    workdir = tmp_path / "run"
    overrides = {
        "data.source.paths": f"{place.folder / 'corpus'}/*.txt,",
        "data.cache_folder": place.folder / "cache",
        "data.row_length": 16,
        "data.validation_bytes": 400,
        "data.tokenizer.kind": "bytes",
        "model.num_blocks": 1,
        "optimizer.kind": "adamw",
        "train.steps": 2,
        "train.peak_flops": 1e9,
        "metrics.tensorboard": False,
    }
    done = call(
        "train",
        f"--config={REPOSITORY}/configs/nag_small.py:smoke",
        f"--workdir={workdir}",
        *KINDS,
        *(f"--config.{key}={value}" for key, value in overrides.items()),
    )
    assert (done.code, done.err) == (0, ""), done
    assert "Probed causality and document isolation" in done.out
    with pytest.raises(UserError, match="own_parts.parts:.*allow_user_kinds"):
        nag_jax.load_run(workdir)
    run = nag_jax.load_run(workdir, allow_user_kinds=True)
    text = run.generate("ab", temperature=0, max_tokens=4)
    tokens = [run.tokenizer.bos_id, *run.tokenizer.encode("ab"), *text.tokens]
    logits = run.logits(tokens[:-1])
    assert tokens[3:] == list(np.argmax(logits[2:], axis=-1))
