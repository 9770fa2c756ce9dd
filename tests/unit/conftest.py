"""No test measures time, hypothesis's deadlines included: a loaded machine is not a defect."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("without_deadline", deadline=None)
settings.load_profile("without_deadline")
