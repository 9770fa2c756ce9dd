"""Compares two runs question by question, with the paired bootstrap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sorl_trl.evaluation.figures import bootstrap, by_question, figure, measures_of, p_value, question_columns
from sorl_trl.evaluation.run_folder import Outcome, RunFolder
from sorl_trl.files import check_run_folder
from sorl_trl.records import policy_in
from sorl_trl.records.evaluated import RESULTS, evaluation_in, outdated, read_settings

COMPARED = ("exact_match", "f1", "sub_exact_match", "choice_accuracy", "searches", "generated_tokens")
"""Measures of answers, which are compared beside all that environments measured."""
Run = Mapping[str, Sequence[Outcome]]
"""The outcomes of a run, by dataset."""


def read_run(path: str) -> dict[str, list[Outcome]]:
    """Read the outcomes of a finished evaluation: `path` itself, or the one that `sorl evaluate` has put into it.

    Raises:
        FileNotFoundError: There is no finished evaluation.
        ValueError: The policy has changed since.
    """
    check_run_folder(path)
    folder = RunFolder(evaluation_in(path))
    if not (folder.path / RESULTS).exists():
        made = (
            f"`sorl evaluate {path}` makes one" if policy_in(path) else "name a run that `sorl evaluate` has evaluated"
        )
        raise FileNotFoundError(f"{path} holds no finished evaluation: {made}")
    if problem := outdated(folder.path):
        raise ValueError(problem)
    return {name: folder.outcomes(name) for name in read_settings(folder.path)["datasets"]}


def compare_runs(before: Run, after: Run) -> list[dict[str, Any]]:
    """Compare each dataset that both runs have, on the questions that both asked.

    Args:
        before: The first run.
        after: The second run; differences are `after` minus `before`.

    Returns:
        For each dataset, its `name`; the number of `questions` for which each run has a trajectory that is not masked,
        and of others, which are `left_out`; and its `measures`: the means over these questions, `before` and `after`,
        and their difference as a figure with its `p`.

    Raises:
        ValueError: The runs have no scored question in common.
    """
    common = [name for name in before if name in after]
    compared = [found for name in common if (found := _compare_dataset(name, before[name], after[name]))]
    if not compared:
        raise ValueError("The runs have no scored question in common.")
    return compared


def _compare_dataset(name: str, before: Sequence[Outcome], after: Sequence[Outcome]) -> dict[str, Any] | None:
    """Compare one dataset; None if there is no question to compare."""
    asked = [by_question([{**each, **each["environment"]} for each in run]) for run in (before, after)]
    common = [key for key in asked[0] if key in asked[1]]
    names = dict.fromkeys([*COMPARED, *measures_of([*before, *after])])
    first, second = (question_columns({key: questions[key] for key in common}, [*names]) for questions in asked)
    # Counts apply to every trajectory that is not masked.
    scored = ~np.isnan(first["generated_tokens"] + second["generated_tokens"])
    if not scored.any():
        return None
    differences = bootstrap({measure: (second[measure] - first[measure])[scored] for measure in names}, name)
    measures = {
        measure: {
            "before": float(np.nanmean(first[measure][scored])),
            "after": float(np.nanmean(second[measure][scored])),
            **figure(mean, resampled),
            "p": p_value(resampled),
        }
        for measure, (mean, resampled) in differences.items()
    }
    questions = int(scored.sum())
    left_out = len(asked[0].keys() | asked[1].keys()) - questions
    return {"name": name, "questions": questions, "left_out": left_out, "measures": measures}
