"""The embedded example with other norms, trained side by side: a norm can help, it need not.

Not a benchmark of norms: one small network, one small corpus, and only what follows from three seeds.
"""

from normalcy.variants.comparing import RATES, SEEDS, compare
from normalcy.variants.results import Comparison, OnBatches, Result, Verdict, verdict
from normalcy.variants.training import MOMENTUM, Variant, train

__all__ = [
    "MOMENTUM",
    "RATES",
    "SEEDS",
    "Comparison",
    "OnBatches",
    "Result",
    "Variant",
    "Verdict",
    "compare",
    "train",
    "verdict",
]
