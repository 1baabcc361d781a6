"""The contractions that block weights go through, all but the convolutions of CCGQA.

Numerics hang on a contraction's `site`, a stable name such as "attention/query", and touch no
module: compute dtype today, quantisation and capture by the same names.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from nag_jax.models.rows import grouped_matmul
from nag_jax.sharding import rules

# Products of float32 are float32: the default rounds them to bfloat16 on TPU and TF32 on GPU.
# Products of bfloat16 are not touched by it.
PRECISION = jax.lax.Precision.HIGHEST

GROUPED_PRODUCT = "grouped_product"


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
    w: nnx.Param | jax.Array,
    numerics: Numerics,
    *,
    inputs: int = 1,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Contracts the last axes of an activation with the first axes of a weight.

    Both are flattened to matrices for the product: with three or more axes XLA's CPU backend
    transposes activations in the backward pass, which made a feed-forward layer 2.5 times slower.

    On a mesh a parameter stays split along its heads or hidden units, and so do the products of the
    layer that begins with it; the product that contracts them is summed over devices.

    Args:
        site: Stable name of the place, for numerics chosen by name.
        x: Activation [..., *in].
        w: Weight [*in, *out] in its stored dtype: a parameter made by `declare`, whose axes say how
            it is split, or an array, which every device uses whole.
        numerics: The model's numerics.
        inputs: Number of axes in `in`.
        dtype: Dtype of this contraction where it is not the compute dtype (gates need more).

    Returns:
        The product [..., *out] in that dtype.
    """
    dtype = numerics.dtype if dtype is None else dtype
    tokens, out = x.shape[: x.ndim - inputs], w.shape[inputs:]
    width = math.prod(w.shape[:inputs])
    with jax.named_scope(site):
        matrix = gathered(w, dtype).reshape(width, -1)
        product = jnp.matmul(x.astype(dtype).reshape(-1, width), matrix, precision=PRECISION)
        return product.reshape(*tokens, *out)


def gathered(w: nnx.Param | jax.Array, dtype: jnp.dtype) -> jax.Array:
    """A weight as devices use it (see `rules.gather_weight`), cast before it is sent anywhere."""
    if isinstance(w, nnx.Variable):
        return rules.gather_weight(w[...].astype(dtype), w.get_metadata().get("axes"))
    return rules.gather_weight(w.astype(dtype))


def contract_grouped(
    site: str,
    rows: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    numerics: Numerics,
    implementation: str,
) -> jax.Array:
    """As `contract`, with rows sorted by expert and a weight of its own for each expert.

    The product carries the name `GROUPED_PRODUCT` for remat policies, which cannot know it as a
    matrix product.

    Args:
        site: Stable name of the place.
        rows: Activation [N, in].
        w: Weights [E, in, out] as this device uses them, in their stored dtype.
        group_sizes: int32 [E], rows of each expert, N at most in all.
        numerics: The model's numerics.
        implementation: The name of a choice of `rows.choose`.

    Returns:
        The products [N, out] in the compute dtype; rows past the total are zero.
    """
    with jax.named_scope(site):
        product = grouped_matmul(
            rows.astype(numerics.dtype), w.astype(numerics.dtype), group_sizes, implementation
        )
        return checkpoint_name(product, GROUPED_PRODUCT)


def scores(hidden: jax.Array, rows: jax.Array, numerics: Numerics) -> jax.Array:
    """Inner products of hidden states [..., d] with rows [V, d]: [..., V], at least float32.

    Flattened for the same reason as `contract`.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    products = inner_products(
        "nd,vd->nv", flat, rows.astype(hidden.dtype), numerics.statistics_dtype
    )
    return products.reshape(*hidden.shape[:-1], -1)


def inner_products(indices: str, x: jax.Array, y: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The decode's product of two matrices, or a gradient's of it, as wide as `dtype`."""
    with jax.named_scope("decode"):
        return jnp.einsum(indices, x, y, precision=PRECISION, preferred_element_type=dtype)
