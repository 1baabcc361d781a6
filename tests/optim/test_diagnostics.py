"""Numbers about optimizers against NumPy, and in the log of a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizer_examples import config, model_infos, random_like
from run_helpers import place_of_session, results

from nag_jax.optim import build_optimizer, scale_by_soap
from nag_jax.optim.diagnostics import (
    diagnostics,
    factor_conditions,
    failures,
    orthogonality_error,
    update_rms_by_role,
)
from nag_jax.optim.roles import MatrixAxes
from nag_jax.parameters import flatten
from nag_jax.training.loop import train

INFOS = model_infos()


def test_sizes_of_updates():
    updates = random_like(INFOS, 0)
    found = update_rms_by_role(updates, INFOS)
    for role in ("matrix", "embedding", "gate"):
        flat = [
            np.ravel(x) for path, x in flatten(updates).items() if flatten(INFOS)[path].role == role
        ]
        expected = np.sqrt(np.mean(np.concatenate(flat).astype(float) ** 2))
        assert float(found[role]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_distance_from_orthogonality(shape):
    w = np.random.default_rng(0).normal(size=(3, *shape))
    found = orthogonality_error(jnp.asarray(w, jnp.float32), MatrixAxes((1,), (2,)))
    for one, value in zip(w, found, strict=True):
        singular = np.linalg.svd(one, compute_uv=False)
        expected = np.sqrt(np.sum((singular**2 - 1) ** 2) / min(shape))
        assert float(value) == pytest.approx(expected, rel=1e-5)
    q = np.linalg.qr(w[0] if shape[0] > shape[1] else w[0].T)[0]
    q = q if shape[0] > shape[1] else q.T
    assert float(orthogonality_error(jnp.asarray(q), MatrixAxes((0,), (1,)))) < 1e-6


@pytest.mark.usefixtures("x64")
def test_conditions_of_factors():
    g = np.random.default_rng(1).normal(size=(4, 4))
    transform = scale_by_soap()
    _, state = transform.update({"w": g}, transform.init({"w": g}))
    values = np.linalg.eigvalsh(g @ g.T)
    found = factor_conditions(state)
    assert set(found) == {"left/w", "right/w"}
    for value in found.values():
        assert float(value) == pytest.approx(values[-1] / values[0], rel=1e-6)


@pytest.mark.slow
def test_names_in_the_log_of_a_run(tmp_path_factory, tmp_path):
    place = place_of_session(tmp_path_factory)
    keys = {
        "optimizer__kind": "soap",
        "optimizer__refresh_every": 2,
        "train__steps": 2,
        "train__log_every": 1,
        "train__optimizer_diagnostics": True,
        "checkpoint__every": 2,
        "evaluation__every": 2,
    }
    with place.in_process():
        train(place.config(**keys), tmp_path)
    logged = {
        name: value
        for line in results(tmp_path)
        if line["step"] == 2
        for name, value in line.items()
        if name.startswith("train/optimizer/")
    }
    assert logged["train/optimizer/rejected"] == logged["train/optimizer/failed"] == 0
    assert logged["train/optimizer/update_rms/matrix"] > 0
    parts = {name.split("/")[2] for name in logged}
    assert parts == {"rejected", "failed", "update_rms", "orthogonality", "condition"}


def test_optimizers_without_factors_count_nothing():
    transform, _ = build_optimizer(config(), 10, INFOS)
    params = random_like(INFOS, 2)
    state = transform.init(params)
    assert failures(state) == {}
    names = jax.eval_shape(lambda: diagnostics(params, params, state, INFOS))
    assert all(name.startswith(("update_rms/", "orthogonality/")) for name in names)
