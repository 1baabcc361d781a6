"""What depth does to tokens at the start of training in a residual-free model, by initialisation.

    python benchmarks/residual_free_init.py [--seeds=3] [--blocks=24]

For each way to start: the diversity of tokens after blocks 6, 12 and 24 (1 - the mean cosine
between two tokens' states; 0 is collapse) and in brackets the attention weight of tokens on
themselves, over the row's second half. Diversity is the geometric mean over seeds. One row of
random tokens, no training; the first table has no positions, so that a repeated token cannot be
told from its copies, which caps the weight near 0.82.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx
from jaxtyping import Array, Float
from rich.console import Console
from rich.table import Table

from nag_jax.config import resolve
from nag_jax.models.attention import GroupedQueryAttention, rotate
from nag_jax.models.context import Context
from nag_jax.models.transformer import build_model

_SEEDS = flags.DEFINE_integer("seeds", 3, "Models of each kind.")
_BLOCKS = flags.DEFINE_integer("blocks", 24, "Blocks of a model.")

TOKENS, TYPES = 256, 512
D_MODEL, HEADS = 256, 4
SHOWN = (6, 12, 24)

ORTHOGONAL = {"model.initialisation.kind": "orthogonal"}


def alpha(value: float, base: float = 1.0, sign: int = -1) -> dict[str, Any]:
    """Orthogonal weights with alpha_qk, and the temperature tau_l = base^(sign l)."""
    return ORTHOGONAL | {
        "model.initialisation.alpha_qk": value,
        "model.attention.temperature_base": base,
        "model.attention.temperature_sign": sign,
    }


STARTS = {
    "Gaussian": {"model.initialisation.kind": "gaussian"},
    "Xavier": {"model.initialisation.kind": "xavier"},
    "Kaiming": {"model.initialisation.kind": "kaiming"},
    **{f"orthogonal, alpha_qk {value:g}": alpha(value) for value in (1.0, 2.0, 4.0, 8.0, 16.0)},
    "alpha_qk 2, tau 1.05^-l": alpha(2.0, 1.05, -1),
    "alpha_qk 2, tau 1.05^+l": alpha(2.0, 1.05, 1),
    "alpha_qk 8, tau 1.05^-l": alpha(8.0, 1.05, -1),
}
PARTS = {
    "orthogonal, alpha_qk 8": ORTHOGONAL,
    "LayerNorm": ORTHOGONAL | {"model.connection.norm": "layer"},
    "q-k norm": ORTHOGONAL | {"model.attention.qk_norm": True},
    "2 key-value heads": ORTHOGONAL | {"model.attention.num_kv_heads": 2},
    "1 key-value head": ORTHOGONAL | {"model.attention.num_kv_heads": 1},
    "SwiGLU": ORTHOGONAL
    | {"model.feedforward.kind": "swiglu", "model.feedforward.hidden": 8 * D_MODEL // 3},
}


def config_of(start: dict[str, Any], blocks: int):
    """The measured model: MHA, GELU, RMSNorm, no skip connections, unless `start` says else."""
    return resolve(
        {
            "model.connection.kind": "residual_free",
            "model.d_model": D_MODEL,
            "model.num_blocks": blocks,
            "model.attention.num_heads": HEADS,
            "model.attention.num_kv_heads": HEADS,
            "model.attention.head_dim": D_MODEL // HEADS,
            "model.feedforward.kind": "mlp",
            "model.feedforward.hidden": 4 * D_MODEL,
        }
        | start
    )


def diversity(states: Float[Array, "T d"]) -> Float[Array, ""]:
    """1 - the mean cosine between the states of two tokens.

    Written as the spread of unit vectors about their mean: 1 - cosine rounds to 0 near collapse.
    """
    unit = states / jnp.linalg.norm(states, axis=-1, keepdims=True)
    spread = jnp.sum((unit - jnp.mean(unit, axis=0)) ** 2)
    return spread / (len(states) - 1)


def self_weight(
    x: Float[Array, "1 T d"], attention: GroupedQueryAttention, context: Context
) -> Float[Array, ""]:
    """Mean weight of the row's second half on itself, in attention written out from its weights."""
    q = jnp.einsum("btd,dnh->btnh", x, attention.query[...], precision="highest")
    k = jnp.einsum("btd,dnh->btnh", x, attention.key[...], precision="highest")
    if attention.qk_norm:
        q = q / jnp.sqrt(jnp.mean(q * q, axis=-1, keepdims=True)) * attention.query_norm.scale[...]
        k = k / jnp.sqrt(jnp.mean(k * k, axis=-1, keepdims=True)) * attention.key_norm.scale[...]
    q = rotate(q, context.positions, attention.rope_theta)[0]
    k = rotate(k, context.positions, attention.rope_theta)[0]
    k = jnp.repeat(k, q.shape[1] // k.shape[1], axis=1)
    tau = attention.temperature_base ** (attention.temperature_sign * context.layer)
    logits = tau * jnp.einsum("tnh,snh->nts", q, k, precision="highest") / jnp.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(jnp.tri(len(x[0]), dtype=bool), logits, -jnp.inf), axis=-1)
    return jnp.mean(jnp.diagonal(weights, axis1=1, axis2=2)[:, len(x[0]) // 2 :])


def measure(
    start: dict[str, Any], blocks: int, seeds: int, rotary: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Diversity after each block and weight on oneself in it, each [seeds, blocks].

    Args:
      start: what differs from the measured model, by config key.
      blocks: blocks of the model.
      seeds: models, each with a row of tokens of its own.
      rotary: whether tokens have positions.
    """
    model = build_model(config_of(start, blocks), TYPES)

    def run(key):
        key, row_key = jax.random.split(key)
        module = model.module(model.init(key))
        tokens = jax.random.randint(row_key, (1, TOKENS), 0, TYPES)
        positions = jnp.arange(TOKENS)[None]
        context = Context(
            segment_ids=jnp.ones_like(tokens),
            positions=positions if rotary else jnp.zeros_like(positions),
            valid=jnp.ones(tokens.shape, bool),
            gain_warmup=jnp.ones(()),
            taps=False,
        )
        definition, stacked = nnx.split(module.stage_0.blocks)

        def block(stream, inputs):
            state, layer = inputs
            told = dataclasses.replace(context, layer=layer)
            block = nnx.merge(definition, state)
            x = block.attention.connection.read(stream)
            weight = self_weight(x, block.attention.branch, told)
            for sublayer in (block.attention, block.feedforward):
                stream, *_ = sublayer(stream, told)
            return stream, (diversity(stream[0][0]), weight)

        stream = module.ends.start(module.table(tokens))
        return jax.lax.scan(block, stream, (stacked, 1 + jnp.arange(blocks)))[1]

    run = jax.jit(run)
    measured = [run(jax.random.key(seed)) for seed in range(seeds)]
    return tuple(np.array(values) for values in zip(*measured, strict=True))


def table(title: str, starts: dict[str, dict[str, Any]], rotary: bool) -> Table:
    """One row for each start."""
    shown = [layer for layer in SHOWN if layer <= _BLOCKS.value]
    result = Table("start", *(f"L{layer}" for layer in shown), title=title, title_justify="left")
    for name, start in starts.items():
        values, weights = measure(start, _BLOCKS.value, _SEEDS.value, rotary)
        values = np.exp(np.mean(np.log(values), axis=0))
        cells = (f"{values[i - 1]:.1e} \\[{weights.mean(axis=0)[i - 1]:.2f}]" for i in shown)
        result.add_row(name, *cells)
    return result


def main(argv):
    """Prints the tables."""
    del argv
    console = Console(highlight=False)
    sizes = f"d {D_MODEL}, {HEADS} heads, {TOKENS} tokens of {TYPES} types"
    show = functools.partial(table, rotary=False)
    console.print(show(f"no positions ({sizes})", STARTS))
    console.print(show("the same, other parts", PARTS))
    console.print(table("rotary positions", STARTS | PARTS, rotary=True))


if __name__ == "__main__":
    app.run(main)
