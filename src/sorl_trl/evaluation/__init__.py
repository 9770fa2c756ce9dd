"""Evaluation of a policy on questions: runs, scores and tables."""

from sorl_trl.evaluation.aggregate import DatasetSummary, summarize
from sorl_trl.evaluation.arguments import EvaluationArguments
from sorl_trl.evaluation.batches import Agent, complete, encode_prompts, measure, run_batches
from sorl_trl.evaluation.compare import Comparison, compare_runs, read_run
from sorl_trl.evaluation.plan import Batch, Sample, load_datasets, plan_batches, questions_hash
from sorl_trl.evaluation.report import format_report, format_trajectory, mean_measure, split_by_hops
from sorl_trl.evaluation.run_folder import RunFolder
from sorl_trl.evaluation.tables import format_comparison, format_results
from sorl_trl.records.evaluated import MEASURES, SCORES, EvaluatedTrajectory

__all__ = [
    "MEASURES",
    "SCORES",
    "Agent",
    "Batch",
    "Comparison",
    "DatasetSummary",
    "EvaluatedTrajectory",
    "EvaluationArguments",
    "RunFolder",
    "Sample",
    "compare_runs",
    "complete",
    "encode_prompts",
    "format_comparison",
    "format_report",
    "format_results",
    "format_trajectory",
    "load_datasets",
    "mean_measure",
    "measure",
    "plan_batches",
    "questions_hash",
    "read_run",
    "run_batches",
    "split_by_hops",
    "summarize",
]
