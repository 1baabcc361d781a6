"""The papers' models: sizes, parameters, forward FLOPs, and what skipping saves of them.

    python benchmarks/papers.py [--ratio=60] [--connection=nag]

Everything is counted from abstract builds of `configs/papers/`: no data, no memory, no device. The
second and third tables are of one ratio; parameters leave out the embeddings, FLOPs are per token.
"""

import pathlib

from absl import app, flags
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from nag_jax.analysis.flops import active_parameters, forward_flops, parameters_by_role
from nag_jax.analysis.isoflop import LONG_ROW, SkipCosts, skip_costs
from nag_jax.config import load_config_file, resolve
from nag_jax.models.transformer import LanguageModel, build_model

_RATIO = flags.DEFINE_integer("ratio", 60, "Ratio of width to depth of the skipping tables.")
_CONNECTION = flags.DEFINE_string("connection", "nag", "Connection of the models.")

CONFIGS = pathlib.Path(__file__).parents[1] / "configs" / "papers"
RATIOS = (80, 60, 40, 30, 20)
RATES = (0.05, 0.1, 0.2, 0.25, 0.3, 0.4)
SUBLAYERS = {
    "attention": ("attention",),
    "feed-forward": ("feedforward",),
    "both": ("attention", "feedforward"),
}
NAG_VOCABULARY, GPT2_VOCABULARY = 32_000, 50_257


def main(argv):
    """Prints the tables."""
    del argv
    console = Console(highlight=False, width=150)
    console.print(_sizes())
    config, model = _built(f"nag.py:ratio={_RATIO.value},connection={_CONNECTION.value}")
    lengths = {"2,048": None, "32,768": 32_768, "limit": LONG_ROW}
    costs = {
        name: skip_costs(model.infos, config, NAG_VOCABULARY, length)
        for name, length in lengths.items()
    }
    console.print(_savings(costs))
    console.print(_tokens(costs["2,048"], config.train.steps))


def _sizes() -> Table:
    names = ("model", "d", "blocks", "head", "hidden", "experts", "parameters", "active")
    table = _table("Parameters without embeddings", *names, "embeddings", "forward FLOPs")
    for ratio in RATIOS:
        spec = f"nag.py:ratio={ratio},connection={_CONNECTION.value}"
        _add(table, f"{_CONNECTION.value} {ratio}", spec, NAG_VOCABULARY)
    _add(table, "residual_free", "residual_free.py", GPT2_VOCABULARY)
    return table


def _add(table: Table, name: str, spec: str, vocab_size: int) -> None:
    config, model = _built(spec, vocab_size)
    feedforward, blocks = config.model.feedforward, config.model.num_blocks
    experts = "-"
    if "num_experts" in feedforward:
        counts = feedforward.num_experts
        experts = f"{sum(counts[i % len(counts)] for i in range(blocks)) / blocks:.2f}"
    roles = parameters_by_role(model.infos, vocab_size)
    table.add_row(
        name,
        *map(str, (config.model.d_model, blocks, config.model.attention.head_dim)),
        str(feedforward.hidden),
        experts,
        _millions(sum(roles.values()) - roles["embedding"]),
        _millions(active_parameters(model.infos, config, vocab_size) - roles["embedding"]),
        _millions(roles["embedding"]),
        _millions(sum(forward_flops(model.infos, config, vocab_size).values())),
    )


def _savings(costs: dict[str, SkipCosts]) -> Table:
    title = f"Share of forward FLOPs saved at ratio {_RATIO.value}, by sub-layers and row length"
    columns = [f"{name}, {length}" for name in SUBLAYERS for length in costs]
    table = _table(title, "skipped", *columns)
    for rate in RATES:
        shares = [
            f"{of.saving(dict.fromkeys(kinds, rate)):.1%}"
            for kinds in SUBLAYERS.values()
            for of in costs.values()
        ]
        table.add_row(f"{rate:.0%}", *shares)
    return table


def _tokens(costs: SkipCosts, steps: int) -> Table:
    title = f"Tokens, as a multiple, and steps of equal FLOPs at ratio {_RATIO.value}"
    table = _table(title, "skipped", *SUBLAYERS)
    for rate in RATES:
        times = [costs.tokens(1.0, dict.fromkeys(kinds, rate)) for kinds in SUBLAYERS.values()]
        table.add_row(f"{rate:.0%}", *(f"{t:.3f} ({round(t * steps):,})" for t in times))
    return table


def _built(spec: str, vocab_size: int = NAG_VOCABULARY) -> tuple[ConfigDict, LanguageModel]:
    config = resolve(load_config_file(f"{CONFIGS}/{spec}"))
    return config, build_model(config, vocab_size)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def _millions(count: float) -> str:
    return f"{count / 1e6:.1f} M"


if __name__ == "__main__":
    app.run(main)
