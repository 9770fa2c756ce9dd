"""Tasks of the leaderboard: what is loaded, what is refused, and what the figures say."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
from sorl_trl.rollout.environments.bfcl import BFCL_BENCHMARKS, bfcl_questions
from transformers import AddedToken

from sorl_trl.cli.evaluation_run import for_tasks, parse_arguments
from sorl_trl.evaluation.agents import prompt_rows
from sorl_trl.evaluation.arguments import EvaluationArguments
from sorl_trl.evaluation.compare import compare_runs
from sorl_trl.evaluation.figures import summarize
from sorl_trl.evaluation.plan import load_datasets
from sorl_trl.evaluation.tables import format_results
from sorl_trl.qa import Question, write_questions
from sorl_trl.rollout import RolloutArguments
from tests.unit.rollout.fakes import bpe_tokenizer

from .trajectories import outcome

BASE = "bfcl_multi_turn_base"


@pytest.fixture
def leaderboard() -> None:
    pytest.importorskip("bfcl_eval")


@pytest.mark.usefixtures("leaderboard")
class TestLoading:
    def test_one_name_stands_for_all_sets(self) -> None:
        datasets = load_datasets(EvaluationArguments("run", ["bfcl_multi_turn"], limit=2))
        assert [*datasets] == [*BFCL_BENCHMARKS]
        assert [question.id for question in datasets[BASE]] == ["multi_turn_base_0", "multi_turn_base_1"]
        with pytest.raises(ValueError, match=f"name '{BASE}' twice"):
            EvaluationArguments("run", ["bfcl_multi_turn", BASE])
        with pytest.raises(ValueError, match=f"`benchmarks` is 'bfcl', but must be one of .*'{BASE}'"):
            EvaluationArguments("run", ["bfcl"])

    def test_a_file_of_tasks_is_read_back(self, tmp_path: Path) -> None:
        own = bfcl_questions(BASE)[3:5]
        write_questions(own, tmp_path / "own.jsonl")
        assert load_datasets(EvaluationArguments("run", questions=[str(tmp_path / "own.jsonl")])) == {"own": own}


@pytest.mark.usefixtures("leaderboard")
def test_tasks_are_put_without_control_tokens() -> None:
    tokenizer = deepcopy(bpe_tokenizer())
    for text, role in (("current", "system"), ("document", "user")):
        for word in ((), (text,)):
            tokenizer.add_tokens([AddedToken(each, special=True) for each in word])
            rows = prompt_rows(bfcl_questions(BASE)[:1], RolloutArguments(protocol="terse"), tokenizer)
            ((system, user),) = [row["prompt"] for row in rows]
            assert (text in {"system": system, "user": user}[role]["content"]) == (not word)


@pytest.mark.usefixtures("leaderboard")
class TestArguments:
    def test_what_is_for_questions_is_refused_by_its_name(self) -> None:
        for words in (["--chat", "true"], ["--search_top_k", "5"], ["--no_search", "true"]):
            arguments = parse_arguments(
                ["--model_name_or_path", "m", "--output", "o", "--benchmarks", BASE, *words], {}
            )
            with pytest.raises(ValueError, match=f"`{words[0][2:]}` is .*, but is for questions"):
                for_tasks(arguments, bfcl_questions(BASE))

    def test_turns_are_limited_by_the_tasks_where_nothing_else_is_said(self) -> None:
        words = ["--model_name_or_path", "m", "--output", "o", "--benchmarks", BASE]
        for more, turns in (([], 21 * 4), (["--max_turns", "2"], 2)):
            arguments = for_tasks(parse_arguments([*words, *more], {}), bfcl_questions(BASE)[:1])
            assert arguments.rollout.max_turns == turns

    def test_a_task_that_there_is_not_is_refused_at_once(self) -> None:
        words = ["--model_name_or_path", "m", "--output", "o", "--benchmarks", BASE]
        with pytest.raises(ValueError, match="task='multi_turn_base_200' is no task"):
            for_tasks(parse_arguments(words, {}), [Question("multi_turn_base_200", "?", ("-",), data_source=BASE)])


FILES, TICKETS = "GorillaFileSystem", "TicketAPI"
MEASURED = {"solved": 0.0, "requests_solved": 0.5, "calls_per_request": 2.0, "wrong_call": 3.0, "failed_call": 0.0}
RUN = [
    {**outcome("a", 1.0), "environment": {**MEASURED, "solved": 1.0, "requests_solved": 1.0}, "worlds": [FILES]},
    {**outcome("b", 0.0), "environment": MEASURED, "worlds": [FILES, TICKETS]},
    {**outcome("c", 0.0), "environment": MEASURED, "worlds": [TICKETS]},
    {**outcome("d"), "worlds": [TICKETS]},
]


class TestFigures:
    def test_a_task_counts_for_each_of_its_worlds(self) -> None:
        summary = summarize("own", RUN)
        assert summary["environment"]["solved"]["mean"] == summary["means"]["correct"]["mean"] == pytest.approx(1 / 3)
        assert summary["environment"]["requests_solved"]["mean"] == pytest.approx(2 / 3)
        worlds = {name: (world["tasks"], world["mean"]) for name, world in summary["worlds"].items()}
        assert worlds == {FILES: (2, 0.5), TICKETS: (2, 0.0)}

    def test_the_table_shows_scores_errors_and_worlds(self) -> None:
        masked = {"name": "down", **{k: v for k, v in summarize("down", [outcome("a")]).items() if k != "name"}}
        table = format_results([summarize("own", RUN), masked])
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line[:1] == "|"]
        of_own = [row for row in cells if row[0] == "own"]
        assert [of_own[0][i] for i in (1, 4, 5, 7)] == ["4", "2.00", "0.00", "1"]
        assert of_own[0][2].startswith("0.333 [") and of_own[0][3].startswith("0.667 [")
        assert of_own[1][1:3] == ["3.00", "0.00"]
        assert [row[1:] for row in cells if row[0] == TICKETS] == [["0.000 [0.000, 0.000] of 2", "-"]]

    def test_runs_are_compared_by_what_the_environment_measures(self) -> None:
        (compared,) = compare_runs({"own": RUN}, {"own": [*RUN[:1], {**RUN[2], "question_id": "b"}]})
        assert (compared["questions"], compared["left_out"]) == (1, 4)
        assert compared["measures"]["solved"]["before"] == 1.0
        assert compared["measures"]["requests_solved"]["mean"] == 0.0
