"""What skipping saves: training steps, layers alone and decoding, over nothing skipped, in one run.

  python benchmarks/skipping.py --config=configs/moe_small.py [--rate=0.4] [--length=4096] [--quick]

Thresholds are those of the batch itself, so that the share of tokens asked for is skipped; the
share that the last timed step did skip, read from its taps, is beside its time. Layers alone keep
tokens by chance. Decoding writes one token at a time after a prompt.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from ml_collections import ConfigDict
from rich.console import Console
from stepping import Stepper, derived, random_batch
from timing import gradient_of, mib, surroundings, table_of, timed_turns

from nag_jax import cli
from nag_jax.kinds import kind_class
from nag_jax.models.context import Context
from nag_jax.models.linear import Numerics
from nag_jax.models.skipping import quantiles
from nag_jax.models.transformer import LanguageModel, build_model, skipping_part, with_thresholds

_RATE = flags.DEFINE_float("rate", 0.4, "share of tokens that skip a sub-layer")
_ROWS = flags.DEFINE_integer("rows", 1, "rows of a batch")
_LENGTH = flags.DEFINE_integer("length", 4096, "tokens of a row")
_VOCAB = flags.DEFINE_integer("vocabulary", 4096, "size of the vocabulary")
_TOKENS = flags.DEFINE_integer("tokens", 16, "tokens of a timed turn of decoding")
_BATCHES = flags.DEFINE_list("batches", ["1", "16"], "rows of decoding")
_REPEATS = flags.DEFINE_integer("repeats", 7, "timed turns")
_QUICK = flags.DEFINE_bool("quick", False, "256 tokens, one turn")

console = Console(highlight=False, soft_wrap=True)


def skipping_node(sublayers: str | None) -> dict[str, Any]:
    """`model.skipping` that follows the target from the first step on; None for no skipping."""
    if sublayers is None:
        return {"kind": "none"}
    ramp = {"ramp_start": 0.0, "ramp_end": 0.0}
    return {"kind": "threshold", "rate": _RATE.value, "sublayers": sublayers} | ramp


def fitted(model: LanguageModel, params: Any, balance: Any, batch: dict) -> tuple[Any, list[float]]:
    """Thresholds that skip the rate of this batch, and the share that each sub-layer skips."""
    run = jax.jit(lambda balance: model.evaluate_batch(params, batch, 10**6, True, balance))
    for _ in range(4):  # a layer's thresholds move the gates of those after it
        counts = skipping_part(run(balance)["statistics"])
        balance = with_thresholds(balance, quantiles(counts, jnp.float32(_RATE.value)))
    skipped = run(balance)["taps"]["skipped"] / batch["valid"][:, 1:].sum()
    return balance, [float(share) for share in skipped]


def steps_table(config: ConfigDict, connection: str):
    """Whole training steps of a connection."""
    batch = random_batch(_ROWS.value, _LENGTH.value, _VOCAB.value)
    node = config.model.connection.to_dict()
    if config.model.connection.kind != connection:
        node = {"kind": connection}
    made = {}
    for sublayers in (None, "both", "feedforward", "attention"):
        derived_config = derived(
            config, _LENGTH.value, connection=node, skipping=skipping_node(sublayers)
        )
        step = made[sublayers or "nothing"] = Stepper(derived_config, batch, _VOCAB.value)
        if sublayers:
            params = jax.tree.map(jnp.copy, step.state.params)
            balance, _ = fitted(step.model, params, step.state.balance, batch)
            step.state = dataclasses.replace(step.state, balance=balance)
    seconds = timed_turns(made, _REPEATS.value)
    table = table_of(
        f"training step, {connection}, {_ROWS.value} rows of {_LENGTH.value} tokens",
        *("skipped", "ms", "over nothing", "temporaries, MiB", "share skipped, lowest to highest"),
    )
    for name, step in made.items():
        share = "0"
        if name != "nothing":
            taps = jax.jit(step.model.evaluate_batch, static_argnums=3)(
                step.state.params, batch, step.state.age, True, step.state.balance
            )["taps"]["skipped"]
            share = np.sort(np.asarray(taps) / batch["valid"][:, 1:].sum())
            share = share[share > 0]
            share = f"{share.mean():.3f} ({share[0]:.3f} to {share[-1]:.3f})"
        table.add_row(
            name,
            f"{1e3 * seconds[name]:.0f}",
            f"{seconds[name] / seconds['nothing']:.2f}",
            mib(step.temporaries),
            share,
        )
    return table


def layer(config: ConfigDict, part: str, node: dict) -> tuple[Callable, Any, jax.Array]:
    """(params, x, keep) -> the branch's output; its parameters; an input."""
    branch = kind_class(f"model.{part}", node["kind"])
    options = ConfigDict(branch.defaults() | {k: v for k, v in node.items() if k != "kind"})
    kind = config.model.initialisation.kind
    initialisation = kind_class("model.initialisation", kind)(config.model.initialisation)
    rngs = nnx.Rngs(params=jax.random.key(0))
    width = config.model.d_model
    definition, params = nnx.split(branch(options, width, initialisation, Numerics(), rngs))
    shape = (_ROWS.value, _LENGTH.value)
    ones = jnp.ones(shape, jnp.int32)
    balance = {}
    if hasattr(branch, "balance_shapes"):
        balance = {k: jnp.zeros(v) for k, v in branch.balance_shapes(options).items()}
    context = Context(
        segment_ids=ones,
        positions=jnp.broadcast_to(jnp.arange(shape[1]), shape),
        valid=ones > 0,
        gain_warmup=jnp.ones(()),
        taps=False,
        balance=balance,
    )

    def run(params, x, keep):
        y = nnx.merge(definition, params)(x, keep, context).y
        return y if keep is None else jnp.where(keep[..., None], y, 0)

    return run, params, jax.random.normal(jax.random.key(1), (*shape, width))


def layers_table(config: ConfigDict):
    """Branches alone, forward and with their gradients."""
    model = config.model
    hidden = model.feedforward.hidden
    experts = {"hidden": hidden, "num_experts": (8,), "top_k": (1,)}
    heads = {name: model.attention[name] for name in ("num_heads", "num_kv_heads", "query_chunk")}
    parts = {
        "MLP": ("feedforward", {"kind": "mlp", "hidden": hidden}),
        "SwiGLU": ("feedforward", {"kind": "swiglu", "hidden": hidden}),
        "8 experts, k 1": ("feedforward", {"kind": "moe", **experts}),
        "GQA": ("attention", {"kind": "gqa", **heads}),
        "CCGQA": ("attention", {"kind": "ccgqa", **heads}),
    }
    shape = (_ROWS.value, _LENGTH.value)
    keep = jax.random.uniform(jax.random.key(2), shape) >= _RATE.value
    calls = {}
    for name, (part, node) in parts.items():
        run, params, x = layer(config, part, node)
        for way, function in (("forward", run), ("both", None)):
            for kept, mask in (("all", None), ("kept", keep)):
                made = function or gradient_of(lambda p, x, mask=mask, run=run: run(p, x, mask))
                if function:
                    compiled = jax.jit(run).lower(params, x, mask).compile()
                    calls[name, way, kept] = lambda c=compiled, p=params, x=x, m=mask: c(p, x, m)
                else:
                    compiled = jax.jit(made).lower(params, x).compile()
                    calls[name, way, kept] = lambda c=compiled, p=params, x=x: c(p, x)
    seconds = timed_turns(calls, _REPEATS.value)
    table = table_of(
        f"one layer, {_ROWS.value} rows of {_LENGTH.value} tokens, {_RATE.value:.0%} skipped",
        *("", "forward, ms", "over all", "both, ms", "over all"),
    )
    for name in parts:
        cells = []
        for way in ("forward", "both"):
            kept, whole = seconds[name, way, "kept"], seconds[name, way, "all"]
            cells += [f"{1e3 * kept:.1f}", f"{kept / whole:.2f}"]
        table.add_row(name, *cells)
    return table


def decoder(model: LanguageModel, params: Any, balance: Any, rows: int) -> Callable:
    """A call that writes some tokens after a prompt that fills the rest of the cache."""
    length = min(_LENGTH.value, 1024)
    prompt = jnp.asarray(
        random_batch(rows, length, _VOCAB.value)["tokens"][:, : -_TOKENS.value - 1]
    )
    prefill = jax.jit(model.prefill, static_argnums=3)
    _, state = prefill(params, prompt, jnp.zeros(rows, jnp.int32), length, 10**6, balance)
    step = jax.jit(model.decode_step, donate_argnums=2)
    tokens = jnp.asarray(random_batch(_TOKENS.value, rows - 1, _VOCAB.value)["tokens"])
    holder = [state]

    def call():
        state, first = holder[0], prompt.shape[1]
        state["position"] = jnp.int32(first)
        for row in tokens:
            logits, state = step(params, row, state, 10**6, balance)
        holder[0] = state
        return logits

    return call


def decoding_table(config: ConfigDict):
    """Tokens of decoding; nothing skipped, the rate skipped, and everything skipped."""
    batch = random_batch(max(_ROWS.value, 4), min(_LENGTH.value, 1024), _VOCAB.value)
    calls, shares = {}, {}
    plain = build_model(derived(config, _LENGTH.value), _VOCAB.value)
    skips = build_model(
        derived(config, _LENGTH.value, skipping=skipping_node("both")), _VOCAB.value
    )
    params = plain.init(jax.random.key(0))
    balance, shares = fitted(skips, params, skips.initial_balance(), batch)
    nobody = with_thresholds(balance, jax.tree.map(lambda x: x + 2, skipping_part(balance)))
    for rows in map(int, _BATCHES.value):
        for name, model, own in (
            ("nothing", plain, plain.initial_balance()),
            (f"{np.mean(shares):.0%}", skips, balance),
            ("everything", skips, nobody),
        ):
            calls[rows, name] = decoder(model, params, own, rows)
    seconds = timed_turns(calls, _REPEATS.value)
    table = table_of(
        "decoding, one token of each row", "rows", "skipped", "ms", "over nothing", left=2
    )
    for (rows, name), each in seconds.items():
        over = f"{each / seconds[rows, 'nothing']:.2f}"
        table.add_row(str(rows), name, f"{1e3 * each / _TOKENS.value:.2f}", over)
    return table


def main(config, flag_values) -> int:
    """Prints the tables."""
    if flag_values.quick:
        flag_values.length, flag_values.repeats, flag_values.batches = 256, 1, ["1"]
    console.print(surroundings())
    for connection in ("nag", "gated_prenorm"):
        console.print(steps_table(config, connection))
    console.print(layers_table(config))
    console.print(decoding_table(config))
    return 0


if __name__ == "__main__":
    cli.run(main)
