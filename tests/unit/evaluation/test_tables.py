from __future__ import annotations

from sorl_trl.evaluation import compare_runs, format_comparison, format_results, summarize

from .trajectories import outcome

COLUMNS = ["EM", "F1", "sub-EM", "choice", "searches", "turns", "tokens", "answered", "masked"]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_line_per_dataset_and_their_mean() -> None:
    summaries = [
        summarize("nq", [outcome("ann", 1.0, searches=2, turns=3), outcome("bob", None)]),
        summarize("popqa", [outcome("ann", 0.0, searches=1, turns=1)]),
        summarize("medqa", [outcome("ann", 0.0, choice_accuracy=1.0, generated_tokens=12)]),
    ]
    lines = format_results(summaries).splitlines()
    one, zero = (f"{score} [{score}, {score}]" for score in ("1.000", "0.000"))
    assert [cells(line) for line in (lines[0], *lines[2:6])] == [
        [*("dataset", "questions"), *COLUMNS],
        ["nq", "2", one, zero, zero, "-", "2.00", "3.00", "0.00", "0.500", "1"],
        ["popqa", "1", zero, zero, zero, "-", "1.00", "1.00", "0.00", "1.000", "0"],
        ["medqa", "1", zero, zero, zero, one, "0.00", "0.00", "12.00", "1.000", "0"],
        ["**mean**", "-", "0.333", "0.000", "0.000", "1.000", *"-----"],
    ]
    assert set(lines[1]) == {"|", "-"}
    assert len({len(line) for line in lines[:6]}) == 1


def test_samples_add_a_column() -> None:
    summaries = [summarize("own", [outcome("ann", float(i == 2), i) for i in range(4)])]
    lines = format_results(summaries).splitlines()
    column = cells(lines[0]).index("pass@4")
    assert cells(lines[2])[column] == "1.000 [1.000, 1.000]"
    assert cells(lines[2])[cells(lines[0]).index("EM")] == "0.250 [0.250, 0.250]"


def test_a_bar_in_a_name_does_not_end_its_cell() -> None:
    assert "| a\\|b " in format_results([summarize("a|b", [outcome("ann", 1.0)])])


def test_a_comparison_has_a_line_per_measure() -> None:
    runs = [{"nq": [outcome("ann", score), outcome("bob", None)]} for score in (1.0, 0.0)]
    table = format_comparison(compare_runs(*runs), "runs/a", "runs/b")
    lines = table.splitlines()
    assert cells(lines[0]) == ["dataset", "questions", "measure", "A", "B", "B - A", "p"]
    assert cells(lines[2]) == ["nq", "1", "EM", "1.000", "0.000", "-1.000 [-1.000, -1.000]", "0.0002"]
    assert cells(lines[3])[2:6] == ["F1", "0.000", "0.000", "+0.000 [+0.000, +0.000]"]
    assert "A: runs/a. B: runs/b." in table
    assert "1 questions." in table
