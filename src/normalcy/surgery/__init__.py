"""Operations that change a model's normalization, refuse what is unsafe and prove what they did.

Each returns a `normalcy.report.Report`. For finding what needs changing see `normalcy.doctor`.
"""

from normalcy.surgery.debias import debias
from normalcy.surgery.fold import fold
from normalcy.surgery.recalibrate import recalibrate
from normalcy.surgery.strip import strip_dead_bias

__all__ = ["debias", "fold", "recalibrate", "strip_dead_bias"]
