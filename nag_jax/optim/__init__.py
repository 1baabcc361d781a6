"""Optimizers as optax transforms that know which axes of a parameter form its matrix.

`scale_by_...` are the transforms of matrices, `muon`, `soap`, `shampoo`, `kl_shampoo`,
`sign_descent` and `spectral_descent` the optimizers made of them. They work alone, on any parameter
tree; `build_optimizer` makes the whole chain of a run from its config and its parameters' metadata.
"""

from nag_jax.optim import schedules
from nag_jax.optim.build import build_optimizer
from nag_jax.optim.hybrid import AdamW
from nag_jax.optim.kl_shampoo import kl_shampoo, scale_by_kl_shampoo
from nag_jax.optim.muon import muon, scale_by_muon
from nag_jax.optim.roles import MatrixAxes
from nag_jax.optim.shampoo import scale_by_shampoo, shampoo
from nag_jax.optim.soap import scale_by_soap, soap
from nag_jax.optim.states import state_like_params
from nag_jax.optim.steepest import (
    scale_by_sign,
    scale_by_spectral,
    sign_descent,
    spectral_descent,
)

__all__ = [
    "AdamW",
    "MatrixAxes",
    "build_optimizer",
    "kl_shampoo",
    "muon",
    "scale_by_kl_shampoo",
    "scale_by_muon",
    "scale_by_shampoo",
    "scale_by_sign",
    "scale_by_soap",
    "scale_by_spectral",
    "schedules",
    "shampoo",
    "sign_descent",
    "soap",
    "spectral_descent",
    "state_like_params",
]
