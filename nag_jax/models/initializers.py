"""Initial values of weights: pure functions of a key, float32, all usable under `jax.vmap`.

Matrices are in the layout [inputs, outputs] of x W. Which of them a layer takes is a kind of
`model.initialisation` (`initialisation.py`). P2 is arXiv 2605.25880.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Muon's polynomial multiplies a tiny singular value by 3.4 at each step and brings all to between
# 0.7 and 1.2; the cubic one then brings them to 1, with errors that are squared at each step.
_STEEP = (3.4445, -4.7750, 2.0315)
_STEEP_STEPS = 18
_CUBIC = (1.5, -0.5, 0.0)
_CUBIC_STEPS = 5


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

    W^T W = I if outputs <= inputs, W W^T = I if outputs >= inputs. W is the polar factor of a
    Gaussian matrix: like the matrix, it is distributed the same after any rotation from the left or
    the right, which makes it Haar's. Newton-Schulz iterations find it with products alone: fast
    for stacked layers on every device, and several QR decompositions in one program have been seen
    to wait for each other for ever on the CPU of jax 0.10.2.
    """
    rows, columns = sorted((inputs, outputs))
    x = jax.random.normal(key, (rows, columns), jnp.float32)
    x = x / jnp.sqrt(jnp.sum(x * x))
    # The singular values of a Gaussian matrix lie about as far apart as the square roots of its
    # sides: of a nearly square one the least may be tiny.
    steep = _STEEP_STEPS if columns < 1.5 * rows else _STEEP_STEPS // 3

    def step(coefficients, x):
        a, b, c = coefficients
        with jax.default_matmul_precision("highest"):
            gram = x @ x.T
            return a * x + (b * gram + c * (gram @ gram)) @ x

    x = jax.lax.fori_loop(0, steep, lambda _, x: step(_STEEP, x), x)
    x = jax.lax.fori_loop(0, _CUBIC_STEPS, lambda _, x: step(_CUBIC, x), x)
    return x if inputs <= outputs else x.T


def scaled_uniform_orthogonal(
    key: jax.Array, inputs: int, outputs: int
) -> Float[Array, "inputs outputs"]:
    """Scaled uniform orthogonal weights (SUO): Haar times max(sqrt(outputs/inputs), 1), float32.

    Entries of x W have the size of x's: W W^T = (outputs/inputs) I where W widens, W^T W = I where
    it narrows. The factor is that of google-deepmind/dks, `dks/jax/parameter_sampling_functions.py`
    (Martens et al., arXiv 2110.01765); P2 names the initialisation.
    """
    return max(math.sqrt(outputs / inputs), 1.0) * semi_orthogonal(key, inputs, outputs)
