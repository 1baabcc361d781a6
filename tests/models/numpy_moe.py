"""Mixtures of experts in float64 NumPy, token by token, straight from their definition."""

import math

import numpy as np


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return np.array([0.5 * t * (1 + math.erf(t / math.sqrt(2))) for t in x])


def swiglu(x, gate, up, down):
    return (silu(x @ gate) * (x @ up)) @ down


def router_logits(x, w, kind, state):
    """(logits, state for the next block) of one token."""
    if kind == "moe":
        return x @ w["weight"], None
    r = x @ w["down"] + w["down_bias"] + w["depth_scale"] * state
    y = r / math.sqrt(np.mean(r * r) + 1e-6) * w["norm"]["scale"]
    y = gelu(y @ w["first"] + w["first_bias"])
    y = gelu(y @ w["second"] + w["second_bias"])
    return y @ w["last"], r


def choose(p, bias, k):
    """The k experts of largest p + bias, best first."""
    return np.argsort(-(p + bias), kind="stable")[:k]


def mixture(x, w, options, k, balance, states):
    """A layer on the tokens of a row.

    Returns:
        The outputs, the weights that the connection places (ones with a shared expert, where they
        are inside), the routers' states, the auxiliary loss of each token and the chosen experts.
    """
    outputs, weights, new_states, auxiliary, chosen_by_token = [], [], [], [], []
    for token, state in zip(x, states, strict=True):
        z, new_state = router_logits(token, w["router"], options.kind, state)
        p = softmax(z)
        chosen = choose(p, balance["bias"], k)
        y = sum(p[e] * swiglu(token, w["gate"][e], w["up"][e], w["down"][e]) for e in chosen)
        weight = p[chosen].sum()
        if options.shared_hidden:
            shared = w["shared"]
            y, weight = y + swiglu(token, shared["gate"], shared["up"], shared["down"]), 1.0
        else:
            y = y / weight
        outputs.append(y)
        weights.append(weight)
        new_states.append(new_state)
        uneven = len(p) * np.sum(balance["load"] * p)
        logsumexp = z.max() + math.log(np.exp(z - z.max()).sum())
        auxiliary.append(options.load_balance_loss * uneven + options.router_z_loss * logsumexp**2)
        chosen_by_token.append(chosen)
    return np.array(outputs), np.array(weights), new_states, np.array(auxiliary), chosen_by_token
