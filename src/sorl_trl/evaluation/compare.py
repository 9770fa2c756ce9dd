"""Two runs, question by question: the paired bootstrap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sorl_trl.evaluation.aggregate import by_question, macro_average, question_columns
from sorl_trl.evaluation.bootstrap import Estimate, Floats, bootstrap
from sorl_trl.evaluation.run_folder import Outcome, RunFolder

COMPARED = ("exact_match", "f1", "sub_exact_match", "choice_accuracy", "searches", "generated_tokens")
_SHOWN = 3


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs on one dataset, or on a family of datasets."""

    name: str
    questions: int
    """The questions that enter: both runs were asked them, and each has a trajectory of them that is not masked."""
    unscored: int
    """The questions that do not, because every trajectory that one run has of them is masked."""
    before: Mapping[str, float]
    after: Mapping[str, float]
    """Measure -> mean over those questions."""
    differences: Mapping[str, Estimate]
    """Measure -> mean of after minus before."""


@dataclass(frozen=True)
class DatasetOutcomes:
    """The outcomes that a run has of one dataset."""

    family: str
    outcomes: Sequence[Outcome] = field(default_factory=list)


Run = Mapping[str, DatasetOutcomes]
"""Dataset -> what the run has of it."""


def read_run(path: str) -> dict[str, DatasetOutcomes]:
    """Read the outcomes of a finished run.

    Raises:
        FileNotFoundError: `path` is not the directory of a finished run.
    """
    folder = RunFolder(path)
    if not folder.is_finished:
        raise FileNotFoundError(f"{path} is not the directory of a finished run: it has no results")
    datasets = folder.settings["datasets"]
    return {name: DatasetOutcomes(datasets[name]["family"], folder.outcomes(name)) for name in datasets}


def compare_runs(before: Run, after: Run, intersection: bool = False) -> list[Comparison]:
    """Compare each dataset, then each family of several datasets by its macro average.

    Args:
        before: The one run.
        after: The other; differences are `after` minus `before`.
        intersection: Compare on the questions that both have, if they have not the same.

    Raises:
        ValueError: The runs have different questions and `intersection` is false, or no question in common.
    """
    if not intersection and (differing := _only_in_one(before, after)):
        raise ValueError(
            f"The runs were not asked the same questions: {'; '.join(differing)}. With `intersection`, the others "
            "are compared."
        )
    common = [name for name in before if name in after]
    datasets = {name: found for name in common if (found := _compare_dataset(name, before[name], after[name]))}
    if not datasets:
        raise ValueError("The runs have no scored question in common.")
    return [*datasets.values(), *_families(before, datasets)]


def _only_in_one(before: Run, after: Run) -> list[str]:
    """What only one run has, a phrase for each dataset."""
    phrases = []
    for name in dict.fromkeys([*before, *after]):
        asked = [by_question(run[name].outcomes) if name in run else {} for run in (before, after)]
        for which, own, other in (("first", *asked), ("second", *reversed(asked))):
            if only := [question_id for question_id, text in own if (question_id, text) not in other]:
                shown = ", ".join(only[:_SHOWN]) + (", …" if len(only) > _SHOWN else "")
                phrases.append(f"{len(only)} of {name} are in the {which} alone ({shown})")
    return phrases


def _compare_dataset(name: str, before: DatasetOutcomes, after: DatasetOutcomes) -> Comparison | None:
    """None if there is no question to compare."""
    asked = [by_question(run.outcomes) for run in (before, after)]
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
        unscored=int((~scored).sum()),
        before=_means(first, differences),
        after=_means(second, differences),
        differences=differences,
    )


def _means(columns: Mapping[str, Floats], measures: Mapping[str, Estimate]) -> dict[str, float]:
    return {name: float(np.nanmean(columns[name])) for name in measures}


def _families(run: Run, datasets: Mapping[str, Comparison]) -> list[Comparison]:
    families: dict[str, list[Comparison]] = {}
    for name, comparison in datasets.items():
        families.setdefault(run[name].family, []).append(comparison)
    return [_macro(f"macro: {family}", members) for family, members in families.items() if len(members) > 1]


def _macro(name: str, members: Sequence[Comparison]) -> Comparison:
    differences = macro_average([member.differences for member in members])

    def means(side: str) -> dict[str, float]:
        groups = [getattr(member, side) for member in members]
        held = {measure: [group[measure] for group in groups if measure in group] for measure in differences}
        return {measure: float(np.mean(values)) for measure, values in held.items()}

    return Comparison(
        name=name,
        questions=sum(member.questions for member in members),
        unscored=0,  # counted with the datasets
        before=means("before"),
        after=means("after"),
        differences=differences,
    )
