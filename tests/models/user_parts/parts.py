"""A connection, two branches and some mistakes, declared as a user of the package would."""

import jax
import jax.numpy as jnp
from flax import nnx

from nag_jax.models.attention import GroupedQueryAttention
from nag_jax.models.connections import PreNorm, Written
from nag_jax.models.context import BranchOut
from nag_jax.models.linear import contract
from nag_jax.parameters import declare


class HalfPreNorm(PreNorm):
    """Pre-norm that adds a fixed share of the branch."""

    @staticmethod
    def defaults():
        return {**PreNorm.defaults(), "share": 0.5}

    def __init__(self, options, d_model, index, numerics, rngs):
        super().__init__(options, d_model, index, numerics, rngs)
        self.share = options.share

    def write(self, stream, out, gate, context):
        scaled = BranchOut(self.share * out.y, out.weight)
        written = super().write(stream, scaled, gate, context)
        return Written(written.stream, written.gain)


class DoubledAttention(GroupedQueryAttention):
    """The package's attention times a learned scalar that starts at 2."""

    def __init__(self, options, d_model, initialisation, numerics, rngs):
        super().__init__(options, d_model, initialisation, numerics, rngs)
        self.factor = declare(jnp.asarray(2.0), (), "scale")

    def __call__(self, x, keep, context):
        out = super().__call__(x, keep, context)
        return BranchOut(self.factor[...] * out.y, cache=out.cache)


class Forgetful(DoubledAttention):
    """Drops the cache that it is given."""

    def __call__(self, x, keep, context):
        return BranchOut(super().__call__(x, keep, context).y)


class Cacheless(nnx.Module):
    """Attention with nothing of its own for decoding."""

    defaults = staticmethod(GroupedQueryAttention.defaults)
    context_flops = staticmethod(GroupedQueryAttention.context_flops)

    def __init__(self, options, d_model, initialisation, numerics, rngs):
        self.inner = GroupedQueryAttention(options, d_model, initialisation, numerics, rngs)

    def __call__(self, x, keep, context):
        return self.inner(x, keep, context)


class Diagonal(nnx.Module):
    """y = W x with a router's weight of its own choice for each token."""

    @staticmethod
    def defaults():
        return {"weight": 0.25}

    def __init__(self, options, d_model, initialisation, numerics, rngs):
        values = jax.random.normal(rngs.params(), (d_model, d_model))
        self.kernel = declare(
            values, ("embed", "hidden"), "matrix", rows=("embed",), columns=("hidden",)
        )
        self.weight, self.numerics = options.weight, numerics

    def __call__(self, x, keep, context):
        y = contract("user/kernel", x, self.kernel, self.numerics)
        weight = None if self.weight == 0 else jnp.full(x.shape[:2], self.weight)
        return BranchOut(y, weight)


class Undeclared(Diagonal):
    """Makes a parameter without a record."""

    def __init__(self, options, d_model, initialisation, numerics, rngs):
        super().__init__(options, d_model, initialisation, numerics, rngs)
        self.extra = nnx.Param(jnp.zeros(d_model))


class UnknownAxis(Diagonal):
    """Names an axis that does not exist, through the helper."""

    def __init__(self, options, d_model, initialisation, numerics, rngs):
        self.kernel = declare(jnp.zeros(d_model), ("wavelength",), "scale")


class UnknownRole(Diagonal):
    """Names a role that does not exist, as metadata of its own."""

    def __init__(self, options, d_model, initialisation, numerics, rngs):
        self.kernel = nnx.Param(jnp.zeros(d_model), axes=("embed",), role="colour")


class HandMadeAxis(Diagonal):
    """Names an axis that does not exist, as metadata of its own."""

    def __init__(self, options, d_model, initialisation, numerics, rngs):
        self.kernel = nnx.Param(jnp.zeros(d_model), axes=("wavelength",), role="scale")


class HandMade(Diagonal):
    """A right record written as plain metadata, without the helper."""

    def __init__(self, options, d_model, initialisation, numerics, rngs):
        super().__init__(options, d_model, initialisation, numerics, rngs)
        self.shift = nnx.Param(jnp.zeros(d_model), axes=("embed",), role="bias")
