"""What skipping saves and the tokens that buys, against formulas written from a model's widths."""

import pytest

from nag_jax import config as configs
from nag_jax.analysis.isoflop import LONG_ROW, skip_costs
from nag_jax.errors import UserError
from nag_jax.models.transformer import build_model

D, BLOCKS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, C, T, VOCAB = 48, 3, 4, 2, 8, 80, 6, 40, 257
Q, K = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
SIZES = (
    f"model.d_model={D}",
    f"model.num_blocks={BLOCKS}",
    f"model.attention.num_heads={HEADS}",
    f"model.attention.num_kv_heads={KV_HEADS}",
    f"model.attention.head_dim={HEAD_DIM}",
    f"model.feedforward.hidden={HIDDEN}",
    f"model.connection.gate_directions={C}",
    f"data.row_length={T}",
)
# Logits and values of the mean causal position, and the output projection.
CONTEXT_AND_OUTPUT = 4 * Q * (T + 1) / 2 + 2 * Q * D
PROJECTIONS = 2 * D * (Q + 2 * K)
GATES = 2 * 2 * C * D
DECODE = 2 * D * VOCAB


def costs_of(*overrides, row_length=None):
    config = configs.resolve({}, (*SIZES, *overrides))
    return skip_costs(build_model(config, VOCAB).infos, config, VOCAB, row_length)


def test_plain_attention_also_leaves_out_its_queries():
    costs = costs_of()
    attention, feedforward = PROJECTIONS + CONTEXT_AND_OUTPUT, 6 * D * HIDDEN
    assert costs.total == BLOCKS * (attention + feedforward + GATES) + DECODE
    assert costs.skippable == {
        "attention": BLOCKS * (CONTEXT_AND_OUTPUT + 2 * D * Q),
        "feedforward": BLOCKS * feedforward,
    }


def test_convolutions_and_routers_run_for_every_token():
    costs = costs_of(
        "model.attention.kind=ccgqa",
        "model.feedforward.kind=moe",
        "model.feedforward.num_experts=5",
        "model.feedforward.top_k=2",
        "model.feedforward.shared_hidden=16",
    )
    convolutions = 2 * 2 * (Q + K) + 2 * 2 * (Q + K) * HEAD_DIM
    experts = 2 * 6 * D * HIDDEN + 6 * D * 16
    router = 2 * D * 5
    block = PROJECTIONS + CONTEXT_AND_OUTPUT + convolutions + experts + router + GATES
    assert costs.total == BLOCKS * block + DECODE
    assert costs.skippable == {
        "attention": BLOCKS * CONTEXT_AND_OUTPUT,
        "feedforward": BLOCKS * experts,
    }


def test_saving_and_tokens_follow_the_rates():
    costs = costs_of()
    rates = {"attention": 0.1, "feedforward": 0.4}
    saved = 0.1 * costs.skippable["attention"] + 0.4 * costs.skippable["feedforward"]
    assert costs.forward(rates) == pytest.approx(costs.total - saved)
    assert costs.training(rates) == 3 * costs.forward(rates)
    assert costs.saving(rates) == pytest.approx(saved / costs.total)
    tokens = costs.tokens(1e9, rates)
    assert tokens * costs.forward(rates) == pytest.approx(1e9 * costs.total)
    assert costs.tokens(1e9, {}) == 1e9 and costs.saving({}) == 0


def test_in_a_long_row_attention_is_all_there_is():
    rates = {"attention": 0.3, "feedforward": 0.1}
    assert costs_of(row_length=LONG_ROW).saving(rates) == pytest.approx(0.3)
    assert costs_of().saving(rates) < costs_of(row_length=32 * T).saving({"attention": 0.3}) < 0.3


def test_a_loop_saves_at_every_run():
    looped, plain = costs_of("model.loops=2"), costs_of(f"model.num_blocks={2 * BLOCKS}")
    assert looped == plain


@pytest.mark.parametrize("rates", [{"attention": 1.5}, {"feedforward": -0.1}, {"experts": 0.2}])
def test_rates_that_are_none_are_refused(rates):
    with pytest.raises(UserError, match="rates are between 0 and 1, of attention and feedforward"):
        costs_of().forward(rates)
