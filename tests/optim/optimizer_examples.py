"""A small model's parameter metadata, a complete optimizer config, and references in float64 NumPy.

The references are written from the equations alone and share no code with the package.
"""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax

from nag_jax.kinds import kind_class
from nag_jax.parameters import ParamInfo

CONFIG = {
    "kind": "muon",
    "learning_rate": 3e-3,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
    "adam_b1": 0.9,
    "adam_b2": 0.95,
    "adam_eps": 1e-8,
    "rate_multiplier": {
        "embedding": 1.0,
        "head": 1.0,
        "gate": 0.1,
        "scale": 1.0,
        "bias": 1.0,
        "conv": 1.0,
    },
    "embedding_decay": 0.0,
    "schedule": {"kind": "cosine", "warmup_steps": 5, "final_share": 0.1},
}


class SignKind:
    """A user's own optimizer kind."""

    @staticmethod
    def defaults():
        return {"sharpness": 1.0}

    @staticmethod
    def direction(config, matrices):
        assert set(matrices) <= {"w"}
        return optax.chain(optax.scale_by_sign(), optax.scale(config["sharpness"]))


def config(**changes):
    """Returns the config with some keys changed; "rate_multiplier__gate" names an inner key."""
    result = copy.deepcopy(CONFIG) | kind_class("optimizer", changes.get("kind", "muon")).defaults()
    for key, value in changes.items():
        *outer, last = key.split("__")
        node = result
        for name in outer:
            node = node[name]
        node[last] = value
    return result


def info(axes, role, shape, rows=(), columns=(), centred=False):
    return ParamInfo(axes, role, rows, columns, centred, shape, jnp.float32)


def model_infos():
    """Returns metadata of every kind of leaf: stacked, of several axes, centred, scalar."""
    return {
        "blocks": {
            "gate": {"alpha": info(("layers",), "gate", (3,))},
            "query": {
                "kernel": info(
                    ("layers", "embed", "heads", "head_dim"), "matrix", (3, 16, 2, 8), (1,), (2, 3)
                )
            },
            "out": {
                "kernel": info(
                    ("layers", "heads", "head_dim", "embed"), "matrix", (3, 2, 8, 16), (1, 2), (3,)
                )
            },
            "up": {
                "kernel": info(("layers", "embed", "hidden"), "matrix", (3, 16, 24), (1,), (2,))
            },
        },
        "head": {"kernel": info(("embed", "vocabulary"), "head", (16, 32))},
        "log_gain": info((), "scale", ()),
        "table": info(("vocabulary", "embed"), "embedding", (32, 16), centred=True),
    }


def random_like(infos, seed, scale=1.0, dtype=jnp.float32):
    """Returns normal arrays shaped as the parameters."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda i: jnp.asarray(scale * rng.normal(size=i.shape), dtype), infos)


def reference_newton_schulz(x, steps=5, eps=1e-7):
    """Five steps on one matrix, the Gram matrix always on the left (float64)."""
    x = np.asarray(x, np.float64)
    y = x / (np.sqrt(np.sum(x * x)) + eps)
    for _ in range(steps):
        gram = y @ y.T
        y = 3.4445 * y - 4.7750 * gram @ y + 2.0315 * gram @ gram @ y
    return y


class ReferenceMuon:
    """Muon on one matrix [in, out]."""

    def __init__(self, shape, scaling, mu=0.95, nesterov=True):
        self.m, self.scaling, self.mu, self.nesterov = np.zeros(shape), scaling, mu, nesterov

    def __call__(self, g):
        g = np.asarray(g, np.float64)
        rows, columns = g.shape
        if self.scaling == "moonshot":
            self.m = self.mu * self.m + g
            n = g + self.mu * self.m if self.nesterov else self.m
            factor = 0.2 * np.sqrt(max(rows, columns))
        else:
            self.m = self.mu * self.m + (1 - self.mu) * g
            n = (1 - self.mu) * g + self.mu * self.m if self.nesterov else self.m
            factor = np.sqrt(max(1.0, columns / rows))
        return factor * reference_newton_schulz(n)


class ReferenceAdam:
    """Adam with bias correction on one array."""

    def __init__(self, shape, b1=0.9, b2=0.95, eps=1e-8):
        self.m, self.v, self.t = np.zeros(shape), np.zeros(shape), 0
        self.b1, self.b2, self.eps = b1, b2, eps

    def __call__(self, g):
        g = np.asarray(g, np.float64)
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g * g
        m, v = self.m / (1 - self.b1**self.t), self.v / (1 - self.b2**self.t)
        return m / (np.sqrt(v) + self.eps)
