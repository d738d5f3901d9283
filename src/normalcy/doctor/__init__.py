"""The doctor: examines a model's normalization and says what is wrong, with evidence, cause and remedy.

It changes nothing and prints nothing. Repairs are `normalcy.surgery`; the composition of both is
`normalcy.checkup`.
"""

from normalcy.doctor.examine import examine
from normalcy.doctor.findings import Examination, Examined, Finding, Loss
from normalcy.doctor.rules import RULES
from normalcy.doctor.state import examine_checkpoint

__all__ = ["RULES", "Examination", "Examined", "Finding", "Loss", "examine", "examine_checkpoint"]
