"""Every transform of matrices against float64 references, over steps that reorder the bases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_preconditioners import KLShampoo, Shampoo, Soap, Steepest

from nag_jax.optim import (
    scale_by_kl_shampoo,
    scale_by_shampoo,
    scale_by_sign,
    scale_by_soap,
    scale_by_spectral,
)

STEPS = 50

# A leaf of each kind: its shape, its matrix axes, and its matrices as NumPy sees them.
LEAVES = {
    "square": ((6, 6), ((0,), (1,))),
    "tall": ((9, 4), ((0,), (1,))),
    "wide": ((3, 8), ((0,), (1,))),
    "row": ((1, 5), ((0,), (1,))),
    "stacked": ((3, 5, 4), ((1,), (2,))),
    "experts": ((2, 3, 4, 5), ((2,), (3,))),
    "heads": ((2, 6, 3, 4), ((1,), (3,))),  # a matrix for each head
    "joined": ((2, 6, 3, 2), ((1,), (2, 3))),  # all heads as one matrix
}

CASES = {
    "soap": (lambda m: scale_by_soap(refresh_every=4, matrices=m), lambda: Soap(every=4)),
    "soap, options": (
        lambda m: scale_by_soap(0.9, 0.99, 0.8, 1e-6, refresh_every=6, matrices=m),
        lambda: Soap(0.9, 0.99, 0.8, 1e-6, every=6),
    ),
    "shampoo": (
        lambda m: scale_by_shampoo(b2=0.9, eps=1e-6, refresh_every=4, matrices=m),
        lambda: Shampoo(b2=0.9, eps=1e-6, every=4),
    ),
    "shampoo, 1/2 with trace": (
        lambda m: scale_by_shampoo(
            0.8, 0.95, 1e-4, 0.5, trace_scaling=True, grafting="none", refresh_every=3, matrices=m
        ),
        lambda: Shampoo(0.8, 0.95, 1e-4, 0.5, trace=True, graft=False, every=3),
    ),
    "shampoo, sums": (
        lambda m: scale_by_shampoo(b2=1.0, eps=1e-4, refresh_every=7, matrices=m),
        lambda: Shampoo(b2=1.0, eps=1e-4, every=7),
    ),
    "kl-shampoo": (
        lambda m: scale_by_kl_shampoo(refresh_every=4, matrices=m),
        lambda: KLShampoo(every=4),
    ),
    "kl-shampoo, options": (
        lambda m: scale_by_kl_shampoo(
            0.8, 0.9, 1e-3, 5, initial_scale=0.01, clamp_floor=2.0, matrices=m
        ),
        lambda: KLShampoo(0.8, 0.9, 1e-3, 5, scale=0.01, floor=2.0),
    ),
    "sign": (lambda m: scale_by_sign(), lambda: Steepest(spectral=False)),
    "sign, momentum": (lambda m: scale_by_sign(0.8), lambda: Steepest(False, 0.8)),
    "spectral": (lambda m: scale_by_spectral(matrices=m), lambda: Steepest(True)),
    "spectral, momentum": (
        lambda m: scale_by_spectral(0.7, matrices=m),
        lambda: Steepest(True, 0.7),
    ),
}


def gradients(shape, steps, seed):
    """Correlated gradients whose leading directions change places in the middle."""
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.normal(size=(shape[0], shape[0])))[0]
    right = np.linalg.qr(rng.normal(size=(shape[1], shape[1])))[0]
    scales = np.geomspace(1, 0.1, shape[0])[:, None] * np.geomspace(1, 0.2, shape[1])
    for step in range(steps):
        own = scales if step < steps // 2 else scales[::-1, ::-1]
        yield left @ (own * rng.normal(size=shape)) @ right.T


def matrices_of(leaf, axes):
    """The matrices of a leaf, one after the other."""
    rows, columns = axes
    batch = [i for i in range(leaf.ndim) if i not in (*rows, *columns)]
    moved = leaf.transpose(*batch, *rows, *columns)
    count = int(np.prod([leaf.shape[i] for i in batch], initial=1))
    size = int(np.prod([leaf.shape[i] for i in rows]))
    return moved.reshape(count, size, -1)


def leaf_of(matrices, shape, axes):
    """The inverse of `matrices_of`."""
    rows, columns = axes
    order = [*(i for i in range(len(shape)) if i not in (*rows, *columns)), *rows, *columns]
    return matrices.reshape([shape[i] for i in order]).transpose(np.argsort(order))


def run(make, leaves, steps=STEPS):
    """Gradients, directions in float64 and the state, each by step."""
    shapes = {name: LEAVES[name][0] for name in leaves}
    axes = {name: LEAVES[name][1] for name in leaves}
    transform = make(axes)
    streams = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        matrices = matrices_of(np.zeros(shape), axes[name])
        streams[name] = [
            gradients(one.shape, steps, 100 * seed + i) for i, one in enumerate(matrices)
        ]
    fed = [
        {
            name: leaf_of(np.stack([next(s) for s in each]), shapes[name], axes[name])
            for name, each in streams.items()
        }
        for _ in range(steps)
    ]
    state = transform.init(jax.tree.map(jnp.zeros_like, fed[0]))
    update = jax.jit(transform.update)
    found, states = [], []
    for step in fed:
        directions, state = update(step, state)
        found.append(jax.device_get(directions))
        states.append(jax.device_get(state))
    return fed, found, states


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * ("," in case)) for case in CASES]
)
def test_fifty_steps(case):
    make, reference = CASES[case]
    fed, found, states = run(make, LEAVES)
    for name, (shape, axes) in LEAVES.items():
        matrices = matrices_of(np.zeros(shape), axes)
        references = [reference() for _ in matrices]
        for step in range(STEPS):
            expected = np.stack(
                [
                    one(g)
                    for one, g in zip(references, matrices_of(fed[step][name], axes), strict=True)
                ]
            )
            actual = matrices_of(found[step][name], axes)
            scale = max(np.abs(expected).max(), 1e-12)
            error = np.abs(actual - expected).max() / scale
            assert error < 1e-6, (name, step, error)
            if step == 0 and hasattr(references[0], "adopt"):
                left, right = (
                    states[0].arrays[f"{side}_basis"][name].reshape(len(matrices), size, size)
                    for side, size in zip(("left", "right"), matrices.shape[1:], strict=True)
                )
                for one, of_left, of_right in zip(references, left, right, strict=True):
                    one.adopt(of_left, of_right)
        if isinstance(references[0], Soap) and shape[0] > 1:
            assert all(one.reordered for one in references), name
