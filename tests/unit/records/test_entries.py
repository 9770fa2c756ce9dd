from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from sorl_trl.evaluation.run import RunFolder
from sorl_trl.qa import Question
from sorl_trl.records.evaluated import files_hash
from sorl_trl.records.trained import write_trained
from sorl_trl.records.view import EVALUATION, TRAINING, Source, open_run, training_entry
from sorl_trl.types import Action, ActionKind, Observation, Passage, StopReason, Trajectory, Turn
from tests.unit.evaluation.trajectories import TWO_AGENTS, answered, ended, evaluated, question
from tests.unit.records.entries import TRAINED, shown, stored, write_evaluation


def keys(source: Source) -> list[str]:
    return [entry.key for name in source.sizes for entry in source.read(name)]


class TestEvaluationEntry:
    def test_everything_that_is_known_is_there(self) -> None:
        search = Turn((1, 2), "<search> who </search>", Action(ActionKind.SEARCH, "who"), (-0.5, -0.5))
        seen = Observation((3,) * 5, "Ada Lovelace", (Passage("p", "Ada", "Lovelace", 1.5),), True, 2)
        answer = Turn((4,), "<answer> B </answer>", Action(ActionKind.ANSWER, "B"))
        asked = Question("q7", "who ?", ("Ada",), {"hops": 2, "path": ["a", "b"]}, {"A": "Bob", "B": "Ada"}, "medqa")
        row = evaluated(asked, Trajectory((0,), (search, seen, answer), StopReason.ANSWERED), sample=3, dataset="own")
        entry = shown({**row, "environment": '{"hops_made": 1.0}'})
        assert (entry.key, entry.part, entry.group) == ("own/q7/3", "own", "own/q7")
        assert (entry.question, entry.golden_answers) == ("who ?", ["Ada"])
        assert entry.options == [("A", "Bob"), ("B", "Ada")]
        assert (entry.answer, entry.verdict, entry.score, entry.stop_reason) == ("B", "right", 1.0, "answered")
        assert entry.token_count == 3
        assert entry.facts == {"id": "q7", "sample": "3", "data_source": "medqa", "hops": "2", "path": '["a", "b"]'}
        assert entry.measures["choice_accuracy"] == 1.0
        assert entry.measures["exact_match"] == 0.0, "the verdict on a multiple choice is not its exact match"
        assert (entry.prompt, entry.measures["hops_made"]) == ("who ?", 1.0)
        assert entry.segments == (
            {
                "kind": "turn",
                "action": "search",
                "text": "<search> who </search>",
                "token_count": 2,
                "context": 0,
            },
            {
                "kind": "observation",
                "text": "Ada Lovelace",
                "token_count": 5,
                "passages": [{"id": "p", "title": "Ada", "text": "Lovelace", "score": 1.5}],
                "truncated": True,
                "neutralized": 2,
                "role": "tool",
                "context": 0,
                "repeats": False,
            },
            {"kind": "turn", "action": "answer", "text": "<answer> B </answer>", "token_count": 1, "context": 0},
        )

    def test_its_score_is_the_reward_or_whether_it_is_correct(self) -> None:
        row = evaluated(question("Ada"), answered("Ada"))
        assert shown(row).score == 1.0
        both = shown({**row, "environment": '{"reward": 0.25}'})
        assert (both.score, both.verdict) == (0.25, "right")

    def test_without_an_answer_the_reward_decides(self) -> None:
        row = evaluated(question("Ada"), ended(StopReason.TURN_LIMIT)) | {"correct": None}
        rewards = {"0.25": "rewarded", "0.0": "unrewarded", "NaN": "unrewarded", "null": "unscored"}
        found = {text: shown({**row, "environment": f'{{"reward": {text}}}'}).verdict for text in rewards}
        assert found == rewards

    def test_agents_and_contexts_are_told_apart(self) -> None:
        entry = shown(evaluated(question("Ada"), TWO_AGENTS))
        names = [segment.get("agent") for segment in entry.segments]
        assert names == ["planner", None, None, "searcher", None, "searcher", None, "searcher", None, "planner"]
        assert [segment["context"] for segment in entry.segments] == [0, 1, 1, 1, 2, 2, 1, 1, 0, 0]
        assert [i for i, segment in enumerate(entry.segments) if segment.get("repeats")] == [1, 4]
        assert entry.measures["observation_tokens"] == 5


class TestTrainingEntry:
    def test_the_completion_is_cut_where_turns_change(self) -> None:
        entry = training_entry(TRAINED, "step-10/1")
        search, seen, answer = entry.segments
        assert (search["kind"], search["action"], search["token_count"]) == ("turn", "search", 3)
        assert search["tokens"] == {
            "text": ("<search>", " who", " </search>"),
            "token_ratios": [1.0, 1.1, 0.5],
            "ratios": [0.8, 0.8, 0.8],
            "advantages": [-1.0, -1.0, -1.0],
            "clipped": "ioc",
        }
        assert (seen["kind"], seen["text"], seen["token_count"]) == ("observation", " [Ada]", 1)
        assert (answer["action"], answer["tokens"]["advantages"]) == ("answer", [0.25] * 3)

        assert (entry.verdict, entry.score, entry.token_count) == ("rewarded", 0.5, 6)

    def test_a_group_is_of_one_rollout_and_has_all_its_rewards(self) -> None:
        both = [replace(TRAINED, generated_at_step=step, group=3, group_rewards=(0.5, None, 0.0)) for step in (8, 9)]
        first, second = (training_entry(each, "k") for each in both)
        assert (first.part, first.group_rewards) == ("step 10", (0.5, None, 0.0))
        assert first.group != second.group

    def test_actions_and_rewards_are_shown_where_the_dump_has_them(self) -> None:
        recorded = replace(TRAINED, actions=("calculate", "answer"), turn_rewards=(0.5, None))
        entry = training_entry(recorded, "step-10/1")
        assert [turn.get("action") for turn in entry.segments] == ["calculate", None, "answer"]
        assert [turn.get("reward") for turn in entry.segments] == [0.5, None, None]
        spoken = training_entry(replace(TRAINED, roles=("user", "")), "step-10/1")
        assert [each.get("role") for each in spoken.segments] == [None, "user", None]
        masked = replace(recorded, turn_ids=(-1,) * 7)
        assert [segment["kind"] for segment in training_entry(masked, "step-10/1").segments] == ["observation"]

    def test_where_a_context_begins_and_what_it_repeats_are_shown(self) -> None:
        several = replace(TRAINED, turn_ids=(0, 0, -1, -1, 1, 1, 2), context_ids=(0, 0, -1, 1, 1, 1, 0), actions=())
        (turn, again, seen, other, back) = training_entry(several, "k").segments
        assert (turn["kind"], turn["context"], turn["token_count"]) == ("turn", 0, 2)
        assert (again["context"], again["repeats"], again["text"]) == (1, True, " </search>")
        assert (seen["context"], seen["repeats"], seen["text"]) == (1, False, " [Ada]")
        assert (other["kind"], other["context"], back["context"]) == ("turn", 1, 0)

    def test_what_is_not_finite_is_a_word_that_javascript_reads(self) -> None:
        odd = replace(TRAINED, advantages=(math.nan, math.inf, -math.inf, 0.0, 1 / 3, 1.0, 1.0))
        columns = [segment["tokens"]["advantages"] for segment in training_entry(odd, "k").segments[::2]]
        assert columns == [["NaN", "Infinity", "-Infinity"], [0.333333, 1.0, 1.0]]


class TestOpenRun:
    def test_an_unfinished_evaluation_has_a_note(self, tmp_path: Path) -> None:
        write_evaluation(tmp_path, evaluated(question("Ada"), answered("Ada")))
        source = open_run(tmp_path)
        assert source.kind == EVALUATION
        assert keys(source) == ["nq/q/0"]
        assert "unfinished" in source.notes[0]
        RunFolder(tmp_path).finish({}, "")
        assert not open_run(tmp_path).notes

    def test_questions_of_one_id_have_keys_of_their_own(self, tmp_path: Path) -> None:
        row = evaluated(question("Ada"), answered("Ada"))
        write_evaluation(tmp_path, row, row)
        assert keys(open_run(tmp_path)) == ["nq/q/0", "nq/q/0/2"]

    def test_a_training_run_is_numbered_within_each_step_over_its_processes(self, tmp_path: Path) -> None:
        for step, rank in ((20, 0), (10, 0), (10, 1)):
            write_trained(tmp_path, step, rank, [replace(TRAINED, step=step)] * 2)
        source = open_run(tmp_path)
        assert source.kind == TRAINING
        assert source.sizes == {"step 10": 4, "step 20": 2}
        assert keys(source) == [*(f"step-10/{n}" for n in (1, 2, 3, 4)), "step-20/1", "step-20/2"]


def test_half_a_surrogate_pair_in_a_passage_becomes_a_question_mark() -> None:
    passage = Passage("p\ud800", "a \udc00 title", "text", 0.5)
    seen = Observation((2,), "text", (passage,), truncated=True, neutralized=3)
    trajectory = replace(answered("Ann"), segments=(*answered("Ann", 1).segments[:1], seen))
    row = stored(evaluated(question("Ann\ud800"), trajectory))
    segment = row["segments"][1]
    assert segment["passages"] == [{"id": "p?", "title": "a ? title", "text": "text", "score": 0.5}]
    assert (segment["truncated"], segment["neutralized"], row["golden_answers"]) == (True, 3, ["Ann?"])


def test_a_copy_has_the_hash_of_the_original_and_trained_weights_have_another(tmp_path: Path) -> None:
    policy, weights = tmp_path / "policy", torch.zeros(2**21)
    policy.mkdir()
    save_file({"embedding": weights}, policy / "model.safetensors")
    before = files_hash(str(policy))
    shutil.copytree(policy, tmp_path / "copy", copy_function=shutil.copyfile)  # whose times are of now
    assert files_hash(str(tmp_path / "copy")) == before
    save_file({"embedding": weights + 1e-6}, policy / "model.safetensors")
    assert files_hash(str(policy)) != before
