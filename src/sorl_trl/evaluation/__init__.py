"""Evaluation of a policy on questions: runs, scores and tables."""

from sorl_trl.evaluation.arguments import EvaluationArguments
from sorl_trl.evaluation.batches import Agent, complete, encode_prompts, measure, run_batches
from sorl_trl.evaluation.compare import compare_runs, read_run
from sorl_trl.evaluation.figures import summarize
from sorl_trl.evaluation.plan import load_datasets, plan_batches, questions_hash
from sorl_trl.evaluation.run_folder import RunFolder
from sorl_trl.evaluation.tables import format_comparison, format_results
from sorl_trl.records.evaluated import MEASURES, EvaluatedTrajectory

__all__ = [
    "MEASURES",
    "Agent",
    "EvaluatedTrajectory",
    "EvaluationArguments",
    "RunFolder",
    "compare_runs",
    "complete",
    "encode_prompts",
    "format_comparison",
    "format_results",
    "load_datasets",
    "measure",
    "plan_batches",
    "questions_hash",
    "read_run",
    "run_batches",
    "summarize",
]
