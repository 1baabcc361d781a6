"""The pre-norm model of this project written in plain JAX, as a peer for the benchmarks.

No framework: parameters are a dict, training and decoding one function each. Same sizes, scan,
remat policy and initialisation scale; attention, cross-entropy and a cache as most people write
them.
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


def rope(x, theta, positions):
    """Rotary positions [T] for [B, T, N, h]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def project(x, w, positions, attention):
    """Queries [B, T, K, G, h], keys and values [B, T, K, h] of a block with weights `w`."""
    batch, length = x.shape[:2]
    kv_heads, width = attention.num_kv_heads, attention.head_dim
    h = rms_norm(x, w["norm1"])
    q = rope((h @ w["q"]).reshape(batch, length, -1, width), attention.rope_theta, positions)
    k = rope((h @ w["k"]).reshape(batch, length, -1, width), attention.rope_theta, positions)
    v = (h @ w["v"]).reshape(batch, length, -1, width)
    return q.reshape(batch, length, kv_heads, -1, width) * width**-0.5, k, v


def feedforward(x, w):
    """SwiGLU with its norm and its skip connection."""
    h = rms_norm(x, w["norm2"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def loss(params, tokens, sizes):
    """Mean cross-entropy of rows [B, T+1]."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    positions = jnp.arange(inputs.shape[1])
    causal = positions[:, None] >= positions

    def block(x, w):
        q, k, v = project(x, w, positions, sizes.attention)
        logits = jnp.einsum("btkgh,bskh->bkgts", q, k)
        p = jax.nn.softmax(jnp.where(causal, logits, -1e30), -1)
        out = jnp.einsum("bkgts,bskh->btkgh", p, v)
        return feedforward(x + out.reshape(*x.shape[:2], -1) @ w["o"], w), None

    policy = getattr(jax.checkpoint_policies, sizes.remat)
    x, _ = jax.lax.scan(
        jax.checkpoint(block, policy=policy, prevent_cse=False),
        params["table"][inputs],
        params["blocks"],
    )
    logits = rms_norm(x, params["final"]) @ params["table"].T
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


def separate_blocks(params):
    """The same parameters with a list of blocks, as decoding takes them.

    Slices of stacked weights would be copied for every token.
    """
    count = len(params["blocks"]["q"])
    blocks = [jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"]) for i in range(count)]
    return params | {"blocks": blocks}


def empty_cache(sizes, batch, length):
    """Keys and values [B, K, S, h] of each block."""
    attention = sizes.attention
    shape = (batch, attention.num_kv_heads, length, attention.head_dim)
    return [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(sizes.num_blocks)]


def decode_step(params, cache, position, tokens, sizes):
    """Logits [B, V] after one more token a row at column `position`, and the new cache.

    Args:
        params: As from `separate_blocks`.
        cache: As from `empty_cache`.
        position: Column of the tokens, the same in every row.
        tokens: Tokens [B].
        sizes: A config's `model` node.
    """
    x, new_cache = params["table"][tokens][:, None], []
    for w, (keys, values) in zip(params["blocks"], cache, strict=True):
        q, k, v = project(x, w, position[None], sizes.attention)
        keys = jax.lax.dynamic_update_slice_in_dim(keys, jnp.swapaxes(k, 1, 2), position, 2)
        values = jax.lax.dynamic_update_slice_in_dim(values, jnp.swapaxes(v, 1, 2), position, 2)
        new_cache.append((keys, values))
        logits = jnp.einsum("bkgh,bksh->bkgs", q[:, 0], keys)
        p = jax.nn.softmax(jnp.where(jnp.arange(keys.shape[2]) <= position, logits, -1e30), -1)
        out = jnp.einsum("bkgs,bksh->bkgh", p, values)
        x = feedforward(x + out.reshape(len(x), 1, -1) @ w["o"], w)
    return rms_norm(x[:, 0], params["final"]) @ params["table"].T, new_cache
