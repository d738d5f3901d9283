"""A saved state dict as the norms that stand in it, found by the names and shapes of its tensors.

Not for loading weights into a model, and not for judging them: the doctor does that.
"""

from normalcy.checkpoint.entries import Entry, Weights
from normalcy.checkpoint.files import SUFFIXES, named, read
from normalcy.checkpoint.layers import Checkpoint, Layer, found_in

__all__ = ["SUFFIXES", "Checkpoint", "Entry", "Layer", "Weights", "found_in", "named", "read"]
