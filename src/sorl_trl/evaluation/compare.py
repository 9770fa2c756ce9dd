"""Two runs, question by question: the paired bootstrap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sorl_trl.evaluation.aggregate import by_question, question_columns
from sorl_trl.evaluation.bootstrap import Estimate, Floats, bootstrap
from sorl_trl.evaluation.run_folder import Outcome, RunFolder
from sorl_trl.records.evaluated import evaluation_in

COMPARED = ("exact_match", "f1", "sub_exact_match", "choice_accuracy", "searches", "generated_tokens")


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs on one dataset."""

    name: str
    questions: int
    """The questions that enter: both runs were asked them, and each has a trajectory of them that is not masked."""
    left_out: int
    """The questions that do not: only one run was asked them, or every trajectory that it has of them is masked."""
    before: Mapping[str, float]
    after: Mapping[str, float]
    """Measure -> mean over those questions."""
    differences: Mapping[str, Estimate]
    """Measure -> mean of after minus before."""


Run = Mapping[str, Sequence[Outcome]]
"""Dataset -> what the run has of it."""


def read_run(path: str) -> dict[str, list[Outcome]]:
    """Read the outcomes of a finished evaluation: `path`, or what `sorl evaluate` has put into that run.

    Raises:
        FileNotFoundError: there is none.
    """
    folder = RunFolder(evaluation_in(path))
    if not folder.is_finished:
        raise FileNotFoundError(f"{path} holds no finished evaluation: `sorl evaluate {path}` makes one")
    return {name: folder.outcomes(name) for name in folder.settings["datasets"]}


def compare_runs(before: Run, after: Run) -> list[Comparison]:
    """Compare each dataset that both runs have, on the questions that both were asked.

    Args:
        before: The one run.
        after: The other; differences are `after` minus `before`.

    Raises:
        ValueError: The runs have no scored question in common.
    """
    common = [name for name in before if name in after]
    compared = [found for name in common if (found := _compare_dataset(name, before[name], after[name]))]
    if not compared:
        raise ValueError("The runs have no scored question in common.")
    return compared


def _compare_dataset(name: str, before: Sequence[Outcome], after: Sequence[Outcome]) -> Comparison | None:
    """None if there is no question to compare."""
    asked = [by_question(run) for run in (before, after)]
    common = [key for key in asked[0] if key in asked[1]]
    columns = [question_columns({key: questions[key] for key in common}, COMPARED) for questions in asked]
    # Counts apply to every trajectory that is not masked.
    scored = ~np.isnan(columns[0]["searches"] + columns[1]["searches"])
    if not scored.any():
        return None
    first, second = ({measure: column[scored] for measure, column in run.items()} for run in columns)
    differences = bootstrap({measure: second[measure] - first[measure] for measure in COMPARED}, name)
    return Comparison(
        name=name,
        questions=int(scored.sum()),
        left_out=len(asked[0].keys() | asked[1].keys()) - int(scored.sum()),
        before=_means(first, differences),
        after=_means(second, differences),
        differences=differences,
    )


def _means(columns: Mapping[str, Floats], measures: Mapping[str, Estimate]) -> dict[str, float]:
    return {name: float(np.nanmean(columns[name])) for name in measures}
