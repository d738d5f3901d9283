"""What is examined: a model with its data, loss and optimizer, written in Python or named on a command line.

Not for the examination itself, and nothing here reads a saved model.
"""

from normalcy.case.feeding import Batches, batches, replayable
from normalcy.case.record import Case, data_of
from normalcy.case.running import Call, run
from normalcy.case.target import load

__all__ = ["Batches", "Call", "Case", "batches", "data_of", "load", "replayable", "run"]
