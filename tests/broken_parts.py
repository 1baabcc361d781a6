"""Parts that each break one thing that parts must keep; `nag_jax.check` has to name it."""

import jax
import jax.numpy as jnp
from flax import nnx

from nag_jax.models.attention import GroupedQueryAttention
from nag_jax.models.connections import PreNorm
from nag_jax.models.context import BranchOut
from nag_jax.models.feedforward import MLP
from nag_jax.parameters import declare


class Unmasked(GroupedQueryAttention):
    """Adds what all tokens of the row have in common."""

    def __call__(self, x, keep, context):
        out = super().__call__(x, keep, context)
        return BranchOut(out.y + jnp.mean(out.y, axis=1, keepdims=True), cache=out.cache)


class BehindAZero(Unmasked):
    """The same behind a gain that starts at zero."""

    def __init__(self, options, d_model, initialisation, numerics, rngs):
        super().__init__(options, d_model, initialisation, numerics, rngs)
        self.gain = declare(jnp.zeros(()), (), "scale")

    def __call__(self, x, keep, context):
        out = super().__call__(x, keep, context)
        return BranchOut(self.gain[...].astype(out.y.dtype) * out.y, cache=out.cache)


class Neighbour(MLP):
    """Mixes in the token before, of whatever document."""

    def __call__(self, x, keep, context):
        before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
        return super().__call__(x + before, keep, context)


class RowPositions(GroupedQueryAttention):
    """Counts positions from the row's start."""

    def __call__(self, x, keep, context):
        x = x + jnp.arange(x.shape[1], dtype=x.dtype)[:, None] / x.shape[1]
        return super().__call__(x, keep, context)


class Forgetful(GroupedQueryAttention):
    """Leaves the columns of single tokens out of its cache."""

    def __call__(self, x, keep, context):
        out = super().__call__(x, keep, context)
        cache = context.cache
        return out if cache is None or cache.prefill else BranchOut(out.y, cache=cache)


class NoDirection(PreNorm):
    """Describes the stream by itself instead of by its direction."""

    @staticmethod
    def describe(stream):
        return stream[0], PreNorm.describe(stream)[1]


class Undeclared(MLP):
    """Has a parameter without axes and role."""

    def __init__(self, options, d_model, initialisation, numerics, rngs):
        super().__init__(options, d_model, initialisation, numerics, rngs)
        self.extra = nnx.Param(jnp.zeros(d_model))


class NoGradient(MLP):
    """Finite itself; its gradient is not."""

    def __call__(self, x, keep, context):
        out = super().__call__(x, keep, context)
        return BranchOut(out.y + jnp.sqrt(out.y * 0))


class Unused(MLP):
    """Has a parameter that nothing uses."""

    def __init__(self, options, d_model, initialisation, numerics, rngs):
        super().__init__(options, d_model, initialisation, numerics, rngs)
        self.idle = declare(jax.random.normal(rngs.params(), (d_model,)), ("embed",), "scale")


class Raises(MLP):
    """Fails by itself."""

    def __call__(self, x, keep, context):
        raise ValueError("no [such] rows")


class OnAMesh(MLP):
    """Gives something else under a mesh."""

    def __call__(self, x, keep, context):
        out = super().__call__(x, keep, context)
        return out if jax.sharding.get_abstract_mesh().empty else BranchOut(1.01 * out.y)
