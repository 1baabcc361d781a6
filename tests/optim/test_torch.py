"""Against PyTorch implementations of the same variants; skipped where they are not installed.

`pip install torch pytorch_optimizer` is all they need. Of the other optimizers no package has the
same variant: pytorch_optimizer's Shampoo and ScalableShampoo add up their factors from a multiple
of the identity and graft otherwise.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_references import gradients

from nag_jax.optim import muon, soap

torch = pytest.importorskip("torch")
STEPS = 50


def trained(transform, start, grads):
    """The weights after all steps of an optax transform."""
    params = {"w": jnp.asarray(start)}
    state = transform.init(params)
    step = jax.jit(transform.update)
    for grad in grads:
        updates, state = step({"w": jnp.asarray(grad)}, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return np.asarray(params["w"])


def trained_by_torch(make, start, grads):
    """The same of an optimizer of PyTorch."""
    weights = torch.nn.Parameter(torch.tensor(start))
    optimizer = make([weights])
    for grad in grads:
        weights.grad = torch.tensor(grad)
        optimizer.step()
    return weights.detach().numpy()


@pytest.mark.parametrize(
    "adjust, scaling", [("original", "keller"), ("match_rms_adamw", "moonshot")]
)
@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (3, 8)])
def test_muon(adjust, scaling, shape, x64):
    """torch.optim.Muon: [out, in], its iteration in bfloat16, so equal within a few percent.

    It averages momentum under either scaling; moonshot's sum is that over 1 - mu, which the
    iteration does not see.
    """
    del x64
    grads = list(gradients(shape, STEPS, 0))
    start = np.random.default_rng(1).normal(size=shape)
    ours = trained(muon(0.02, 0.1, scaling=scaling, newton_schulz_dtype="bfloat16"), start, grads)
    theirs = trained_by_torch(
        lambda weights: torch.optim.Muon(weights, 0.02, 0.1, adjust_lr_fn=adjust),
        start.T.copy(),
        [grad.T.copy() for grad in grads],
    ).T
    moved = np.abs(theirs - start).max()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=0.05 * moved)


@pytest.mark.parametrize("decay, tolerance", [(0.0, 1e-4), (0.1, 2e-3)])
def test_soap(decay, tolerance, x64):
    """pytorch_optimizer.SOAP, which rotates its momentum anew in each step; QR in float32.

    A square matrix: of any other the first gradient leaves one factor without full rank, where each
    implementation takes its own basis of what is missing. It decays after the step, the step too,
    where ours decays the weights from before it: a relative difference of rate times decay.
    """
    del x64
    others = pytest.importorskip("pytorch_optimizer")
    grads = list(gradients((6, 6), STEPS, 0))
    start = np.random.default_rng(1).normal(size=(6, 6))
    ours = trained(soap(0.01, decay, refresh_every=4), start, grads)
    theirs = trained_by_torch(
        lambda weights: others.SOAP(weights, 0.01, weight_decay=decay, precondition_frequency=4),
        start,
        grads,
    )
    moved = np.abs(theirs - start).max()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * moved)
