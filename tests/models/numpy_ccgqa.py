"""CCGQA in float64 NumPy: one document at a time, one token and one head at a time.

It shares no code with the package, and packed rows are cut into documents before anything else, so
nothing can leak.
"""

import math

import numpy as np
from numpy_network import rotary, softmax


def convolutions(z, w):
    """Depthwise, then grouped by head, over one document z [T, N, h] with zeros in front once.

    `lag` of a weight counts tokens back. The first convolution also runs on the zeros, where it
    leaves its bias for the second one.
    """
    reach, group_reach = len(w["depthwise"]) - 1, len(w["grouped"]) - 1
    padded = np.concatenate([np.zeros((reach + group_reach, *z.shape[1:])), z])
    first = [
        w["depthwise_bias"] + sum(w["depthwise"][lag] * padded[t - lag] for lag in range(reach + 1))
        for t in range(reach, len(padded))
    ]
    second = []
    for t in range(group_reach, len(first)):
        heads = [
            w["grouped_bias"][n]
            + sum(first[t - lag][n] @ w["grouped"][lag, n] for lag in range(group_reach + 1))
            for n in range(z.shape[1])
        ]
        second.append(heads)
    return np.array(second)


def one_document(x, w, options, temperature, keys):
    """The branch of one document x [T, d]; `temperature` multiplies the logits.

    Only the positions `keys` are keys for later ones.
    """
    length, width = len(x), options.head_dim
    heads, kv_heads = options.num_heads, options.num_kv_heads
    group = heads // kv_heads
    q0 = np.einsum("td,dnh->tnh", x, w["query"])
    k0 = np.einsum("td,dnh->tnh", x, w["key"])
    mean_q = np.stack([(q0[:, n] + k0[:, n // group]) / 2 for n in range(heads)], axis=1)
    mean_k = np.stack(
        [mean_q[:, j * group : (j + 1) * group].mean(axis=1) for j in range(kv_heads)], axis=1
    )
    convolved = convolutions(np.concatenate([q0, k0], axis=1), w["convolutions"])
    q, k = convolved[:, :heads] + mean_q, convolved[:, heads:] + mean_k
    q = math.sqrt(width) * q / np.linalg.norm(q, axis=-1, keepdims=True)
    k = math.sqrt(width) * k / np.linalg.norm(k, axis=-1, keepdims=True)
    k = k * np.exp(w["log_temperature"])[:, None]

    turned = round(width * options.rope_fraction)
    place = np.arange(length)
    q, k = (
        np.concatenate([rotary(a[..., :turned], place, options.rope_theta), a[..., turned:]], -1)
        for a in (q, k)
    )

    to_values = w["value"].reshape(len(w["value"]), -1)
    half = to_values.shape[1] // 2
    before = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
    v = np.concatenate([x @ to_values[:, :half], before @ to_values[:, half:]], axis=1)
    v = v.reshape(length, kv_heads, width)

    out = np.zeros_like(q)
    for n in range(heads):
        for t in range(length):
            seen = [s for s in range(t + 1) if s == t or keys[s]]
            logits = temperature * (k[seen, n // group] @ q[t, n]) / math.sqrt(width)
            out[t, n] = softmax(logits) @ v[seen, n // group]
    return np.einsum("tnh,nhd->td", out, w["output"])


def ccgqa(x, w, options, segment_ids, layer=1, keys=None):
    """The branch of one row x [T, d] of documents; `layer` counts blocks from 1.

    With `keys` only these positions are keys for later ones.
    """
    temperature = options.temperature_base ** (options.temperature_sign * layer)
    cuts = np.flatnonzero(np.diff(segment_ids)) + 1
    keys = np.ones(len(x), bool) if keys is None else keys
    parts = zip(np.split(x, cuts), np.split(keys, cuts), strict=True)
    return np.concatenate([one_document(x, w, options, temperature, own) for x, own in parts])
