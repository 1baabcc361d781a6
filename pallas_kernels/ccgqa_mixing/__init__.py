"""The mixing of CCGQA behind one name, whichever implementation runs."""

from pallas_kernels.ccgqa_mixing.dispatch import IMPLEMENTATIONS, ccgqa_mix, choose
from pallas_kernels.ccgqa_mixing.reference import Convolutions

__all__ = ["IMPLEMENTATIONS", "Convolutions", "ccgqa_mix", "choose"]
