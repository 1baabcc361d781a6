"""The one contraction that every block weight goes through.

Numerics hang on the contraction's `site`, a stable name such as "attention/query", and touch no
module: compute dtype today, quantisation and capture by the same names.
"""

import dataclasses

import jax
import jax.numpy as jnp

from nag_jax.sharding import rules


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Static numerics of the model.

    Attributes:
        compute_dtype: Name of the dtype of activations and of weights in use.
    """

    compute_dtype: str = "float32"

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of activations."""
        return jnp.dtype(self.compute_dtype)

    @property
    def statistics_dtype(self) -> jnp.dtype:
        """Dtype of norms, softmax, gates and log-norms: at least float32."""
        return jnp.promote_types(self.dtype, jnp.float32)


def contract(
    site: str,
    x: jax.Array,
    w: jax.Array,
    dims: str,
    numerics: Numerics,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Contracts an activation with a weight.

    Args:
        site: Stable name of the place, for numerics chosen by name.
        x: Activation.
        w: Weight in its stored dtype and layout.
        dims: Einsum specification of the two operands.
        numerics: The model's numerics.
        dtype: Dtype of this contraction where it is not the compute dtype (gates need more).

    Returns:
        The product in that dtype.
    """
    dtype = numerics.dtype if dtype is None else dtype
    with jax.named_scope(site):
        return jnp.einsum(dims, x.astype(dtype), rules.gather_weight(w.astype(dtype)))
