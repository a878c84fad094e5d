"""How much is tried: a slice in the suite, always the same; `MERGEDARTS_FUZZ=N` tries N random examples of each."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

COUNT = int(os.environ.get("MERGEDARTS_FUZZ", "0"))
CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]

settings.register_profile(
    "slice", max_examples=80, derandomize=True, deadline=None, database=None, suppress_health_check=CHECKS
)
settings.register_profile("long", max_examples=max(1, COUNT), deadline=None, suppress_health_check=CHECKS)
settings.load_profile("long" if COUNT else "slice")
