"""The leaderboard's tasks in training: with our trainers, with TRL's, and through TRL's own tool loop."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bfcl_eval")

import torch
import yaml
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from sorl_trl import AgentRollout, SOGRPOConfig, SOGRPOTrainer, SOPPOConfig, SOPPOTrainer
from sorl_trl.cli import evaluation_run
from sorl_trl.cli.evaluate import read_words
from sorl_trl.cli.evaluation_run import for_tasks
from sorl_trl.cli.run import write_recipe
from sorl_trl.command_line import UserMistake
from sorl_trl.qa import environment_reward, solved_reward, write_questions
from sorl_trl.recipe.arguments import parse_arguments
from sorl_trl.recipe.build import build_rollout, build_trainer
from sorl_trl.rollout import ChatProtocol, EngineOptions, EnvironmentResponder, Reply, RolloutLimits
from sorl_trl.rollout.environments.bfcl import BFCLEnvironment, BFCLTools, prompt_rows, question_of, task_of
from sorl_trl.types import StopReason, Turn
from tests.documentation import ROOT
from tests.function_callers import SOLUTION, talking_policy
from tests.policies import build_policy
from tests.tools import following, qwen_tokenizer, tool_call
from tests.training import settings

CONFIGS = {SOGRPOTrainer: SOGRPOConfig, SOPPOTrainer: SOPPOConfig, GRPOTrainer: GRPOConfig}
LIMITS = RolloutLimits(max_turns=6, max_turn_tokens=24, max_observation_tokens=120)
TASK = task_of("multi_turn_base_1:1")


def train(folder: Path, trainer_class: Any, rows: Any, environment: Any, engine: Any = None, **options: Any) -> Any:
    arguments = settings(folder, max_completion_length=400, max_steps=1, learning_rate=1e-3, **options)
    trainer = trainer_class(
        talking_policy(),
        [environment_reward if trainer_class is not GRPOTrainer else solved_reward],
        CONFIGS[trainer_class](**arguments),
        Dataset.from_list(rows),
        processing_class=qwen_tokenizer(),
        rollout_func=AgentRollout(EnvironmentResponder(environment), ChatProtocol(), LIMITS, engine),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("trainer_class", "engine"), [(SOGRPOTrainer, "slots"), (SOPPOTrainer, "lockstep"), (GRPOTrainer, "slots")]
)
def test_tasks_are_trained_on(tmp_path: Path, trainer_class: Any, engine: str) -> None:
    assert TASK.solution == ((SOLUTION,),)
    rows = prompt_rows([TASK], compact=True) * 8
    environment = partial(BFCLEnvironment, True)
    trainer = train(tmp_path, trainer_class, rows, environment, EngineOptions(rollout_engine=engine))
    first = next(entry for entry in trainer.state.log_history if "environment/solved" in entry)
    assert 0.1 < first["environment/solved"] < 0.9
    assert first["reward"] == pytest.approx(first["environment/solved"])
    assert first["environment/calls_per_request"] > 0.1
    pairs = zip(trainer.model.parameters(), talking_policy().parameters(), strict=False)
    assert any(not torch.equal(after, before) for after, before in pairs)


class Counting:
    """An environment of another kind: it ends with the first message."""

    def step(self, turn: Turn) -> Reply:
        return Reply(reward=0.25, stop=StopReason.ENVIRONMENT_DONE)


def test_environments_of_several_kinds_share_a_batch(tmp_path: Path) -> None:
    kinds = {"bfcl": BFCLEnvironment, "counting": Counting}
    (row,) = prompt_rows([TASK], compact=True)
    rows = [{**row, "environment": kind} for kind in kinds] * 4
    trainer = train(tmp_path, SOGRPOTrainer, rows, kinds, num_generations=2)
    first = next(entry for entry in trainer.state.log_history if "environment/bfcl/solved" in entry)
    assert (first["environment/counting/turns"], first["environment/counting/reward"]) == (1.0, 0.25)
    assert first["environment/bfcl/turns"] >= 1.0
    assert "environment/solved" not in first


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    talking_policy().save_pretrained(tmp_path / "policy")
    qwen_tokenizer().save_pretrained(tmp_path / "policy")
    write_questions([question_of(TASK)] * 8, tmp_path / "train.jsonl")
    return tmp_path


def from_recipe(folder: Path, *words: str) -> Any:
    """Two steps of the recipe for SmolLM2, without its limit of turns."""
    paths = {"model_name_or_path": "policy", "train_questions": "train.jsonl", "output_dir": "out"}
    given = [word for name, path in paths.items() for word in (f"--{name}", str(folder / path))]
    given += ["--max_steps", "2", "--max_turn_tokens", "24", "--disable_tqdm", "true"]
    recipe = yaml.safe_load((ROOT / "recipes/smollm2_bfcl.yaml").read_text())
    recipe.pop("max_turns")
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "steps_per_generation": 4}))
    return parse_arguments(["--config", str(folder / "recipe.yaml"), *given, *words])


def test_tasks_of_a_recipe_are_trained_on(folder: Path) -> None:
    trainer = build_trainer(from_recipe(folder, "--rewards", "environment", "solved"))
    assert trainer.rollout_func.__wrapped__.limits.max_turns == 21, "as many as a task of one request may take"
    trainer.train()
    (first, *_) = [entry for entry in trainer.state.log_history if "environment/solved" in entry]
    assert first["reward"] == pytest.approx(2 * first["environment/solved"])


def test_a_run_on_tasks_is_evaluated_and_made_again_by_its_own_recipe(folder: Path) -> None:
    arguments = from_recipe(folder, "--eval_questions", "bfcl_multi_turn_base")
    write_recipe(arguments, folder / "out")
    (folder / "out" / "config.json").touch()
    words, recipe = read_words([str(folder / "out")])
    evaluated = for_tasks(evaluation_run.parse_arguments(words, recipe), [question_of(TASK)])
    assert evaluated.evaluation.benchmarks == ["bfcl_multi_turn_base"]
    asked = evaluated.rollout
    assert (asked.max_turns, asked.protocol, asked.max_turn_tokens) == (21, "terse", 24)
    again = parse_arguments(["--config", str(folder / "out" / "recipe.yaml")])
    assert build_rollout(again, qwen_tokenizer()).limits == build_rollout(arguments, qwen_tokenizer()).limits


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rewards", "exact_match"), "'exact_match', but .* holds tasks"),
        (("--prompt_template", "{question}"), "`prompt_template` is .*, but is for questions"),
        (("--no_search", "true"), "`no_search` is .*, but is for questions"),
    ],
)
def test_what_tasks_take_no_notice_of_is_refused(folder: Path, words: tuple[str, ...], said: str) -> None:
    with pytest.raises((ValueError, UserMistake), match=said):
        build_trainer(from_recipe(folder, *words))


def test_trls_own_loop_goes_through_all_requests(tmp_path: Path) -> None:
    """With `environment_factory`: the calls are JSON in the chat template, and a tool brings the next request."""
    task = task_of("multi_turn_base_1:2")
    tokenizer: Any = qwen_tokenizer()
    made = [tool_call("call", calls=f"[{', '.join(calls)}]") for calls in task.solution]
    script = [made[0], tool_call("done"), made[1], tool_call("done"), "That was all."]
    (row,) = prompt_rows([task], compact=True)
    row["prompt"][-1]["content"] = f"Row 0. {task.requests[0]}"
    trainer = GRPOTrainer(
        build_policy(vocab_size=len(tokenizer)),
        lambda environments, **_: [environment.get_reward() for environment in environments],
        GRPOConfig(**settings(tmp_path, max_completion_length=2000, max_steps=1)),
        Dataset.from_list([row] * 8),
        processing_class=tokenizer,
        environment_factory=BFCLTools,
    )
    trainer._generate_single_turn = following(tokenizer, lambda row, turn: script[turn])
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert entry["reward"] == 1.0
