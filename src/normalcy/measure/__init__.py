"""The actual statistics of a model's batch norms, and the loss with either source.

One routine for the doctor's evidence and for recalibration. It changes nothing in the model: modes, buffers
and the random state are as before when it returns or fails.
"""

from normalcy.measure.loss import Loss, mean_loss
from normalcy.measure.records import Gap, Measured, Measurements, Sample, Skipped, gap
from normalcy.measure.statistics import Progress, measure, sample, shared_statistics, tracking

__all__ = [
    "Gap",
    "Loss",
    "Measured",
    "Measurements",
    "Progress",
    "Sample",
    "Skipped",
    "gap",
    "mean_loss",
    "measure",
    "sample",
    "shared_statistics",
    "tracking",
]
