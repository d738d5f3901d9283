"""Hypothesis profiles. Modules that tests share lie beside them and are imported as `laws.tables`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_CALM = [
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
]  # float64 tensors take longer to draw than integers
settings.register_profile(
    "quick", max_examples=60, deadline=None, derandomize=True, suppress_health_check=_CALM
)
settings.register_profile("deep", max_examples=1000, deadline=None, suppress_health_check=_CALM)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
