"""Fused operations of norm-agnostic and residual-free networks, usable without `nag_jax`.

Each operation has a folder with a `reference` that defines it; the wrapper in the folder chooses an
implementation. Nothing here imports `nag_jax`.
"""

from pallas_kernels.ccgqa_mixing import ccgqa_mix
from pallas_kernels.nag_update import nag_update

__all__ = ["ccgqa_mix", "nag_update"]
