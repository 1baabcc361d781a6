"""Mixtures of depths in float64 NumPy: networks whose tokens skip, histograms and thresholds."""

import math

import numpy as np
from numpy_ccgqa import ccgqa
from numpy_network import GATE_FLOOR, Network, attention, beta_of, sigmoid, softmax
from test_moe import MoeNetwork

BINS, LIMIT = 1024, 16.0


class SkippingNetwork(MoeNetwork):
    """The network in NumPy, with thresholds by (block, sub-layer); those that lack skip nothing.

    Attributes:
        scores: By (block, sub-layer), those of the last row's tokens.
    """

    def __init__(self, options, vocab_size, params, balance, thresholds):
        super().__init__(options, vocab_size, params, balance)
        self.thresholds, self.scores = thresholds, {}

    def gates(self, name, index, x, connection, warmup):
        told, m = super().gates(name, index, x, connection, warmup)
        options, self.keep = self.options.skipping, np.ones(len(x), bool)
        self.scores[index, name] = told
        if options.score == "rotation":
            a = float(connection["alpha"]) * warmup * told
            self.scores[index, name] = np.sin(np.arctan(a))
        if (index, name) not in self.thresholds:
            return told, m
        threshold = self.thresholds[index, name]
        self.keep = self.scores[index, name] >= threshold
        if not options.hard:
            beta, total = 1.0, told
            if self.kind == "nag":
                gate = connection["modulator"]
                beta = beta_of(gate, self.options.connection)
                total = sigmoid(x @ gate["weight"] + gate["bias"]) @ softmax(gate["mixture_logits"])
            edge = threshold ** (1 / beta)
            m = np.maximum((total - edge) / (1 - edge), GATE_FLOOR) ** beta
        return told, np.where(self.keep, m, 0)

    def branch(self, name, x, w, segment_ids):
        if name == "feedforward":
            return super().branch(name, x, w, segment_ids)
        keys = self.keep if self.options.skipping.keys_values == "executed" else None
        options = self.options.attention
        if options.kind == "ccgqa":
            return ccgqa(x, w, options, segment_ids, keys=keys)
        return attention(x, w, options, segment_ids, keys)

    def weighted_branch(self, name, index, x, w, segment_ids):
        if index == 0 and name == "attention":
            self.auxiliary = 0.0
        if name == "attention" or "num_experts" not in self.options.feedforward:
            return Network.weighted_branch(self, name, index, x, w, segment_ids)
        before = self.auxiliary
        y, weight = super().weighted_branch(name, index, x, w, segment_ids)
        own = self.auxiliary - (before if index else 0.0)
        self.auxiliary = before + np.where(self.keep, own, 0)
        return y, weight


def bin_of(score):
    """The bin of a score by its logit."""
    place = (math.log(score) - math.log1p(-score) + LIMIT) / (2 * LIMIT) * BINS
    return min(max(math.floor(place), 0), BINS - 1)


def histogram(scores):
    """How many scores each bin has."""
    counts = np.zeros(BINS)
    for score in scores:
        counts[bin_of(score)] += 1
    return counts


def quantile(counts, share):
    """The score below which a share lies, by a walk over the bins."""
    wanted, below = share * counts.sum(), 0.0
    for number, count in enumerate(counts):
        if below + count >= wanted:
            inside = (wanted - below) / count if count else 0.0
            return sigmoid(-LIMIT + 2 * LIMIT / BINS * (number + inside))
        below += count
    raise AssertionError
