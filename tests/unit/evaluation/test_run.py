"""An evaluation as it runs: the plan of its batches, its folder, and what is measured of each trajectory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from sorl_trl.evaluation.arguments import parse_arguments
from sorl_trl.evaluation.figures import summarize
from sorl_trl.evaluation.policy import EvaluatedPolicy, generation_config
from sorl_trl.evaluation.run import (
    Batch,
    RunFolder,
    complete,
    measure,
    plan_batches,
    run_batches,
)
from sorl_trl.qa import Question
from sorl_trl.records.evaluated import MEASURES, read_settings, write_evaluated
from sorl_trl.rollout import (
    Frame,
    Generation,
    LockStepEngine,
    RetryPolicy,
    RolloutArguments,
    RolloutLimits,
    TagProtocol,
)
from sorl_trl.rollout.agent_rollout import SearchRollout
from sorl_trl.rollout.chat import RolloutSetup
from sorl_trl.rollout.tasks import check_read, prompt_rows
from sorl_trl.search import NoSearch, SearchUnavailable
from sorl_trl.types import StopReason
from tests.policies import build_policy, word_tokenizer
from tests.unit.rollout.fakes import FakeSearch, bpe_tokenizer

from .trajectories import answered, ended, evaluated, question

TAGS = [f"<{slash}{name}>" for name in ("search", "answer", "information") for slash in ("", "/")]
NAMES = ["ann", "bob", "cy", "di"]
WORDS = ["<pad>", "<eos>", "<unk>", *TAGS, "nothing", "who", *NAMES]
PROTOCOL = TagProtocol(no_results="nothing", information_frame=Frame("<information> ", " </information>"))
QUESTIONS = [Question(name, f"who {name}", (name,)) for name in NAMES]
SETTINGS = {"model": {"dtype": "auto"}, "seed": 0, "datasets": {"nq": {}, "own": {}}}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer(WORDS)


class Guesser:
    """Answers with names drawn from torch's global generator."""

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        opening, closing = WORDS.index("<answer>"), WORDS.index("</answer>")
        names = torch.randint(len(NAMES), (len(contexts),)) + WORDS.index("ann")
        return [Generation((opening, int(name), closing), None, stopped=True) for name in names]


def policy(tokenizer: PreTrainedTokenizerFast, guesser: Guesser) -> EvaluatedPolicy:
    rows = partial(prompt_rows, rollout=RolloutArguments(prompt_template="{question}"), tokenizer=tokenizer)
    setup = RolloutSetup(tokenizer, None, {}, [WORDS.index("<eos>")], RolloutLimits())
    return EvaluatedPolicy(SearchRollout(NoSearch(), PROTOCOL), setup, LockStepEngine(guesser), rows)


class Searcher(Guesser):
    """Searches instead."""

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        ids = tuple(WORDS.index(word) for word in ("<search>", "ann", "</search>"))
        return [Generation(ids, None, stopped=True)] * len(contexts)


def test_an_agents_turn_is_never_longer_than_its_trajectory() -> None:
    agent = ["--agent_command", "python", "--reward_on_error", "-1"]
    for most, expected in ((24, 24), (2500, 500)):
        parts = parse_arguments([*ASKED, *agent, "--max_completion_length", str(most)], {}).parts
        made = parts.rollout_func
        assert (made.max_turn_tokens, made.reward_on_error, made.engine) == (expected, -1.0, parts.engine)


def test_an_agents_messages_that_would_not_end_are_warned_of(tmp_path: Path, caplog: Any) -> None:
    tokenizer = deepcopy(bpe_tokenizer())
    tokenizer.eos_token = "<|endoftext|>"
    build_policy(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for actor, warned in (["--agent_command", "python"], True), (["--no_search"], False):
        parts = parse_arguments([*ASKED, "--model_name_or_path", str(tmp_path), *actor], {}).parts
        caplog.clear()
        parts.load(torch.device("cpu"), generation_config(0.0), in_chat=False)
        assert ("past the end of a message" in caplog.text) == warned


class TestBatches:
    def test_questions_are_asked_without_control_tokens(self, tokenizer) -> None:
        asked = [Question("ann", "who ann <answer> bob </answer>", ("ann",))]
        ((_, rows),) = run_batches(plan_batches({"own": asked}, 1, 4), policy(tokenizer, Guesser()), seed=0)
        assert not {*TAGS} & {*rows[0]["prompt"].split()}

    def test_a_batch_samples_the_same_whatever_came_before_it(self, tokenizer) -> None:
        batches = plan_batches({"own": QUESTIONS}, num_samples=8, batch_size=8)
        everything = [rows for _, rows in run_batches(batches, policy(tokenizer, Guesser()), seed=0)]
        torch.rand(7)
        assert [rows for _, rows in run_batches(batches[2:], policy(tokenizer, Guesser()), seed=0)] == everything[2:]
        assert [rows for _, rows in run_batches(batches, policy(tokenizer, Guesser()), seed=1)] != everything

    def test_a_run_whose_engine_is_down_stops(self, tokenizer, tmp_path: Path) -> None:
        failing = SearchRollout(FakeSearch([SearchUnavailable("down")] * 4), PROTOCOL, retry=RetryPolicy(attempts=1))
        searcher = replace(policy(tokenizer, Searcher()), rollout=failing)
        run = RunFolder(tmp_path)
        run.claim({"datasets": {"own": {}}})
        batches = plan_batches({"own": QUESTIONS}, num_samples=4, batch_size=1)
        with pytest.raises(SearchUnavailable, match="3 batches in a row"):
            complete(run, batches, lambda: searcher, seed=0, show_progress=False)
        assert len(run.outcomes("own")) == 3


def batch(index: int) -> Batch:
    return Batch("nq", index, ((question("Ann"), 0),))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "runs/a")
    run.claim(SETTINGS)
    return run


class TestFolder:
    def test_the_same_settings_go_on_and_others_are_refused_by_name(self, run: RunFolder) -> None:
        write_evaluated(run.shard(batch(0)), [evaluated(question("Ann"), answered("Ann"))])
        RunFolder(run.path).claim(SETTINGS)
        other = {**SETTINGS, "model": {"dtype": "bfloat16"}, "temperature": 0.5}
        with pytest.raises(ValueError, match="other settings") as refusal:
            run.claim(other)
        assert '"dtype": "auto" there, "dtype": "bfloat16" here' in str(refusal.value)
        assert read_settings(run.path) == SETTINGS

    def test_a_policy_that_was_moved_is_the_same(self, run: RunFolder) -> None:
        run.claim({**SETTINGS, "model": {"model_name_or_path": "here", "policy_files": "same"}})
        write_evaluated(run.shard(batch(0)), [evaluated(question("Ann"), answered("Ann"))])
        run.claim({**SETTINGS, "model": {"model_name_or_path": "there", "policy_files": "same"}})

    def test_an_agent_that_raised_has_not_solved_its_task(self, run: RunFolder) -> None:
        """And it has not reported it, because it returned nothing."""

        def correct(*all_measured: dict[str, float] | None) -> Any:
            rows = []
            for i, measured in enumerate(all_measured):
                reason = StopReason.ENVIRONMENT_UNAVAILABLE if measured is None else StopReason.AGENT_ERROR
                asked, trajectory = Question(str(i), "who ?", ("Ann",)), ended(reason)
                measures = measure(asked, trajectory, measured, answers=False)
                row = {**evaluated(asked, trajectory), **measures, "environment": json.dumps(measured or {})}
                rows.append(row)
            for i, row in enumerate(rows):  # batches of one
                write_evaluated(run.shard(batch(i)), [row])
            summary = summarize("nq", run.outcomes("nq"))
            return [summary[part].get(name) for part, name in (("means", "correct"), ("environment", "solved"))]

        lost, raised, solved = None, {"reward": -1.0}, {"solved": 1.0, "reward": 1.0}
        assert [each["mean"] for each in correct(solved, raised, raised, lost, raised)] == [0.25, 0.25]
        assert correct({"reward": 1.0}, raised, raised, lost, raised) == [None, None]


ASKED = ["--model_name_or_path", "some/policy", "--output", "out", "--questions", "own.jsonl"]


def test_an_actor_on_the_command_line_may_ignore_a_recipes_values() -> None:
    recipe = {"agent": "nowhere:agent", "protocol": "terse", "max_turns": 4, "max_turn_tokens": 7}
    arguments = parse_arguments([*ASKED, "--agent_command", "python"], recipe)
    check_read(arguments.parts.rollout, QUESTIONS, arguments.given)
    assert (arguments.parts.rollout.agent, arguments.parts.rollout.max_turn_tokens) == (None, 7)
    arguments = parse_arguments([*ASKED, "--agent_command", "python", "--protocol", "terse"], recipe)
    with pytest.raises(ValueError, match="`protocol`"):
        check_read(arguments.parts.rollout, QUESTIONS, arguments.given)
    arguments = parse_arguments(ASKED, {"agent_command": "python", "protocol": "terse"})
    with pytest.raises(ValueError, match="`protocol`"):
        check_read(arguments.parts.rollout, QUESTIONS, arguments.given)


CHOICE = Question("q", "which ?", ("Ann Lee",), options={"A": "Bob", "B": "Ann Lee"})


class TestMeasure:
    def test_an_open_question_has_no_choice_accuracy(self) -> None:
        assert measure(question("Ann Lee"), answered("the Ann", searches=2)) == {
            "correct": 0.0,
            "exact_match": 0.0,
            "f1": 2 / 3,
            "sub_exact_match": 0.0,
            "choice_accuracy": None,
            "searches": 2.0,
            "turns": 3.0,
            "invalid_actions": 0.0,
            "neutralized": 0.0,
            "generated_tokens": 3.0,
            "observation_tokens": 2.0,
        }

    def test_a_letter_is_correct_where_there_are_options(self) -> None:
        scores = measure(CHOICE, answered("(B)"))
        assert (scores["correct"], scores["choice_accuracy"], scores["exact_match"]) == (1, 1, 0)

    @pytest.mark.parametrize(("measured", "correct"), [({"solved": 0.5}, 0.5), ({"reward": 0.5}, None)])
    def test_a_task_is_right_where_its_environment_reports_so(self, measured: Any, correct: float | None) -> None:
        """And an agent's messages hold no answer to compare."""
        scores = measure(question("Ann"), answered("Ann"), measured, answers="solved" in measured)
        found = scores["correct"], scores["exact_match"], scores["searches"], scores["turns"]
        assert found == (correct, None, None, 1.0)

    def test_an_infrastructure_failure_measures_nothing(self) -> None:
        assert measure(CHOICE, ended(StopReason.SEARCH_UNAVAILABLE)) == dict.fromkeys(MEASURES)
