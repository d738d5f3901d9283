"""The norm sites of a model: what normalizes where, what feeds it, which biases are dead, and what folds.

Not for statistics of the data: those are measured elsewhere, over the same list of sites.
"""

from normalcy.sites.find import find
from normalcy.sites.folding import has_hooks
from normalcy.sites.kinds import PRODUCERS, kind_of
from normalcy.sites.records import DeadBias, Fold, Producer, Removal, Site, Sites

__all__ = [
    "PRODUCERS",
    "DeadBias",
    "Fold",
    "Producer",
    "Removal",
    "Site",
    "Sites",
    "find",
    "has_hooks",
    "kind_of",
]
