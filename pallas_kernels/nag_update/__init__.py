"""The norm-agnostic residual update behind one name: which implementation runs, and its gradient."""

from pallas_kernels.nag_update.dispatch import IMPLEMENTATIONS, choose, nag_update

__all__ = ["IMPLEMENTATIONS", "choose", "nag_update"]
