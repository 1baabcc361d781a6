"""Initial values of weights: pure functions of a key, float32, all usable under `jax.vmap`.

Matrices are in the layout [inputs, outputs] of x W. Which of them a layer takes is a kind of
`model.initialisation` (`initialisation.py`). P2 is arXiv 2605.25880.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def fan_in_normal(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    """Normal values of standard deviation 1/sqrt(fan_in), float32."""
    return jax.random.normal(key, shape, jnp.float32) / math.sqrt(fan_in)


def gaussian(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    """Normal values of standard deviation `std`, float32."""
    return std * jax.random.normal(key, shape, jnp.float32)


def xavier(key: jax.Array, shape: tuple[int, ...], fan_in: int, fan_out: int) -> jax.Array:
    """Normal values of variance 2/(fan_in + fan_out), float32 (Glorot and Bengio 2010)."""
    return gaussian(key, shape, math.sqrt(2 / (fan_in + fan_out)))


def kaiming(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    """Normal values of variance 2/fan_in, float32 (He et al. 2015)."""
    return gaussian(key, shape, math.sqrt(2 / fan_in))


def semi_orthogonal(key: jax.Array, inputs: int, outputs: int) -> Float[Array, "inputs outputs"]:
    """A Haar-distributed matrix W with orthonormal columns or rows, float32.

    W^T W = I if outputs <= inputs, W W^T = I if outputs >= inputs. From the QR decomposition of a
    Gaussian matrix with the signs that make R's diagonal positive.
    """
    with jax.default_matmul_precision("highest"):
        return jax.random.orthogonal(key, inputs, (), jnp.float32, outputs)


def scaled_uniform_orthogonal(
    key: jax.Array, inputs: int, outputs: int
) -> Float[Array, "inputs outputs"]:
    """Scaled uniform orthogonal weights (SUO): Haar times max(sqrt(outputs/inputs), 1), float32.

    Entries of x W have the size of x's: W W^T = (outputs/inputs) I where W widens, W^T W = I where
    it narrows. The factor is that of google-deepmind/dks, `dks/jax/parameter_sampling_functions.py`
    (Martens et al., arXiv 2110.01765); P2 names the initialisation.
    """
    return max(math.sqrt(outputs / inputs), 1.0) * semi_orthogonal(key, inputs, outputs)
