"""Examines a recipe before a training run: `python -m sorl_trl.doctor --config recipe.yaml`."""

from sorl_trl.doctor.examine import CHECKS, examine
from sorl_trl.doctor.findings import LEVELS, Finding, Level, format_findings, to_json

__all__ = ["CHECKS", "LEVELS", "Finding", "Level", "examine", "format_findings", "to_json"]
