"""The norm sites of a model: what normalizes where, what feeds it, which biases are dead, and what folds.

Not for statistics of the data: those are measured elsewhere, over the same list of sites.
"""

from normalcy.sites.find import find
from normalcy.sites.folding import has_hooks
from normalcy.sites.kinds import PRODUCERS, kind_of
from normalcy.sites.records import DeadBias, Fold, Producer, Removal, Site, Sites
from normalcy.sites.removal import copied, irremovable, other_wiring
from normalcy.sites.shift import at

__all__ = [
    "PRODUCERS",
    "DeadBias",
    "Fold",
    "Producer",
    "Removal",
    "Site",
    "Sites",
    "at",
    "copied",
    "find",
    "has_hooks",
    "irremovable",
    "kind_of",
    "other_wiring",
]
