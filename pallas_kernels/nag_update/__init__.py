"""The norm-agnostic residual update behind one name, whichever implementation runs."""

from pallas_kernels.nag_update.dispatch import IMPLEMENTATIONS, choose, nag_update

__all__ = ["IMPLEMENTATIONS", "choose", "nag_update"]
