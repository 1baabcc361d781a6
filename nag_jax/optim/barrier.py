"""An identity across which the compiler infers no sharding."""

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir.dialects import sdy
from jaxtyping import Array


def sharding_barrier(x: Array) -> Array:
    """Returns x; how it is split is inferred neither from its uses nor for them.

    What is split by hand for one operation alone would otherwise spread to what its operands are
    made from and to what is made of its results, and whatever of that must be whole is gathered
    outside of any conditional. Values, gradients and `vmap` pass through.
    """
    return _barrier.bind(x)


def _lower(context, operand):
    del context
    # Without the Shardy partitioner nobody could read the operation.
    if not jax.config.jax_use_shardy_partitioner:
        return [operand]
    return [sdy.propagation_barrier(operand, sdy.PropagationDirection.NONE)]


_barrier = Primitive("sharding_barrier")
_barrier.def_impl(lambda x: x)
_barrier.def_abstract_eval(lambda x: x)
mlir.register_lowering(_barrier, _lower)
ad.deflinear2(_barrier, lambda cotangent, _: [_barrier.bind(cotangent)])
batching.defvectorized(_barrier)
