"""Optimizers as optax transforms that know which axes of a parameter form its matrix.

`scale_by_muon` and `muon` work alone, on any parameter tree; `build_optimizer` makes the whole
chain of a run from its config and its parameters' metadata.
"""

from nag_jax.optim import schedules
from nag_jax.optim.build import build_optimizer
from nag_jax.optim.muon import muon, scale_by_muon
from nag_jax.optim.roles import MatrixAxes
from nag_jax.optim.states import state_like_params

__all__ = [
    "MatrixAxes",
    "build_optimizer",
    "muon",
    "scale_by_muon",
    "schedules",
    "state_like_params",
]
