"""P2's comparison of one step from an orthogonal matrix: how far each descent leads away from it.

||W^T W - I|| / sqrt(d) grows as eta under spectral descent, whatever the width, and as
eta sqrt(d) + eta^2 d under sign descent.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from nag_jax.optim import sign_descent, spectral_descent
from nag_jax.optim.diagnostics import orthogonality_error
from nag_jax.optim.roles import MatrixAxes

WIDTHS = (16, 32, 64, 128)

pytestmark = pytest.mark.slow
MATRIX = MatrixAxes((0,), (1,))


def drift(make, width, rate):
    """The error after one step, over three random matrices and gradients."""
    errors = []
    for seed in range(3):
        rng = np.random.default_rng((seed, width))
        w = np.linalg.qr(rng.normal(size=(width, width)))[0]
        params = {"w": jnp.asarray(w)}
        transform = make(rate)
        gradient = {"w": jnp.asarray(rng.normal(size=w.shape))}
        updates, _ = transform.update(gradient, transform.init(params), params)
        errors.append(float(orthogonality_error(params["w"] + updates["w"], MATRIX)))
    return np.mean(errors)


def slope(x, y):
    """Exponent of the power law through the points."""
    return np.polyfit(np.log(x), np.log(y), 1)[0]


@pytest.mark.usefixtures("x64")
def test_spectral_descent_drifts_with_the_rate_alone():
    rates = np.asarray([1e-4, 1e-3, 1e-2])
    errors = [drift(spectral_descent, 64, rate) for rate in rates]
    assert slope(rates, errors) == pytest.approx(1, abs=0.05)
    by_width = [drift(spectral_descent, width, 1e-3) for width in WIDTHS]
    assert slope(WIDTHS, by_width) == pytest.approx(0, abs=0.1)
    assert max(by_width) <= 2e-3 + 1e-6  # Lemma 8


@pytest.mark.usefixtures("x64")
def test_sign_descent_drifts_with_the_root_of_the_width_and_then_with_the_width():
    rates = np.asarray([1e-6, 1e-5, 1e-4])
    assert slope(rates, [drift(sign_descent, 64, rate) for rate in rates]) == pytest.approx(
        1, abs=0.05
    )
    small = [drift(sign_descent, width, 1e-5) for width in WIDTHS]
    assert slope(WIDTHS, small) == pytest.approx(0.5, abs=0.1)
    # Where eta sqrt(d) is far above 1 the square of the step rules.
    large = [drift(sign_descent, width, 10.0) for width in WIDTHS]
    assert slope(WIDTHS, large) == pytest.approx(1, abs=0.15)
    rates = np.asarray([10.0, 30.0, 100.0])
    errors = [drift(sign_descent, 64, rate) for rate in rates]
    assert slope(rates, errors) == pytest.approx(2, abs=0.05)
