"""What is examined: a model with its data, loss and optimizer, written in Python or named on a command line.

Not for the examination itself, and nothing here reads a saved model.
"""

from normalcy.case.feeding import Batches, Call, batches, replayable, run
from normalcy.case.record import Case, data_of
from normalcy.case.target import load

__all__ = ["Batches", "Call", "Case", "batches", "data_of", "load", "replayable", "run"]
