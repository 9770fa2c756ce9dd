"""Games that a script plays through the collector, to their end, badly, and up to a limit; and short training."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("textarena", reason="needs an environment of its own (make test-worlds)")
pytest.importorskip("reasoning_gym")
pytest.importorskip("textworld")
pytest.importorskip("verifiers")

from datasets import Dataset
from tests.endpoint import ScriptedEngine, run_agent, setup_of
from tests.policies import CHAT, build_policy, word_tokenizer
from tests.tools import qwen_tokenizer
from tests.training import settings
from transformers import PreTrainedTokenizerBase

from examples.worlds import reasoning_gym_task, textarena_game, textworld_game, verifiers_taskset
from examples.worlds.command import print_rows
from examples.worlds.players import step_to_goal, walkthrough
from examples.worlds.reasoning_gym_task import ReasoningGymTask
from examples.worlds.self_play import by_player, self_play
from examples.worlds.textarena_game import TextArenaGame
from examples.worlds.textarena_table import Table
from examples.worlds.textworld_game import TextWorldGame
from sorl_trl import AgentRollout, EndpointRollout, SOGRPOConfig, SOGRPOTrainer, agent_reward
from sorl_trl.command_line import UserMistake
from sorl_trl.qa import environment_reward
from sorl_trl.rollout import RolloutLimits
from sorl_trl.rollout.tasks import load_tasks
from sorl_trl.types import StopReason, Trajectory

pytestmark = pytest.mark.worlds
HANOI = ("[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]")
Say = Callable[[int, str], str]
"""What a row says after what it has read last."""


def play(
    environment: Any, rows: Sequence[Any], say: Say, turns: int = 30
) -> tuple[list[Trajectory], dict[str, float]]:
    tokenizer: Any = qwen_tokenizer()

    def script(row: int, ids: list[int]) -> str:
        return say(row, tokenizer.decode(ids).rpartition("<|im_start|>user")[2]) + tokenizer.eos_token

    limits = RolloutLimits(max_turns=turns, max_turn_tokens=10**4, max_observation_tokens=10**4)
    setup = replace(setup_of(tokenizer), limits=limits)
    rollout = AgentRollout(environment, limits=limits)
    prompts = [row["prompt"] for row in rows]
    return rollout.collect(setup, prompts, rows, ScriptedEngine(script, tokenizer))


def rewards_of(trajectories: Sequence[Trajectory]) -> list[float]:
    return [sum(each or ()) for each in environment_reward(trajectory=trajectories)]


# ---------------------------------------------------------------------------------------------------------------------
# TextArena
# ---------------------------------------------------------------------------------------------------------------------


def cross(_: int, read: str) -> str:
    return f"I go {step_to_goal(read)}."


def test_frozen_lake_is_crossed() -> None:
    rows = textarena_game.rows("FrozenLake-v0-random", 4)
    trajectories, metrics = play(TextArenaGame, rows, cross)
    assert {each.stop_reason for each in trajectories} == {StopReason.ENVIRONMENT_DONE}
    assert rewards_of(trajectories) == [1.0] * 4 and metrics["environment/solved"] == 1
    assert [len(each.turns) for each in trajectories] == [6] * 4
    assert "You moved" in trajectories[0].observations[0].text


def test_an_invalid_move_is_answered_and_a_second_one_loses() -> None:
    rows = textarena_game.rows("FrozenLake-v0-random", 1)
    ((trajectory,), metrics) = play(TextArenaGame, rows, lambda *_: "[jump]")
    assert "Invalid action format" in trajectory.observations[0].text
    assert len(trajectory.turns) == 2 and trajectory.stop_reason is StopReason.ENVIRONMENT_DONE
    assert rewards_of([trajectory]) == [0.0]
    assert (metrics["environment/ended_by_invalid_move"], metrics["environment/solved"]) == (1, 0)


def test_a_game_is_left_at_the_limit() -> None:
    rows = textarena_game.rows("FrozenLake-v0-random", 1)
    ((trajectory,), metrics) = play(TextArenaGame, rows, cross, turns=2)
    assert trajectory.stop_reason is StopReason.MAX_TURNS and len(trajectory.turns) == 3
    assert rewards_of([trajectory]) == [0.0] and metrics["environment/solved"] == 0


def test_hanoi_by_its_id() -> None:
    said = iter(HANOI)
    trajectories, _ = play(TextArenaGame, textarena_game.rows("TowerOfHanoi-v0", 1), lambda *_: next(said))
    assert rewards_of(trajectories) == [1.0]
    assert "[A C]" not in trajectories[0].observations[0].text  # its own move is not told again


@pytest.mark.parametrize(
    "game", ["Sokoban-v0", "2048-v0", "Minesweeper-v0-small", "Countdown-v0", "ThreeCardMonte-v0"]
)
def test_a_game_takes_whatever_is_said(game: str) -> None:
    words, draw = ("", "hello", "[up]", "[0 0]", "[²]", "][", "[-1 -1]", "[1]"), random.Random(0)
    trajectories, _ = play(TextArenaGame, textarena_game.rows(game, 4), lambda *_: draw.choice(words), turns=12)
    assert all(-1 <= reward <= 1 for reward in rewards_of(trajectories))


def evolution(seed: int) -> list[str]:
    table = Table("2048-v0", seed, 1)
    seen = [table.look()[1]]
    for move in ("[up]", "[left]", "[down]", "[right]") * 5:
        table.move(move)
        seen.append(table.look()[1])
    return seen


def test_games_side_by_side_do_not_share_their_dice() -> None:
    random.seed(5), numpy.random.seed(5)
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    alone = [evolution(seed) for seed in range(4)]
    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(evolution, (0, 1, 2, 3) * 4)] == alone * 4
    assert alone[0] != alone[1]
    rooms = [Table("Sokoban-v0", seed, 1).look() for seed in (0, 0, 1)]  # drawn with numpy
    assert rooms[0] == rooms[1] != rooms[2]
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["TwentyQuestions-v0", "1"], "OPENROUTER_API_KEY"),
        (["TicTacToe-v0", "1"], "number of players has to be 2"),
        (["Solitaire-v9", "1"], "Solitaire-v9"),
        (["FrozenLake-v0", "many"], "many"),
    ],
)
def test_what_cannot_be_played_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    monkeypatch.setattr(sys, "argv", ["rows", *words])
    assert print_rows(textarena_game.rows, "") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_two_players_have_contexts_and_rewards_of_their_own() -> None:
    """Player 0 puts three in a row."""
    (row,) = textarena_game.rows("TicTacToe-v0", 1, players=2)
    moves = ("[0]", "[3]", "[1]", "[1]", "[4]", "[2]")  # the fourth is invalid, so its player moves again
    ran = run_agent(self_play, row, qwen_tokenizer(), lambda read, number: moves[number])
    players = [turn.agent for turn in ran.trajectory.turns]
    assert players == ["player_0", "player_1", "player_0", "player_1", "player_1", "player_0"]
    assert ran.rewards == {"player_0": 1.0, "player_1": -1.0}
    assert all("You are Player 1" not in ran.read[i] for i in (0, 2, 5)) and "You are Player 1" in ran.read[1]
    assert "already occupied" in ran.read[4] and "already occupied" not in ran.read[5]
    (given,) = by_player([ran.trajectory], [ran.rewards])
    returns = [sum(given[i:]) for i in range(len(given))]
    assert returns == [1.0 if player == "player_0" else -1.0 for player in players]
    assert by_player([ran.trajectory], [None]) == [None]


# ---------------------------------------------------------------------------------------------------------------------
# reasoning-gym
# ---------------------------------------------------------------------------------------------------------------------


def tagged(answer: str) -> str:
    return f"It is <answer>{answer}</answer>."


def test_answers_are_scored_and_may_be_mended() -> None:
    rows = reasoning_gym_task.rows("chain_sum", 4, tries=2)
    sums = [reasoning_gym_task.tasks("chain_sum", row["seed"])[0]["answer"] for row in rows]
    said = [[sums[0]], ["0", sums[1]], ["0", "0"], []]

    def say(row: int, read: str) -> str:
        return tagged(said[row].pop(0)) if said[row] else "I do not know."

    trajectories, metrics = play(ReasoningGymTask, rows, say)
    assert rewards_of(trajectories) == [1.0, 1.0, 0.0, 0.0] and metrics["environment/solved"] == 0.5
    assert [len(each.turns) for each in trajectories] == [1, 2, 2, 2]
    assert "Try again" in trajectories[1].observations[0].text
    assert {each.stop_reason for each in trajectories} == {StopReason.ENVIRONMENT_DONE}
    (left,), _ = play(ReasoningGymTask, reasoning_gym_task.rows("chain_sum", 1, tries=9), lambda *_: "?", turns=2)
    assert left.stop_reason is StopReason.MAX_TURNS and rewards_of([left]) == [0.0]


def test_a_scorer_that_cannot_read_an_answer_gives_nothing() -> None:
    trajectories, _ = play(ReasoningGymTask, reasoning_gym_task.rows("prime_factorization", 1), lambda *_: tagged("x"))
    assert rewards_of(trajectories) == [0.0]


def test_no_answer_is_run_as_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all tasks: those whose scorer would are refused."""
    from reasoning_gym.factory import DATASETS

    made: list[str] = []
    monkeypatch.setattr(os, "sorl_test", made.append, raising=False)
    code = "__import__('os').sorl_test('run')"
    for name in DATASETS.keys() - {"composite", "arc_agi"}:  # made of others; two seconds, and it compares grids
        try:
            task = reasoning_gym_task.tasks(name, 3)
        except UserMistake:
            assert name in reasoning_gym_task.EVALUATED
            continue
        for answer in (code, f"({code})", f"[{code}]", f"x = {code}", f"1+{code}", f"{code}*x"):
            environment = ReasoningGymTask()
            environment.tasks, environment.task, environment.left = task, task[0], 1
            assert 0 <= environment.step(message(tagged(answer))).reward <= 1
        assert not made, name


def message(text: str) -> Any:
    from sorl_trl.types import Action, ActionKind, Turn

    return Turn((1,), text, Action(ActionKind.MESSAGE, text))


# ---------------------------------------------------------------------------------------------------------------------
# TextWorld
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = str(tmp_path_factory.mktemp("games"))
    return {kind: textworld_game.rows(kind, 2, folder) for kind in textworld_game.EASY}


@pytest.mark.parametrize("kind", textworld_game.EASY)
def test_a_generated_game_is_won(games: dict[str, list[Any]], kind: str) -> None:
    said = [walkthrough(row["game"]) for row in games[kind]]
    trajectories, metrics = play(TextWorldGame, games[kind], lambda row, _: said[row].pop(0))
    assert rewards_of(trajectories) == pytest.approx([1.0] * 2) and metrics["environment/solved"] == 1
    assert {each.stop_reason for each in trajectories} == {StopReason.ENVIRONMENT_DONE}
    assert not any(said)


def test_commands_that_a_game_does_not_admit_are_not_run(games: dict[str, list[Any]]) -> None:
    replies = iter(("save", "RESTART", "\n", "look around " * 50, "quit", "inventory "))
    (trajectory,), metrics = play(TextWorldGame, games["tw-cooking"][:1], lambda *_: next(replies, "look"), turns=6)
    assert trajectory.stop_reason is StopReason.MAX_TURNS and rewards_of([trajectory]) == [0.0]
    texts = [each.text for each in trajectory.observations]
    assert ["not possible" in text for text in texts] == [True] * 5 + [False]
    assert "You are carrying nothing" in texts[5] and "examine cookbook" in texts[0]
    assert metrics["environment/solved"] == 0


# ---------------------------------------------------------------------------------------------------------------------
# verifiers
# ---------------------------------------------------------------------------------------------------------------------

TASKSET = """
import verifiers.v1 as vf


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.reward(weight=0.5)
    async def brief(self, trace) -> float:
        return float(len(trace.last_reply or "") < 20)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for i in range(4):
            yield SumTask(Sum(prompt=f"What is {i}+{i}?", answer=str(2 * i)), self.config.task)


__all__ = ["Sums"]
"""


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    if shutil.which("uv") is None:
        monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    (tmp_path / "sums_of_two.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    return verifiers_taskset.rows("sums_of_two", 8)


def test_a_taskset_asks_the_policy_and_scores_it(sums: list[Any]) -> None:
    assert len(sums) == 4
    ran = run_agent(verifiers_taskset.agent, sums[2], qwen_tokenizer(), lambda *_: "It is 4.")
    assert ran.rewards == {"right": 1.0, "brief": 0.5} and "What is 2+2?" in ran.read[0]
    ran = run_agent(verifiers_taskset.agent, sums[3], qwen_tokenizer(), lambda *_: "I should say that it is 7.")
    assert ran.rewards == {"right": 0.0, "brief": 0.0}
    assert not [name for name in os.environ if name.startswith("SORL_API_KEY_")]
    ran = run_agent(verifiers_taskset.agent, sums[3], qwen_tokenizer(), lambda *_: "It is 6.", trajectory=4)
    assert ran.rewards in ({"reward": 0.0}, {"right": 0.0, "brief": 0.5})  # cut off, or refused


def test_sorl_train_reads_the_rows(tmp_path: Path, games: dict[str, list[Any]], sums: list[Any]) -> None:
    others = textarena_game.rows("FrozenLake-v0", 1), reasoning_gym_task.rows("chain_sum", 1)
    rows = [row for each in (*others, *games.values(), sums) for row in each]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(load_tasks(tmp_path / "rows.jsonl")) == len(rows) == 10


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def learner(*words: str) -> PreTrainedTokenizerBase:
    tokenizer: Any = word_tokenizer(["<pad>", "<eos>", "<unk>", *words])
    tokenizer.chat_template = CHAT
    return tokenizer  # type: ignore[no-any-return]


def check_training(folder: Path, tokenizer: Any, rows: Any, reward: Any, rollout: Any, **options: Any) -> None:
    """Rewards differ within a group, and the weights change."""
    policy = build_policy(vocab_size=len(tokenizer))
    policy.config.max_position_embeddings = 10**4
    before = [each.detach().clone() for each in policy.parameters()]
    method = {"method": options.pop("method")} if "method" in options else {}
    given = {"num_generations": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 2}
    given |= {"max_completion_length": 4000, "steps_per_generation": 1, "num_iterations": 1, **options}
    chosen = settings(folder, **given)
    del chosen["epsilon"]  # a named method sets its own
    config = SOGRPOConfig(**chosen)
    data = Dataset.from_list([*rows, *rows])
    trainer = SOGRPOTrainer(policy, reward, config, data, processing_class=tokenizer, rollout_func=rollout, **method)
    trainer.train()
    assert trainer.state.global_step == 2
    assert max(step.get("reward_std", 0) for step in trainer.state.log_history) > 0
    assert any(not torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))


def test_training_on_the_ice(tmp_path: Path) -> None:
    rows = textarena_game.rows("FrozenLake-v0-random", 2)
    limits = RolloutLimits(max_turns=12, max_turn_tokens=60, max_observation_tokens=1000)
    tokenizer = learner("[up]", "[down]", "[left]", "[right]")
    check_training(tmp_path, tokenizer, rows, environment_reward, AgentRollout(TextArenaGame, limits=limits))


def test_training_by_self_play(tmp_path: Path) -> None:
    rows = textarena_game.rows("TicTacToe-v0", 2, players=2)
    rollout = EndpointRollout(self_play, max_turn_tokens=60)
    check_training(tmp_path, learner(*(f"[{i}]" for i in range(9))), rows, by_player, rollout, method="dr_mas")


def test_training_to_reason(tmp_path: Path) -> None:
    rows = reasoning_gym_task.rows("syllogism", 2, tries=3)
    limits = RolloutLimits(max_turns=3, max_turn_tokens=12)
    tokenizer = learner("<answer>Yes</answer>", "<answer>No</answer>", "so")
    check_training(tmp_path, tokenizer, rows, environment_reward, AgentRollout(ReasoningGymTask, limits=limits))


def test_training_on_a_taskset(tmp_path: Path, sums: list[Any]) -> None:
    rollout = EndpointRollout(verifiers_taskset.agent, max_turn_tokens=4)
    check_training(tmp_path, learner("0", "2", "4", "6", "8"), sums[2:], agent_reward, rollout)
