"""The whole network in float64 NumPy, row by row and head by head, from the equations alone.

It shares no code with the package and favours plainness over speed. Equation numbers are those of
arXiv 2606.16112.
"""

import math

import numpy as np

DELTA = 1e-5  # relative size below which a branch counts as parallel to the direction
GATE_FLOOR = 1e-6


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def softplus(x):
    return math.log1p(math.exp(x))


def rms(x):
    return np.sqrt(np.mean(x * x, axis=-1, keepdims=True))


def rms_norm(x, scale, epsilon):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale


def positions(segment_ids):
    """Position within the document for one row."""
    out = []
    for i, segment in enumerate(segment_ids):
        same = i > 0 and segment_ids[i - 1] == segment
        out.append(out[-1] + 1 if same else 0)
    return np.array(out)


def rotary(x, place, theta):
    """Turns heads [T, N, h]: halves are real and imaginary parts of h/2 complex numbers."""
    half = x.shape[-1] // 2
    frequencies = np.array([theta ** (-2 * i / x.shape[-1]) for i in range(half)])
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.multiply.outer(place, frequencies))[
        :, None
    ]
    return np.concatenate([z.real, z.imag], axis=-1)


def dense_attention(q, k, v, segment_ids, keys=None):
    """One row: q [T, N, h], k and v [T, K, h]; query head n reads key head n // (N/K).

    With `keys` only these positions are keys, except each for itself.
    """
    length, heads, width = q.shape
    group = heads // k.shape[1]
    out = np.zeros_like(q)
    same = segment_ids[:, None] == segment_ids[None, :]
    visible = same & np.tril(np.ones((length, length), bool))
    if keys is not None:
        visible &= keys | np.eye(length, dtype=bool)
    for n in range(heads):
        logits = q[:, n] @ k[:, n // group].T / math.sqrt(width)
        weights = np.where(visible, np.exp(logits - logits.max(axis=1, keepdims=True)), 0)
        out[:, n] = weights @ v[:, n // group] / weights.sum(axis=1, keepdims=True)
    return out


def attention(x, w, options, segment_ids, keys=None):
    def project(name):
        return np.einsum("td,dnh->tnh", x, w[name])

    q, k, v = project("query"), project("key"), project("value")
    if options.qk_norm:
        q = rms_norm(q, w["query_norm"]["scale"], 1e-6)
        k = rms_norm(k, w["key_norm"]["scale"], 1e-6)
    place = positions(segment_ids)
    q, k = rotary(q, place, options.rope_theta), rotary(k, place, options.rope_theta)
    return np.einsum("tnh,nhd->td", dense_attention(q, k, v, segment_ids, keys), w["output"])


def gelu(x):
    """GELU by its tanh approximation."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def feedforward(x, w, kind):
    if kind == "mlp":
        return gelu(x @ w["up"]) @ w["down"]
    gate = x @ w["gate"]
    return (gate * sigmoid(gate) * (x @ w["up"])) @ w["down"]


def modulator(r, w, beta):
    """Equation (13) for tokens r [T, d]."""
    g = sigmoid(r @ w["weight"] + w["bias"]) @ softmax(w["mixture_logits"])
    return np.maximum(g, GATE_FLOOR) ** beta


def unit_update(r, f, tiny=0.0):
    """u of equations (10) and (12), shortened where the branch is degenerate, and q = |u|^2/d."""
    f = f - f.mean(axis=-1, keepdims=True)
    along = np.sum(f * r, axis=-1, keepdims=True) / np.sum(r * r, axis=-1, keepdims=True)
    perpendicular = f - along * r
    size_sq = np.sum(perpendicular**2, axis=-1, keepdims=True)
    size_sq = size_sq + DELTA**2 * np.sum(f**2, axis=-1, keepdims=True) + tiny
    u = math.sqrt(r.shape[-1]) * perpendicular / np.sqrt(size_sq)
    return u, np.mean(u * u, axis=-1)


def nag_write(r, f, a, tiny=0.0):
    """Equations (14), (15) and (17): the new direction and the growth of the log-norm."""
    u, q = unit_update(r, f, tiny)
    written = r + a[..., None] * u
    return written / rms(written), 0.5 * np.log1p(a * a * q)


def beta_of(modulator_params, options):
    raw = modulator_params.get("beta_raw")
    return options.beta_init if raw is None else softplus(float(raw))


class Network:
    """Forward pass of one row, and what every sub-layer does on the way."""

    def __init__(self, options, vocab_size, params):
        self.options, self.vocab_size, self.params = options, vocab_size, params
        self.kind = options.connection.kind

    def block_params(self, index, name):
        def pick(tree):
            return {k: pick(v) if isinstance(v, dict) else v[index] for k, v in tree.items()}

        return pick(self.params["stage_0"]["blocks"][name])

    def branch(self, name, x, w, segment_ids):
        if name == "attention":
            return attention(x, w, self.options.attention, segment_ids)
        return feedforward(x, w, self.options.feedforward.kind)

    def weighted_branch(self, name, index, x, w, segment_ids):
        """The branch's output, and a router's weights of the tokens or None."""
        del index
        return self.branch(name, x, w, segment_ids), None

    def gates(self, name, index, x, connection, warmup):
        """The gate of tokens x, as it is told and as it multiplies; None where there is none."""
        del name, index, warmup
        if self.kind == "nag":
            gate = connection["modulator"]
            gate = modulator(x, gate, beta_of(gate, self.options.connection))
        elif self.kind == "gated_prenorm":
            router = connection["router"]
            gate = np.maximum(sigmoid(x @ router["weight"] + float(router["bias"])), GATE_FLOOR)
        else:
            gate = None
        return gate, gate

    def hidden(self, tokens, segment_ids, warmup):
        """(final hidden states, log inverse temperatures, taps of each sub-layer by token)."""
        e = self.params["table"]["rows"][tokens]
        options = self.options.connection
        taps = []
        if self.kind == "nag":
            r = e / rms(e)
            s = np.log(rms(e)[:, 0]) + float(self.params["ends"]["log_encode_gain"])
        else:
            x = e
        for index in range(self.options.num_blocks):
            for name in ("attention", "feedforward"):
                w = self.block_params(index, name)
                connection = w["connection"]
                if self.kind == "nag":
                    told, m = self.gates(name, index, r, connection, warmup)
                    f, weight = self.weighted_branch(name, index, r, w["branch"], segment_ids)
                    a = float(connection["alpha"]) * warmup * m
                    if weight is not None:
                        a = a * weight
                    before = r
                    r, growth = nag_write(r, f, a)
                    s = s + growth
                    taps.append({"gain": a, "gate": told, "norm": np.exp(s)})
                    after = r
                else:
                    scale = connection["norm"]["scale"]
                    inner = rms_norm(x, scale, options.norm_epsilon)
                    told, m = self.gates(name, index, inner, connection, warmup)
                    f, weight = self.weighted_branch(name, index, inner, w["branch"], segment_ids)
                    if weight is not None:
                        f = f * weight[:, None]
                    if m is not None:
                        f = f * m[:, None]
                    before = x / rms(x)
                    gain = (rms(f) / rms(x))[:, 0]
                    x = f if self.kind == "residual_free" else x + f
                    taps.append({"gain": gain, "norm": rms(x)[:, 0]})
                    if told is not None:
                        taps[-1]["gate"] = told
                    after = x / rms(x)
                cosine = np.mean(before * after, axis=-1)
                taps[-1]["rotation"] = np.arccos(np.clip(cosine, -1, 1))
        if self.kind == "nag":
            return r, s, taps
        final = rms_norm(x, self.params["ends"]["final_norm"]["scale"], options.norm_epsilon)
        return final, np.zeros(len(x)), taps

    def logits(self, tokens, segment_ids, warmup=1.0):
        hidden, s, _ = self.hidden(tokens, segment_ids, warmup)
        table = self.params["table"]["rows"][: self.vocab_size]
        if self.kind == "nag":
            table = table / np.linalg.norm(table, axis=1, keepdims=True)
            return np.exp(s)[:, None] * (hidden / math.sqrt(hidden.shape[1])) @ table.T
        if self.options.connection.head == "free":
            table = self.params["ends"]["head"]
        return hidden @ table.T

    def nats(self, batch, warmup=1.0):
        """Negative log-likelihoods [B, T], 0 where the target is not valid."""
        out = []
        for tokens, segments, valid in zip(
            batch["tokens"], batch["segment_ids"], batch["valid"], strict=True
        ):
            logits = self.logits(tokens[:-1], segments[:-1], warmup)
            row = [-math.log(softmax(z)[y]) for z, y in zip(logits, tokens[1:], strict=True)]
            out.append(np.where(valid[1:], row, 0))
        return np.array(out)

    def summed_taps(self, batch, warmup=1.0):
        """Each tap summed over the valid targets, {name: [sub-layers]}."""
        total = None
        for tokens, segments, valid in zip(
            batch["tokens"], batch["segment_ids"], batch["valid"], strict=True
        ):
            taps = self.hidden(tokens[:-1], segments[:-1], warmup)[2]
            row = {n: np.array([np.sum(t[n][valid[1:]]) for t in taps]) for n in taps[0]}
            total = row if total is None else {n: total[n] + row[n] for n in row}
        return total
