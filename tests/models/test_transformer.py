"""What the assembled model must do: causality, isolation, remat, scan, taps, padding, bfloat16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_models import VOCAB, packed_batch, random_params, small_model

from nag_jax.models.blocks import Block, Carry, Layers
from nag_jax.models.context import Context, positions_in_document
from nag_jax.parameters import flatten
from nag_jax.validation import REMAT_POLICIES

CONNECTIONS = ("nag", "prenorm", "residual_free")
COMMON_TAPS = {"norm", "rotation", "gain"}
LAST = 10**6  # a step after every warm-up
LENGTH = 12
BATCH = packed_batch([[6, 7], [1, 9], [5]], LENGTH)


def compiled(taps=False, **keys):
    """(model, jitted function of parameters and batch), shared by the tests of this file."""
    defaults = {"connection__kind": "nag", "remat": "dots_with_no_batch_dims_saveable"}
    return _compiled(taps, **(defaults | keys))


@functools.cache
def _compiled(taps, **keys):
    model = small_model(**keys)

    def loss(params, batch):
        out = model.evaluate_batch(params, batch, LAST, taps)
        return out["nats"].sum(), out

    return model, jax.jit(jax.grad(loss, has_aux=True))


def evaluate(batch=BATCH, params=None, **keys):
    """(outputs, flat gradients of the summed loss), NumPy; parameters are random by default."""
    model, run = compiled(**keys)
    gradients, out = run(random_params(model) if params is None else params, batch)
    return jax.tree.map(np.asarray, out), {k: np.asarray(g) for k, g in flatten(gradients).items()}


def assert_same_gradients(a, b, tolerance=2e-5):
    for path in a.keys() | b.keys():
        np.testing.assert_allclose(
            a[path], b[path], atol=tolerance * max(np.abs(b[path]).max(), 1e-3), err_msg=path
        )


@pytest.mark.parametrize("connection", CONNECTIONS)
def test_causality_and_isolation(connection):
    """A token moves its own document's later outputs and nothing else, to the bit."""
    model = small_model(connection__kind=connection)
    params = random_params(model)
    segment_ids = BATCH["segment_ids"][:1]
    original = BATCH["tokens"][:1]
    logits = jax.jit(lambda tokens: model.logits(params, tokens, segment_ids, LAST))
    before = np.asarray(logits(original))
    for place, reach in ((2, range(2, 6)), (5, range(5, 6)), (6, range(6, 13)), (9, range(9, 13))):
        tokens = original.copy()
        tokens[0, place] = (tokens[0, place] + 1) % VOCAB
        changed = np.any(np.asarray(logits(tokens)) != before, axis=-1)[0]
        np.testing.assert_array_equal(np.flatnonzero(changed), list(reach))


def test_isolation_of_gradients():
    """Outputs of a row's second document have no gradient to the first one's embeddings."""
    model = small_model()
    params = random_params(model)

    def loss(embedding):
        module = model.module(params)
        start = Carry(module.ends.start(embedding), {}, {})
        end, _ = module.stage_0(start, context_of(BATCH), {})
        hidden, scale = module.ends.finish(end.stream)
        return jnp.sum(module.logits_of()(hidden, scale)[0, 6:] ** 2)

    embedding = params["table"]["rows"][BATCH["tokens"][:, :-1]]
    gradient = np.asarray(jax.jit(jax.grad(loss))(embedding))
    np.testing.assert_array_equal(gradient[0, :6], 0)
    np.testing.assert_array_equal(gradient[1:], 0)
    assert np.all(np.any(gradient[0, 6:] != 0, axis=-1))


def context_of(batch, taps=False):
    segment_ids = jnp.asarray(batch["segment_ids"][:, :-1])
    return Context(
        segment_ids,
        positions_in_document(segment_ids),
        jnp.asarray(batch["valid"][:, 1:]),
        jnp.ones(()),
        taps,
    )


@pytest.mark.parametrize("connection", CONNECTIONS)
def test_packed_documents_equal_each_alone(connection):
    """Losses of documents in one row equal those of rows of their own; so do the gradients."""
    sizes, starts = (5, 2, 6), (0, 5, 7)
    packed, alone = (
        packed_batch([sizes, [], []], LENGTH),
        packed_batch([[n] for n in sizes], LENGTH),
    )
    for row, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        alone["tokens"][row, :size] = packed["tokens"][0, start : start + size]
    # The first token of a document is predicted from the one before: not alone.
    packed["valid"][0, list(starts)] = False
    together, gradients = evaluate(packed, connection__kind=connection)
    apart, gradients_apart = evaluate(alone, connection__kind=connection)
    for row, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        np.testing.assert_allclose(
            together["nats"][0, start : start + size - 1],
            apart["nats"][row, : size - 1],
            rtol=1e-5,
            atol=1e-6,
        )
    assert_same_gradients(gradients, gradients_apart)


def test_positions_start_anew_in_each_document():
    segment_ids = jnp.asarray([[1, 1, 1, 2, 2, 3, 0, 0], [1, 2, 3, 3, 3, 3, 4, 4]])
    expected = [[0, 1, 2, 0, 1, 0, 0, 1], [0, 0, 0, 1, 2, 3, 0, 1]]
    np.testing.assert_array_equal(positions_in_document(segment_ids), expected)


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(policy, marks=[] if policy == "dots_saveable" else [pytest.mark.slow])
        for policy in sorted(set(REMAT_POLICIES) - {"none"})
    ],
)
def test_remat_policies_agree(policy):
    """Every policy gives the loss, gradients and taps of keeping everything."""
    out, gradients = evaluate(remat=policy, taps=True)
    expected, expected_gradients = evaluate(remat="none", taps=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), out, expected)
    assert_same_gradients(gradients, expected_gradients)


@pytest.mark.slow
def test_remat_saves_memory():
    """Keeping nothing needs less temporary memory than keeping everything, at a depth of 8."""
    batch = packed_batch([[129]] * 2, 128)
    sizes = {}
    for policy in ("none", "nothing_saveable"):
        model, run = compiled(remat=policy, num_blocks=8, attention__query_chunk=64)
        program = run.lower(random_params(model), batch).compile()
        sizes[policy] = program.memory_analysis().temp_size_in_bytes
    assert sizes["nothing_saveable"] < 0.7 * sizes["none"]


@pytest.mark.parametrize("loops", [1, 2])
@pytest.mark.parametrize("connection", CONNECTIONS)
def test_scan_equals_a_python_loop(connection, loops):
    """Block i of the loop holds slice i of every stacked leaf; one tap for each sub-layer run."""
    model = small_model(connection__kind=connection, num_blocks=3, loops=loops)
    context = context_of(BATCH, taps=True)

    @jax.jit
    def both(params):
        module = model.module(params)
        start = module.ends.start(module.table(jnp.asarray(BATCH["tokens"][:, :-1])))
        definition, stacked = nnx.split(module.stage_0.blocks)
        carry, collected = Carry(start, {}, {}), []
        for layer in range(3 * loops):
            index = layer % 3
            block = nnx.merge(definition, jax.tree.map(lambda x, i=index: x[i], stacked))
            assert isinstance(block, Block)
            carry, measured = block(carry, context, Layers(layer, index, layer), {})
            collected.append(measured.taps)
        looped = {name: jnp.concatenate([c[name] for c in collected]) for name in collected[0]}
        whole, measured = module.stage_0(Carry(start, {}, {}), context, {})
        return (whole.stream, measured.taps), (carry.stream, looped)

    (stream, taps), (looped_stream, looped_taps) = both(random_params(model))
    assert taps.keys() == looped_taps.keys()
    assert all(values.shape == (6 * loops,) for values in taps.values())
    assert model.sublayer_names == ("attention", "feedforward") * 3 * loops
    for a, b in zip(stream, looped_stream, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
    for name, values in taps.items():
        np.testing.assert_allclose(values, looped_taps[name], rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("connection", CONNECTIONS)
def test_taps_have_exactly_these_names_and_change_nothing(connection):
    out, gradients = evaluate(connection__kind=connection, taps=True)
    expected = COMMON_TAPS | ({"gate", "gate_floored"} if connection == "nag" else set())
    assert set(out["taps"]) == expected
    quiet, quiet_gradients = evaluate(connection__kind=connection)
    assert quiet["taps"] == {}
    np.testing.assert_allclose(quiet["nats"], out["nats"], rtol=1e-5, atol=1e-6)
    assert_same_gradients(quiet_gradients, gradients)


def test_a_closed_gate_shows_in_its_own_taps_alone():
    """A gate shut by its bias: floored for every valid token, no gain, no rotation."""
    params = random_params(compiled(taps=True)[0])
    gate = params["stage_0"]["blocks"]["attention"]["connection"]["modulator"]
    gate["bias"][1] = -100
    taps = evaluate(params=params, taps=True)[0]["taps"]
    count = BATCH["valid"][:, 1:].sum()
    np.testing.assert_array_equal(taps["gate_floored"], [0, 0, count, 0])
    for name in ("gain", "rotation"):
        np.testing.assert_array_equal(taps[name] / count < 1e-3, [False, False, True, False])


@pytest.mark.slow
@pytest.mark.parametrize("connection", [{"kind": "nag"}, {"kind": "prenorm", "head": "free"}])
def test_padding_of_the_vocabulary_changes_nothing(connection):
    """Neither loss, gradient nor accuracy, whatever the padded rows hold."""
    keys = {f"connection__{name}": value for name, value in connection.items()}
    exact, padded = keys | {"vocab_multiple": 1}, keys | {"vocab_multiple": 64}
    params = random_params(compiled(**exact)[0])
    extra = 3 + np.random.default_rng(9).normal(size=(64 - VOCAB, 16)).astype(np.float32)
    table = {"rows": np.concatenate([params["table"]["rows"], extra])}
    padded_params = params | {"table": table}
    out, gradients = evaluate(params=params, **exact)
    padded_out, padded_gradients = evaluate(params=padded_params, **padded)
    np.testing.assert_allclose(padded_out["nats"], out["nats"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(padded_out["correct"], out["correct"])
    np.testing.assert_array_equal(padded_gradients["table/rows"][VOCAB:], 0)
    padded_gradients["table/rows"] = padded_gradients["table/rows"][:VOCAB]
    assert_same_gradients(padded_gradients, gradients)


def test_logits_leave_the_padding_out():
    exact, padded = small_model(vocab_multiple=1), small_model(vocab_multiple=64)
    params = random_params(padded)
    table = {"rows": params["table"]["rows"][:VOCAB]}
    tokens, segment_ids = BATCH["tokens"], BATCH["segment_ids"]
    expected = jax.jit(exact.logits)(params | {"table": table}, tokens, segment_ids)
    logits = jax.jit(padded.logits)(params, tokens, segment_ids)
    assert logits.shape == (*tokens.shape, VOCAB)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss_chunk, query_chunk", [(7, 1), (0, 64)])
def test_chunk_sizes_change_nothing(loss_chunk, query_chunk):
    """Neither the cross-entropy's nor attention's, tails included."""
    out, gradients = evaluate(loss_chunk=loss_chunk, attention__query_chunk=query_chunk)
    expected, expected_gradients = evaluate()
    np.testing.assert_allclose(out["nats"], expected["nats"], rtol=1e-5, atol=1e-6)
    assert_same_gradients(gradients, expected_gradients)


def test_only_valid_targets_count():
    """Losses elsewhere are 0, and what stands there as a target moves no gradient."""
    out, gradients = evaluate()
    np.testing.assert_array_equal(out["nats"] > 0, BATCH["valid"][:, 1:])
    other = BATCH | {"tokens": np.where(BATCH["valid"], BATCH["tokens"], 7)}
    other_out, other_gradients = evaluate(other)
    np.testing.assert_array_equal(out["nats"], other_out["nats"])
    assert_same_gradients(other_gradients, gradients, tolerance=1e-6)


@pytest.mark.slow
def test_bfloat16_stays_close_to_float32_over_48_blocks():
    """96 sub-layers: direction, log-norm, and the direction's norm and mean do not drift."""
    keys = {"num_blocks": 48, "d_model": 64, "attention__qk_norm": True}
    full, half = small_model(**keys), small_model(compute_dtype="bfloat16", **keys)
    params = jax.jit(full.init)(jax.random.key(0))
    batch = packed_batch([[20, 29], [49]], 48)

    def hidden(model):
        tokens = jnp.asarray(batch["tokens"][:, :-1])
        run = jax.jit(lambda p: model.module(p)(tokens, context_of(batch), {})[:2])
        direction, log_norm = run(params)
        return np.asarray(direction, np.float64), np.asarray(log_norm, np.float64), direction.dtype

    r, s, dtype = hidden(full)
    r16, s16, dtype16 = hidden(half)
    assert (dtype, dtype16) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(np.mean(r * r, axis=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(np.mean(r, axis=-1), 0, atol=1e-4)
    np.testing.assert_allclose(np.mean(r16 * r16, axis=-1), 1, rtol=5e-3)
    np.testing.assert_allclose(np.mean(r16, axis=-1), 0, atol=1e-2)
    cosine = np.mean(r * r16, axis=-1)
    assert cosine.min() > 0.99
    np.testing.assert_allclose(s16, s, atol=2e-2)
