"""An attention that decodes from a memory of constant size, and a connection that can let go."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from nag_jax.models.attention import head_projection
from nag_jax.models.connections import PreNorm, Written, weighted
from nag_jax.models.context import BranchOut
from nag_jax.models.linear import contract
from nag_jax.models.norms import root_mean_square
from nag_jax.parameters import declare

einsum = functools.partial(jnp.einsum, precision="highest")


class LinearAttention(nnx.Module):
    """y_t = sum_s f(q_t).f(k_s) v_s / sum_s f(q_t).f(k_s), s <= t in t's document, f = elu + 1."""

    @staticmethod
    def defaults():
        return {"num_heads": 4, "head_dim": 32}

    @staticmethod
    def context_flops(options, length):  # of one token, as __call__ computes whole rows
        return 4.0 * options.num_heads * options.head_dim * length

    @staticmethod
    def cache_shapes(options, d_model, batch, length, dtype):  # sums of f(k) [v, 1]
        shape = (batch, options.num_heads, options.head_dim, options.head_dim + 1)
        return {"memory": jax.ShapeDtypeStruct(shape, jnp.float32)}

    def __init__(self, options, d_model, initialisation, numerics, rngs):
        heads, width = options.num_heads, options.head_dim
        weights = initialisation.attention(rngs, d_model, heads, heads, width)
        self.query = head_projection(weights.query, "heads")
        self.key = head_projection(weights.key, "heads")
        self.value = head_projection(weights.value, "heads")
        axes = ("heads", "head_dim", "embed")
        self.output = declare(weights.output, axes, "matrix", rows=axes[:2], columns=axes[2:])
        self.numerics = numerics

    def __call__(self, x, keep, context):
        def project(site, weight):
            y = contract(f"attention/{site}", x, weight, self.numerics)
            return y.astype(self.numerics.statistics_dtype)

        q, k = nnx.elu(project("query", self.query)) + 1, nnx.elu(project("key", self.key)) + 1
        v = project("value", self.value)
        v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)  # for the sum of weights
        segments, cache = context.segment_ids, context.cache
        if cache is None or cache.prefill:
            seen = jnp.tril(segments[:, :, None] == segments[:, None, :])
            weights = einsum("bthf,bshf->bhts", q, k) * seen[:, None]
            out = einsum("bhts,bshe->bthe", weights, v)
        if cache is not None:
            k = k * (segments > 0)[..., None, None]  # padding on the left leaves no trace
            memory = cache.read("memory") + einsum("bthf,bthe->bhfe", k, v)
            cache = cache.replace("memory", memory)
            if not cache.prefill:
                out = einsum("bthf,bhfe->bthe", q, memory)
        y = out[..., :-1] / out[..., -1:]
        y = contract("attention/output", y, self.output, self.numerics, inputs=2)
        return BranchOut(y, cache=cache)


class Highway(PreNorm):
    """R <- (1 - z) R + z f(norm(R)), with z = sigmoid(norm(R).w + b) for each token.

    What it reads, its two ends and their options are pre-norm's.
    """

    @staticmethod
    def defaults():
        return PreNorm.defaults() | {"bias_init": -1.0}

    @staticmethod
    def rate_multipliers():
        return PreNorm.rate_multipliers() | {"gate": 0.1}

    def __init__(self, options, d_model, index, numerics, rngs):
        super().__init__(options, d_model, index, numerics, rngs)
        self.weight = declare(jnp.zeros(d_model), ("embed",), "gate")
        self.bias = declare(jnp.asarray(options.bias_init), (), "gate")

    def write(self, stream, out, gate, context):
        x = self.read(stream).astype(jnp.float32)
        z = jax.nn.sigmoid(einsum("btd,d->bt", x, self.weight[...]) + self.bias[...])
        share = z[..., None].astype(stream[0].dtype)
        return Written(((1 - share) * stream[0] + share * weighted(out),), z)

    @staticmethod
    def describe(stream):  # a direction of norm sqrt(d), and the log of the rest
        rms = root_mean_square(stream[0])
        return stream[0] / rms, jnp.log(rms[..., 0])
