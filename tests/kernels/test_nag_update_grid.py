"""Every implementation of the update over the sizes, gains and branches that training meets.

Inputs are fresh in every run; a failure prints the seed that `NAG_UPDATE_SEED` brings back. The
reference here is written from the equations, apart from the package, and differentiated in float64.
"""

import itertools
import os
import secrets

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_nag_update import DELTA, TINY, interpreted_all_the_same, marks, update_and_gradients

from pallas_kernels.nag_update import IMPLEMENTATIONS
from pallas_kernels.nag_update.dispatch import KERNELS

WIDTHS = (3, 5, 64, 127, 300, 928, 1024, 1408, 3001, 8192)
TOKENS = (1, 7, 127, 4096)
GAINS = (0.0, 1e-4, 1.0, 4.0)
BRANCHES = ("plain", "parallel", "zero", "huge", "tiny")
COMBINATIONS = tuple(itertools.product(GAINS, BRANCHES))
QUICK = {(5, 127), (300, 7), (928, 1)}  # the rest is in the slow suite
EPSILON = {"float32": 1.2e-7, "bfloat16": 7.9e-3}
# Entries that a case may have: kernels for GPU are interpreted slowly.
LARGEST = dict.fromkeys(IMPLEMENTATIONS, 2**18) | {"reference": 2**22, "mosaic_tpu": 2**22}


def serves(name, width):
    return name == "reference" or not KERNELS[name].refusal(width, [np.dtype("float32")])


def drawn(name, width, tokens, dtype):
    """The kernel for TPU in both dtypes at all sizes, the others at a third of these."""
    place = WIDTHS.index(width) + TOKENS.index(tokens) + (dtype == "float32")
    return name == "mosaic_tpu" or place % 3 == 0 or (width, tokens) in QUICK


CASES = [
    pytest.param(
        name,
        width,
        tokens,
        dtype,
        marks=[pytest.mark.slow] * ((width, tokens) not in QUICK) + marks(name),
    )
    for name in IMPLEMENTATIONS
    for width in WIDTHS
    for tokens in TOKENS
    for dtype in EPSILON
    if width * tokens <= LARGEST[name] and serves(name, width) and drawn(name, width, tokens, dtype)
]

__all__ = ["interpreted_all_the_same"]  # a fixture that holds here, too


def definition(r, f, a):
    """Equations (10) to (17) with the two floors, in float64."""
    d = r.shape[-1]
    f = f - jnp.mean(f, axis=-1, keepdims=True)
    o = f - jnp.sum(f * r, -1, keepdims=True) / jnp.sum(r * r, -1, keepdims=True) * r
    o_sq = jnp.sum(o * o, -1, keepdims=True)
    length = jnp.sqrt(o_sq + DELTA**2 * jnp.sum(f * f, -1, keepdims=True) + TINY)
    written = r + a[..., None] * jnp.sqrt(d) * o / length
    rms = jnp.sqrt(jnp.mean(written**2, axis=-1, keepdims=True))
    return written / rms, 0.5 * jnp.log1p(a * a * (o_sq / length**2)[..., 0])


def inputs_of(width, tokens, dtype, rng):
    """(direction, branch, gain, combination of each token), the tokens with every combination."""
    r = rng.normal(size=(tokens, width))
    r = r - r.mean(axis=-1, keepdims=True)
    r = r / np.sqrt(np.mean(r * r, axis=-1, keepdims=True))
    which = rng.permutation(np.arange(tokens) % len(COMBINATIONS))
    if tokens == 1:
        which = rng.integers(len(COMBINATIONS), size=1)
    gains, kinds = zip(*(COMBINATIONS[i] for i in which), strict=True)
    f = 0.5 + 0.3 * r + rng.normal(size=r.shape)
    for kind, branch in (
        ("parallel", -3 * r),
        ("zero", 0 * r),
        ("huge", 1e4 * f),
        ("tiny", 1e-6 * f),
    ):
        f = np.where((np.array(kinds) == kind)[:, None], branch, f)
    return jnp.asarray(r, dtype), jnp.asarray(f, dtype), jnp.asarray(gains, jnp.float32), kinds


def worst(error, limit):
    return float(np.max(np.asarray(error) / np.asarray(limit), initial=0.0))


@pytest.mark.parametrize("implementation, width, tokens, dtype", CASES)
def test_values_and_gradients_over_the_grid(implementation, width, tokens, dtype, x64):
    seed = int(os.environ.get("NAG_UPDATE_SEED") or secrets.randbits(32))
    print(f"NAG_UPDATE_SEED={seed}")
    rng = np.random.default_rng(seed)
    r, f, a, kinds = inputs_of(width, tokens, dtype, rng)
    c = jnp.asarray(rng.normal(size=r.shape), dtype)
    g = jnp.asarray(rng.normal(size=tokens), jnp.float32)
    broken = rng.integers(tokens) if tokens > 1 else -1
    sound = np.arange(tokens) != broken
    if broken >= 0:
        f = f.at[broken, 0].set(jnp.asarray(rng.choice([np.nan, np.inf]), dtype))

    (out, growth), gradients = jax.tree.map(
        lambda x: np.asarray(x, np.float64), update_and_gradients((r, f, a), (c, g), implementation)
    )
    exact = [np.asarray(x, np.float64)[sound] for x in (r, f, a, c, g)]
    (wanted_out, wanted_growth), pull_back = jax.vjp(definition, *map(jnp.asarray, exact[:3]))
    wanted = [np.asarray(x) for x in pull_back((jnp.asarray(exact[3]), jnp.asarray(exact[4])))]
    if broken >= 0:
        assert not np.all(np.isfinite(out[broken])) or a[broken] == 0
    out, growth, *gradients = (x[sound] for x in (out, growth, *gradients))
    assert all(np.all(np.isfinite(x)) for x in (out, growth, *gradients))
    r, f, a, c, g = exact
    kinds = np.array(kinds)[sound]

    # How much rounding the equations magnify: a nearly parallel branch keeps few digits.
    f_centred = f - f.mean(-1, keepdims=True)
    o = f_centred - np.sum(f_centred * r, -1, keepdims=True) / np.sum(r * r, -1, keepdims=True) * r
    size, o_size = (np.linalg.norm(x, axis=-1) + 1e-10 for x in (f, o))
    lost = np.where(kinds == "zero", 1.0, size / np.maximum(o_size, DELTA * size))
    step = EPSILON["float32"] * (8 + np.sqrt(width)) * (1 + a) * lost  # of statistics, in float32
    rounding = EPSILON[dtype]

    wanted_out = np.where(a[:, None] == 0, r, wanted_out)
    largest = np.abs(wanted_out).max(-1)
    assert worst(np.abs(out - wanted_out).max(-1), (rounding + step) * largest) <= 1
    np.testing.assert_array_equal(out[a == 0], r[a == 0])
    # A parallel branch's update is that of its rounding, as the first floor bounds it; of its
    # gradients finite is all that can be asked.
    clear = kinds != "parallel"
    noise = (EPSILON["float32"] * (8 + np.sqrt(width)) / DELTA) ** 2
    growth_limit = 1e-7 + 4 * step * wanted_growth + np.where(clear, 0, a * a * noise)
    assert worst(np.abs(growth - np.where(a == 0, 0, wanted_growth)), growth_limit) <= 1

    pushed = np.abs(c).max(-1) * np.sqrt(width)
    s = a * np.sqrt(width) / np.maximum(o_size, DELTA * size + 1e-10)
    scales = (
        np.abs(wanted[0]).max(-1) + np.abs(c).max(-1) * (1 + a),
        np.abs(wanted[1]).max(-1) + s * np.abs(c).max(-1),
        np.abs(wanted[2]) + np.sum(np.abs(c), -1) * pushed / width + np.abs(g),
    )
    for name, got, one, scale in zip("rfa", gradients, wanted, scales, strict=True):
        error = np.abs(got - one)
        error = error.max(-1) if error.ndim > 1 else error
        limit = ((rounding if name != "a" else 0) + 4 * step) * scale + 1e-30
        assert worst(error[clear], limit[clear]) <= 1, name
