"""Evaluation of a policy on questions: runs, scores and tables."""

from sorl_trl.evaluation.report import format_report
from sorl_trl.evaluation.runner import EvaluationResult, NoSearch, encode_prompts, evaluate
from sorl_trl.evaluation.transcript import format_trajectory

__all__ = ["EvaluationResult", "NoSearch", "encode_prompts", "evaluate", "format_report", "format_trajectory"]
