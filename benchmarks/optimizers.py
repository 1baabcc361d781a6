"""Time of one optimizer update, AdamW and Muon, on the parameters of a small model.

The gradients are random and the model itself is not run. Each optimizer is timed in turns with the
others, so that a busy machine slows all of them alike.

    python benchmarks/optimizers.py --blocks=6 --d_model=256
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from nag_jax.optim import build_optimizer
from nag_jax.optim.build import MuonKind
from nag_jax.parameters import ParamInfo

BLOCKS = flags.DEFINE_integer("blocks", 6, "Number of blocks (attention and SwiGLU).")
D_MODEL = flags.DEFINE_integer("d_model", 256, "Width of the stream.")
VOCABULARY = flags.DEFINE_integer("vocabulary", 384, "Rows of the embedding table.")
REPEATS = flags.DEFINE_integer("repeats", 30, "Timed updates of each optimizer.")

OPTIMIZERS = {
    "adamw": {"kind": "adamw"},
    "muon, float32": {"kind": "muon", "newton_schulz_dtype": "float32"},
    "muon, bfloat16": {"kind": "muon", "newton_schulz_dtype": "bfloat16"},
}


def parameter_infos(blocks, d, vocabulary):
    """Returns metadata of a stacked transformer with grouped-query attention and SwiGLU."""
    head_dim, hidden = 64, 128 * round(8 * d / 3 / 128)

    def info(axes, role, shape, rows=(), columns=(), centred=False):
        return ParamInfo(axes, role, rows, columns, centred, shape, jnp.float32)

    def matrix(names, *sizes, rows=(1,)):
        columns = tuple(i for i in range(1, len(names) + 1) if i not in rows)
        return info(("layers", *names), "matrix", (blocks, *sizes), rows, columns)

    def to_heads(heads):
        return matrix(("embed", "heads", "head_dim"), d, heads, head_dim)

    heads = d // head_dim
    return {
        "query": to_heads(heads),
        "key": to_heads(max(1, heads // 2)),
        "value": to_heads(max(1, heads // 2)),
        "out": matrix(("heads", "head_dim", "embed"), heads, head_dim, d, rows=(1, 2)),
        "up": matrix(("embed", "hidden"), d, hidden),
        "gate": matrix(("embed", "hidden"), d, hidden),
        "down": matrix(("hidden", "embed"), hidden, d),
        "directions": info(("layers", "directions", "embed"), "gate", (2 * blocks, 32, d)),
        "table": info(("vocabulary", "embed"), "embedding", (vocabulary, d), centred=True),
    }


def optimizer_config(**changes):
    """Returns a complete optimizer config with the defaults of training."""
    roles = ("embedding", "head", "gate", "scale", "bias", "conv")
    return {
        **MuonKind.defaults(),
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "adam_b1": 0.9,
        "adam_b2": 0.95,
        "adam_eps": 1e-8,
        "rate_multiplier": dict.fromkeys(roles, 1.0),
        "embedding_decay": 0.0,
        "schedule": {"kind": "cosine", "warmup_steps": 20, "final_share": 0.1},
        **changes,
    }


def main(argv):
    """Prints the table."""
    del argv
    infos = parameter_infos(BLOCKS.value, D_MODEL.value, VOCABULARY.value)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda i: jnp.asarray(rng.normal(size=i.shape), jnp.float32), infos)

    runs, states = {}, {}
    for name, changes in OPTIMIZERS.items():
        transform, _ = build_optimizer(optimizer_config(**changes), 1000, infos)

        def step(params, state, grads, transform=transform):
            updates, state = transform.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        runs[name] = jax.jit(step, donate_argnums=(0, 1))
        params = jax.tree.map(jnp.array, grads)
        states[name] = (params, transform.init(params))

    seconds = {name: [] for name in runs}
    for repeat in range(REPEATS.value + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            states[name] = jax.block_until_ready(run(*states[name], grads))
            if repeat >= 2:  # the first compiles, the second warms up
                seconds[name].append(time.perf_counter() - start)

    size = sum(i.size for i in jax.tree.leaves(infos))
    device = jax.devices()[0]
    print(
        f"{BLOCKS.value} blocks, d {D_MODEL.value}, {size:,} parameters; "
        f"{device.platform} ({device.device_kind}), jax {jax.__version__}; "
        f"median of {REPEATS.value}"
    )
    print(f"{'optimizer':16} {'ms/update':>10} {'of adamw':>9} {'state MiB':>10}")
    base = statistics.median(seconds["adamw"])
    for name, times in seconds.items():
        median = statistics.median(times)
        state = sum(x.nbytes for x in jax.tree.leaves(states[name][1])) / 2**20
        print(f"{name:16} {1e3 * median:10.1f} {median / base:9.2f} {state:10.1f}")


if __name__ == "__main__":
    app.run(main)
