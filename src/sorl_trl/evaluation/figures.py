"""Computes means over questions with percentile-bootstrap intervals, compares two runs, and writes tables.

Each resample draws as many questions as there are, with replacement, and averages them. The interval is the central
95 % of many such means. The draws depend only on the number of questions and the dataset's name.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sorl_trl.files import check_run_folder
from sorl_trl.records import policy_in
from sorl_trl.records.evaluated import (
    MEASURES,
    RESULTS,
    SCORES,
    Outcome,
    evaluated_shards,
    evaluation_in,
    is_masked,
    read_outcomes,
    read_settings,
    why_stale,
)
from sorl_trl.types import StopReason

Floats = npt.NDArray[np.float64]
Figure = dict[str, float]
"""A `mean` and its 95 % interval, from `low` to `high`."""

RESAMPLES = 10_000
"""Our choice: the ends of an interval vary by about a hundredth of its width."""
COMPARED = ("exact_match", "f1", "sub_exact_match", "choice_accuracy", "searches", "generated_tokens")
"""Measures of answers that are compared, in addition to all measures of environments."""
Run = Mapping[str, Sequence[Outcome]]
"""The outcomes of a run, by dataset."""


def summarize(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures of a dataset with at least one outcome, in the form of `results.json`.

    `means` average, over questions, the mean over each question's trajectories. `best_of_n` averages the best of these
    trajectories (for `correct`, this is pass@n), and is empty if each question was asked once. `stop_reasons` are
    shares of all trajectories. `masked` trajectories, ended by an infrastructure failure, enter no mean. `environment`
    has the means of the environment's measures, each over the questions with that measure; it is missing if nothing
    was measured.
    """
    questions = by_question(outcomes)
    is_sampled = len(outcomes) > len(questions)
    measured = {key: [each["environment"] for each in asked] for key, asked in questions.items()}
    names = measures_of(outcomes)
    reasons = Counter(outcome["stop_reason"] for outcome in outcomes)
    return {
        "name": name,
        "questions": len(questions),
        "trajectories": len(outcomes),
        "masked": sum(map(is_masked, outcomes)),
        "means": _figures(question_columns(questions, MEASURES), name),
        "best_of_n": _figures(question_columns(questions, SCORES, max), name) if is_sampled else {},
        "stop_reasons": {reason.value: reasons[reason.value] / len(outcomes) for reason in StopReason},
        **({"environment": _figures(question_columns(measured, names), name)} if names else {}),
    }


def measures_of(outcomes: Sequence[Outcome]) -> list[str]:
    """The names of the environments' measures in any of the trajectories."""
    return list(dict.fromkeys(name for outcome in outcomes for name in outcome["environment"]))


def by_question(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    """The outcomes of each question, by id and text (ids may be row numbers), in the order of first appearance."""
    questions: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        questions.setdefault((outcome["question_id"], outcome["question"]), []).append(outcome)
    return questions


def question_columns(
    questions: Mapping[tuple[str, str], Sequence[Outcome]],
    measures: Sequence[str],
    combine: Callable[[list[float]], float] = lambda values: sum(values) / len(values),
) -> dict[str, Floats]:
    """For each measure, one value per question, shape (questions,), combined over its trajectories; NaN if none."""
    columns = {}
    for name in measures:
        known = ([each[name] for each in outcomes if each.get(name) is not None] for outcomes in questions.values())
        columns[name] = np.array([combine(values) if values else float("nan") for values in known])
    return columns


def bootstrap(columns: Mapping[str, Floats], stream: str) -> dict[str, tuple[float, Floats]]:
    """The mean of each column, and the means of its resamples; all columns are resampled together.

    Args:
        columns: Values by name, shape (questions,), NaN where a question has none. All-NaN columns are left out.
        stream: Names the random numbers; those of different streams are independent.

    Returns:
        By name, the mean, and the means of the resamples, shape (RESAMPLES,), NaN where a resample has no value.
    """
    columns = {name: column for name, column in columns.items() if not np.isnan(column).all()}
    if not columns:
        return {}
    values = np.stack(list(columns.values()), axis=1)
    known, filled = ~np.isnan(values), np.nan_to_num(values)
    size, rng = len(values), np.random.default_rng(random.Random(f"bootstrap/{stream}").getrandbits(64))
    draws = (np.bincount(rng.integers(size, size=size), minlength=size).astype(float) for _ in range(RESAMPLES))
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN: the resample has no value
        resampled = np.array([(times @ filled) / (times @ known) for times in draws])
    means = np.nanmean(values, axis=0)
    return {name: (float(mean), drawn) for name, mean, drawn in zip(columns, means, resampled.T, strict=True)}


def figure(mean: float, resampled: Floats) -> Figure:
    """A mean with its 95 % interval from resamples."""
    low, high = np.nanquantile(resampled, (0.025, 0.975))
    return {"mean": mean, "low": float(low), "high": float(high)}


def p_value(resampled: Floats) -> float:
    """The two-sided p-value of a mean of zero: twice the share of resamples on the rarer side of zero, at most 1."""
    known = resampled[~np.isnan(resampled)]
    rarer = min(int((known <= 0).sum()), int((known >= 0).sum()))
    # Plus one for the data itself, because a finite number of resamples cannot show a probability of zero.
    return min(1.0, 2 * (rarer + 1) / (len(known) + 1))


def _figures(columns: Mapping[str, Floats], stream: str) -> dict[str, Figure]:
    return {name: figure(*estimate) for name, estimate in bootstrap(columns, stream).items()}


def read_run(path: str) -> dict[str, list[Outcome]]:
    """Read the outcomes of a finished evaluation: `path` itself, or the one that `sorl evaluate` put into it.

    Raises:
        FileNotFoundError: There is no finished evaluation.
        ValueError: The evaluation is stale: the policy has changed since.
    """
    check_run_folder(path)
    run = evaluation_in(path)
    if not (run / RESULTS).exists():
        remedy = f"run `sorl evaluate {path}`" if policy_in(path) else "give a run that was evaluated"
        raise FileNotFoundError(f"{path} has no finished evaluation: {remedy}")
    if problem := why_stale(run):
        raise ValueError(problem)
    return {name: read_outcomes(evaluated_shards(run, name)) for name in read_settings(run)["datasets"]}


def compare_runs(before: Run, after: Run) -> list[dict[str, Any]]:
    """Compare each dataset that both runs have, on the questions that both asked.

    Args:
        before: The first run.
        after: The second run; differences are `after` minus `before`.

    Returns:
        For each dataset, its `name`; the number of `questions` with an unmasked trajectory in both runs, and of the
        others (`left_out`); and its `measures`: the means over these questions, `before` and `after`, and their
        difference as a figure with its `p`.

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


def format_results(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Write a column for each dataset, with a row for each measure and each stop reason."""
    names = [summary["name"] for summary in summaries]
    several = len(names) > 1
    header = ["", *names, *(["mean"] if several else [])]
    rows = [["questions", *(str(summary["questions"]) for summary in summaries)]]
    n = max(round(summary["trajectories"] / summary["questions"]) for summary in summaries)
    for part, label in (("means", "{}"), ("best_of_n", f"{{}}, best of {n}"), ("environment", "{}")):
        found = [summary.get(part, {}) for summary in summaries]
        for measure in dict.fromkeys(name for each in found for name in each):
            means = [each[measure]["mean"] for each in found if measure in each]
            cells = (_with_interval(each[measure]) if measure in each else "-" for each in found)
            mean = [f"{sum(means) / len(means):.3f}"] if several else []
            rows.append([label.format(measure), *cells, *mean])
    for reason in StopReason:
        shares = [summary["stop_reasons"][reason.value] for summary in summaries]
        if any(shares):
            rows.append([f"ended: {reason.value}", *(f"{share:.3f}" for share in shares)])
    rows.append(["masked", *(str(summary["masked"]) for summary in summaries)])
    return _table(header, rows) + (
        "\nIn brackets: 95 % bootstrap intervals over questions. Counts are per trajectory. Masked trajectories, "
        "ended by an infrastructure failure or without a call of the policy, enter no mean; the same command repeats "
        "them. Mean: over datasets, with equal weights.\n"
    )


def format_comparison(comparisons: Sequence[Mapping[str, Any]], before: str, after: str) -> str:
    """Write a line per dataset and measure: both means, their difference with its 95 % interval, and p."""
    rows = []
    for each in comparisons:
        for measure, found in each["measures"].items():
            means = [f"{found['before']:.3f}", f"{found['after']:.3f}", _with_interval(found, sign="+")]
            rows.append([each["name"], str(each["questions"]), measure, *means, f"{found['p']:.4f}"])
    left_out = sum(comparison["left_out"] for comparison in comparisons)
    return _table(["dataset", "questions", "measure", "A", "B", "B - A", "p"], rows) + (
        f"\nA: {before}. B: {after}. In brackets: 95 % intervals; p: two-sided; both from a paired bootstrap over "
        f"questions. Left out, for lack of an unmasked trajectory in both runs: {left_out} questions.\n"
    )


def _with_interval(found: Figure, sign: str = "") -> str:
    mean, low, high = (f"{found[name]:{sign}.3f}" for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with padded columns, which is also readable as plain text."""
    cells = [[*row, *[""] * (len(header) - len(row))] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"
