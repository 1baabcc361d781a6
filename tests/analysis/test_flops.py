"""Costs of a model against formulas written from its widths, and against XLA's memory analysis."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from nag_jax import config as configs
from nag_jax.analysis import flops
from nag_jax.models.transformer import build_model
from nag_jax.optim.build import build_optimizer
from nag_jax.parameters import flatten
from nag_jax.sharding.rules import MESH_AXES

D, BLOCKS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, C, T, VOCAB = 48, 3, 4, 2, 8, 80, 6, 40, 257
SIZES = (
    f"model.d_model={D}",
    f"model.num_blocks={BLOCKS}",
    f"model.attention.num_heads={HEADS}",
    f"model.attention.num_kv_heads={KV_HEADS}",
    f"model.attention.head_dim={HEAD_DIM}",
    f"model.feedforward.hidden={HIDDEN}",
    f"data.row_length={T}",
)
NAG = (*SIZES, f"model.connection.gate_directions={C}")
Q, K = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM


def build(*overrides):
    config = configs.resolve({}, overrides)
    model = build_model(config, VOCAB)
    return config, model


def optimizer_state(config, model):
    optimizer, _ = build_optimizer(config.optimizer, config.train.steps, model.infos)
    return jax.eval_shape(optimizer.init, jax.eval_shape(model.init, jax.random.key(0)))


def test_forward_flops_of_a_norm_agnostic_model():
    config, model = build(*NAG)
    assert flops.forward_flops(model.infos, config, VOCAB) == {
        "attention": BLOCKS * (2 * D * (Q + 2 * K) + 2 * Q * D),
        "feedforward": BLOCKS * 6 * D * HIDDEN,
        "gates": 2 * BLOCKS * 2 * C * D,
        "attention context": BLOCKS * 4 * Q * (T + 1) / 2,
        "decode": 2 * D * VOCAB,
    }


def test_forward_flops_of_ccgqa():
    kernels = ("model.attention.depthwise_kernel=3", "model.attention.grouped_kernel=2")
    config, model = build(*NAG, "model.attention.kind=ccgqa", *kernels)
    parts = flops.forward_flops(model.infos, config, VOCAB)
    assert parts["attention"] == BLOCKS * (2 * D * (Q + 2 * K) + 2 * Q * D)
    assert parts["convolutions"] == BLOCKS * (2 * 3 * (Q + K) + 2 * 2 * (Q + K) * HEAD_DIM)
    assert parts["attention context"] == BLOCKS * 4 * Q * (T + 1) / 2


def test_forward_flops_of_a_prenorm_mlp_model_with_a_free_head():
    overrides = ("model.connection.kind=prenorm", "model.feedforward.kind=mlp")
    config, model = build(*SIZES, *overrides, "model.connection.head=free")
    parts = flops.forward_flops(model.infos, config, VOCAB)
    assert parts == {
        "attention": BLOCKS * (2 * D * (Q + 2 * K) + 2 * Q * D),
        "feedforward": BLOCKS * 4 * D * HIDDEN,
        "attention context": BLOCKS * 4 * Q * (T + 1) / 2,
        "decode": 2 * D * VOCAB,
    }
    assert flops.training_flops(model.infos, config, VOCAB) == 3 * sum(parts.values())


def test_causal_context_is_the_average_over_positions():
    config, model = build(*NAG)
    # Position t (from 1) has products with t keys and t values of head_dim numbers in each head.
    total = sum(2 * HEADS * HEAD_DIM * t + 2 * HEADS * HEAD_DIM * t for t in range(1, T + 1))
    parts = flops.forward_flops(model.infos, config, VOCAB)
    assert parts["attention context"] == pytest.approx(BLOCKS * total / T)


def test_vocabulary_padding_costs_nothing():
    counts = []
    for multiple in (1, 128):
        config, model = build(*NAG, f"model.vocab_multiple={multiple}")
        counts.append(
            (
                flops.forward_flops(model.infos, config, VOCAB),
                flops.parameters_by_role(model.infos, VOCAB),
                flops.active_parameters(model.infos, config, VOCAB),
            )
        )
    assert counts[0] == counts[1]


def test_parameters_by_role():
    config, model = build(*NAG)
    matrices = BLOCKS * (D * (Q + 2 * K) + Q * D + 3 * D * HIDDEN)
    gates = 2 * BLOCKS * (D * C + 2 * C + 2)  # w; b and p; alpha and beta
    assert flops.parameters_by_role(model.infos, VOCAB) == {
        "matrix": matrices,
        "embedding": VOCAB * D,
        "gate": gates,
        "scale": 1,
    }
    assert flops.active_parameters(model.infos, config, VOCAB) == matrices + VOCAB * D + gates + 1


def test_a_free_head_leaves_one_embedding_row_active():
    overrides = ("model.connection.kind=prenorm", "model.connection.head=free")
    config, model = build(*SIZES, *overrides)
    total = sum(flops.parameters_by_role(model.infos, VOCAB).values())
    assert total - flops.active_parameters(model.infos, config, VOCAB) == (VOCAB - 1) * D


def test_memory_of_parameters_and_optimizer_state_is_exact():
    config, model = build(*NAG, "optimizer.kind=adamw", "model.vocab_multiple=1")
    count = sum(flops.parameters_by_role(model.infos, VOCAB).values())
    state = optimizer_state(config, model)
    memory = flops.memory_estimate(model.infos, config, state)
    assert memory["parameters"] == memory["gradients"] == 4 * count
    assert memory["optimizer state"] == pytest.approx(2 * 4 * count, rel=1e-2)  # and counters
    mesh = AbstractMesh((2, 2, 1, 2), MESH_AXES, axis_types=(AxisType.Auto,) * 4)
    sharded = flops.memory_estimate(model.infos, config, state, mesh)
    wide = sum(info.size for info in flatten(model.infos).values() if "embed" in info.axes)
    assert sharded["parameters"] == 4 * (wide / 4 + count - wide)
    share = sharded["parameters"] / memory["parameters"]
    assert sharded["optimizer state"] == pytest.approx(memory["optimizer state"] * share)
    assert sharded["workspace"] == pytest.approx(memory["workspace"] / 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat, attention",
    [
        ("nothing_saveable", "gqa"),
        ("dots_with_no_batch_dims_saveable", "gqa"),
        ("none", "gqa"),
        ("dots_with_no_batch_dims_saveable", "ccgqa"),
    ],
)
def test_activation_estimate_is_near_the_compilers(remat, attention):
    rows, length = 8, 256
    config, model = build(
        "model.d_model=128",
        "model.num_blocks=4",
        "model.feedforward.hidden=320",
        f"model.remat={remat}",
        f"model.attention.kind={attention}",
        f"train.batch_size={rows}",
        f"data.row_length={length}",
    )
    shape = (rows, length + 1)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    batch = {"tokens": ids, "segment_ids": ids, "valid": jax.ShapeDtypeStruct(shape, bool)}

    def loss(params, batch):
        return model.evaluate_batch(params, batch, 0, False)["nats"].sum()

    params = jax.eval_shape(model.init, jax.random.key(0))
    compiled = jax.jit(jax.value_and_grad(loss)).lower(params, batch).compile()
    memory = flops.memory_estimate(model.infos, config, optimizer_state(config, model))
    estimate = memory["kept activations"] + memory["workspace"]
    assert estimate == pytest.approx(compiled.memory_analysis().temp_size_in_bytes, rel=0.3)


def test_model_table_totals_are_sums_of_their_parts():
    config, model = build(*NAG)
    rows = flops.model_table(model.infos, config, VOCAB, optimizer_state(config, model))
    table = dict(rows)
    assert len(table) == len(rows)
    for total in ("parameters", "forward FLOPs per token", "training FLOPs per token"):
        assert table[total]
    for part in ("  matrix", "  gate", "  attention context", "  decode", "  optimizer state"):
        assert table[part]
    count = sum(flops.parameters_by_role(model.infos, VOCAB).values())
    assert table["parameters"] == f"{count / 1e3:.3g} k"


def test_a_loop_counts_every_run_and_no_parameter_twice():
    """Three runs of the middle two of four blocks cost what eight blocks cost."""
    four = (*NAG, "model.num_blocks=4")
    loop = ("model.loops=3", "model.prelude_blocks=1", "model.coda_blocks=1")
    looped, model = build(*four, *loop)
    plain, deep = build(*NAG, "model.num_blocks=8")
    costs, deep_costs = (
        flops.forward_flops(m.infos, c, VOCAB) for m, c in ((model, looped), (deep, plain))
    )
    assert costs == deep_costs
    assert len(model.sublayer_names) == 16
    memory, deep_memory = (
        flops.memory_estimate(m.infos, c, {}) for m, c in ((model, looped), (deep, plain))
    )
    assert memory["kept activations"] == deep_memory["kept activations"]
    _, shallow = build(*four)
    counts = [flops.parameters_by_role(m.infos, VOCAB) for m in (model, shallow)]
    assert counts[0] == counts[1]


def test_bytes_of_weights_in_a_forward_pass():
    """Stored parts are read; what other devices hold is written and read as it is used."""
    config, model = build(*SIZES, "model.connection.kind=prenorm", "model.connection.head=free")
    sizes = {path: info.size for path, info in flatten(model.infos).items()}
    (table,) = (p for p, info in flatten(model.infos).items() if info.role == "embedding")
    read = sum(size for path, size in sizes.items() if path != table)
    mesh = AbstractMesh((1, 1, 1, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 4)
    assert flops.weight_traffic(model.infos, config, 1, mesh) == 4 * read

    split = AbstractMesh((1, 2, 1, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 4)
    wide = sum(
        info.size
        for path, info in flatten(model.infos).items()
        if "embed" in info.axes and path != table
    )
    assert flops.weight_traffic(model.infos, config, 1, split) == pytest.approx(
        4 * (read - wide) + 4 * wide / 2 + 2 * 4 * wide
    )


def test_no_more_experts_are_read_than_tokens_choose():
    overrides = ("model.feedforward.kind=moe", "model.feedforward.num_experts=4")
    config, model = build(*SIZES, *overrides, "model.feedforward.top_k=1")
    mesh = AbstractMesh((1, 1, 1, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 4)
    one, three, many = (
        flops.weight_traffic(model.infos, config, tokens, mesh) for tokens in (1, 3, 100)
    )
    experts = 4 * sum(i.size for i in flatten(model.infos).values() if "expert" in i.axes)
    assert many - one == pytest.approx(0.75 * experts)
    assert many - three == pytest.approx(0.25 * experts)
