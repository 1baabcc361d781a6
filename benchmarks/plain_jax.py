"""The pre-norm model of this project written in plain JAX, as a peer for the benchmarks.

No framework: parameters are a dict, the forward pass one function. Same sizes, same scan, same
remat policy, same initialisation scale; attention and cross-entropy as most people write them.
"""

import jax
import jax.numpy as jnp


def init(key, sizes, vocab):
    """Random parameters for `sizes`, a config's `model` node."""
    d, blocks = sizes.d_model, sizes.num_blocks
    attention, hidden = sizes.attention, sizes.feedforward.hidden
    heads, kv_heads, width = attention.num_heads, attention.num_kv_heads, attention.head_dim
    keys = iter(jax.random.split(key, 8))

    def normal(*shape, fan_in):
        return jax.random.normal(next(keys), shape) * fan_in**-0.5

    return {
        "table": jax.random.normal(next(keys), (vocab, d)) * 0.02,
        "final": jnp.ones(d),
        "blocks": {
            "q": normal(blocks, d, heads * width, fan_in=d),
            "k": normal(blocks, d, kv_heads * width, fan_in=d),
            "v": normal(blocks, d, kv_heads * width, fan_in=d),
            "o": normal(blocks, heads * width, d, fan_in=heads * width),
            "gate": normal(blocks, d, hidden, fan_in=d),
            "up": normal(blocks, d, hidden, fan_in=d),
            "down": normal(blocks, hidden, d, fan_in=hidden),
            "norm1": jnp.ones((blocks, d)),
            "norm2": jnp.ones((blocks, d)),
        },
    }


def rms_norm(x, scale):
    """RMS norm with a gain."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def rope(x, theta):
    """Rotary positions for [B, T, N, h]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def loss(params, tokens, sizes):
    """Mean cross-entropy of rows [B, T+1]."""
    attention = sizes.attention
    kv_heads, width = attention.num_kv_heads, attention.head_dim
    groups = attention.num_heads // kv_heads
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    batch, length = inputs.shape
    causal = jnp.tril(jnp.ones((length, length), bool))

    def block(x, w):
        h = rms_norm(x, w["norm1"])
        q = rope((h @ w["q"]).reshape(batch, length, -1, width), attention.rope_theta)
        k = rope((h @ w["k"]).reshape(batch, length, -1, width), attention.rope_theta)
        v = (h @ w["v"]).reshape(batch, length, -1, width)
        q = q.reshape(batch, length, kv_heads, groups, width)
        logits = jnp.einsum("btkgh,bskh->bkgts", q, k) * width**-0.5
        p = jax.nn.softmax(jnp.where(causal, logits, -1e30), -1)
        out = jnp.einsum("bkgts,bskh->btkgh", p, v).reshape(batch, length, -1)
        x = x + out @ w["o"]
        h = rms_norm(x, w["norm2"])
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

    policy = getattr(jax.checkpoint_policies, sizes.remat)
    x, _ = jax.lax.scan(
        jax.checkpoint(block, policy=policy, prevent_cse=False),
        params["table"][inputs],
        params["blocks"],
    )
    logits = rms_norm(x, params["final"]) @ params["table"].T
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)
